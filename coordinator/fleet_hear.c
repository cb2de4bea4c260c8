/* coordinator/fleet_hear.c: what the workers say, and whether it can be believed.
 *
 * Owns: nothing.  Called by: fleet.c from its tick.
 * Fails how: a rank that makes no sense is lost; one of another build ends the fleet (EXIT_SETUP).
 * Limits: LIMIT_RANKS.  Tested by: tests/unit/test_engine.c
 *
 * A message counts only if its sender's incarnation is the present one, if that process has shown
 * the cookie in its HELLO, and, for answers, if the generation is the present one. The rest is late
 * or foreign, and dropped.
 */
#include <inttypes.h>
#include <string.h>

#include "coordinator/fleet_state.h"
#include "proto/log.h"

/* Where there was a service already, somebody has put another program in its place: a new
 * coordinator will fit it. */
static int code_of_mismatch(const struct worker *w) {
    return w->worked ? EXIT_FAILED : EXIT_SETUP;
}

/* A stranger is ignored; one of ours that was built otherwise is a wrong set-up. */
static void hear_hello(struct fleet *f, struct worker *w, const struct msg_hello *h,
                       uint64_t now_us) {
    if (strcmp(h->cookie, f->launch.cookie) || h->rank != w->rank || h->pid != w->child.pid) {
        log_warn("hello_refused", "rank=%d pid=%" PRId64 " why=\"not a process of ours\"", h->rank,
                 h->pid);
        return;
    }
    if (h->limits != limits_digest())
        fleet_fatal(f, code_of_mismatch(w), now_us,
                    "%.120s: digest of limits: expected %016" PRIx64 ", found %016" PRIx64,
                    f->o.worker_path, limits_digest(), h->limits);
    else if (strcmp(h->build, log_build()))
        fleet_fatal(f, code_of_mismatch(w), now_us, "%.120s: build: expected %s, found %.63s",
                    f->o.worker_path, log_build(), h->build);
    else {
        w->hello = true;
        w->state = WORKER_LOADING;
        snprintf(w->device, sizeof w->device, "%s", h->device);
    }
}

/* Rank `w` has answered step `id`: the next one it owes, or it makes no sense. */
static struct flight *answered(struct fleet *f, struct worker *w, uint64_t id, uint32_t generation,
                               uint64_t now_us) {
    if (generation != f->generation) return NULL;
    if (f->state != FLEET_READY && f->state != FLEET_CANARY) return NULL;
    for (int i = 0; i < f->n_flight; i++) {
        struct flight *s = &f->flight[(f->flight_head + i) % SCHED_DEPTH_MAX];
        if (s->id <= w->answered) continue;
        if (s->id != id) break;
        w->answered = w->last_step = id;
        w->last_step_us = now_us;
        w->state = i + 1 < f->n_flight ? WORKER_STEPPING : WORKER_READY;
        return s;
    }
    fleet_lose(f, w, CAUSE_NONSENSE, now_us, "it answered step %" PRIu64 ", which it does not owe",
               id);
    return NULL;
}

static void hear_tokens(struct fleet *f, struct worker *w, const struct msg_tokens *t,
                        uint64_t now_us) {
    if (w->rank != 0) {
        fleet_lose(f, w, CAUSE_NONSENSE, now_us, "it sent TOKENS, which only rank 0 may");
        return;
    }
    struct flight *s = answered(f, w, t->step_id, t->generation, now_us);
    if (!s) return;
    size_t used = offsetof(struct msg_tokens, tokens) + (size_t)t->n * sizeof t->tokens[0];
    memcpy(&s->tokens, t, used);
    s->has_tokens = true;
}

/* A step is done, or while restoring a copy. */
static void hear_done(struct fleet *f, struct worker *w, const struct msg_done *d,
                      uint64_t now_us) {
    if (f->state != FLEET_RESTORING)
        answered(f, w, d->step_id, d->generation, now_us);
    else if (d->generation == f->generation && d->step_id == w->copied + 1)
        w->copied = d->step_id;
}

/* It is out of the group and has let go of the others' memory. */
static void hear_aborted(struct fleet *f, struct worker *w, uint32_t generation) {
    if (generation != f->generation || !w->abort_us) return;
    w->abort_us = 0;
    w->in_group = w->joined = false;
    w->state = WORKER_LOADED;
}

static void hear(struct fleet *f, struct worker *w, const struct msg *m, uint64_t now_us) {
    w->heard_us = now_us;
    switch (m->type) {
    case MSG_PROGRESS:
        if (w->load_bytes != m->progress.bytes) f->moved_us = now_us;
        w->load_bytes = m->progress.bytes;
        w->load_total = m->progress.total;
        break;
    case MSG_LOADED:
        w->loaded = true;
        f->moved_us = now_us;
        w->state = WORKER_LOADED;
        w->sizes = m->loaded;
        w->load_bytes = w->load_total;
        break;
    case MSG_JOINED:
        if (m->joined.generation != f->generation) break;
        w->joined = true;
        f->moved_us = now_us;
        break;
    case MSG_TOKENS:
        hear_tokens(f, w, &m->tokens, now_us);
        break;
    case MSG_DONE:
        hear_done(f, w, &m->done, now_us);
        break;
    case MSG_BEAT:
        w->beat = m->beat;
        if (w->state == WORKER_LOADED && m->beat.state == WORKER_CAPTURING) {
            w->state = WORKER_CAPTURING; /* until all are ready */
            f->moved_us = now_us;
        }
        break;
    case MSG_FAILED:
        w->failed = m->failed;
        w->failed_us = now_us;
        break;
    case MSG_ABORTED:
        hear_aborted(f, w, m->aborted.generation);
        break;
    case MSG_HELLO: /* again, with the device's name */
        if (m->hello.pid == w->child.pid)
            snprintf(w->device, sizeof w->device, "%s", m->hello.device);
        break;
    default:
        fleet_lose(f, w, CAUSE_NONSENSE, now_us, "it sent message type %d, which is ours to send",
                   (int)m->type);
    }
}

/* Of a rank given up only its last words count: they tell why it ended. */
static bool spoke_last(int rc, const struct msg *m) {
    return rc == OK && m->type == MSG_FAILED;
}

static void hear_from(struct fleet *f, struct wire_peer from, int rc, uint64_t now_us) {
    struct msg *m = f->in;
    if (from.rank < 0 || from.rank >= f->world) return;
    struct worker *w = &f->w[from.rank];
    if (from.incarnation != w->incarnation || (w->lost && !spoke_last(rc, f->in))) return;
    if (rc == ERR_VERSION) /* nothing else of such a HELLO can be read */
        fleet_fatal(f, code_of_mismatch(w), now_us, "%.120s: protocol: expected %d, found %u",
                    f->o.worker_path, MSG_PROTOCOL, m->hello.protocol);
    else if (rc < 0 && w->hello)
        fleet_lose(f, w, CAUSE_NONSENSE, now_us, "it sent bytes that do not parse");
    else if (rc < 0)
        return;
    else if (m->type == MSG_HELLO && !w->hello)
        hear_hello(f, w, &m->hello, now_us);
    else if (w->hello)
        hear(f, w, m, now_us);
}

void fleet_hear_all(struct fleet *f, uint64_t now_us) {
    struct wire_peer from = f->pending_from;
    int rc = f->has_pending ? OK : wire_recv(f->wire, &from, f->in, 0);
    for (; rc != ERR_AGAIN && rc != ERR_SYS && rc != ERR_NOMEM;
         rc = wire_recv(f->wire, &from, f->in, 0)) {
        f->has_pending = false;
        hear_from(f, from, rc, now_us);
    }
}

bool fleet_pending(struct fleet *f) {
    while (!f->has_pending) {
        int rc = wire_recv(f->wire, &f->pending_from, f->in, 0);
        if (rc == ERR_AGAIN || rc == ERR_SYS || rc == ERR_NOMEM) return false;
        if (rc == OK)
            f->has_pending = true;
        else
            hear_from(f, f->pending_from, rc, f->tick_us);
    }
    return true;
}
