/* worker/control.c: see control.h.
 *
 * Owns: the control socket and its thread.  Called by: main.c.
 * Fails how: see control.h.  Limits: CONTROL_NOTES.
 * Tested by: tests/unit/test_worker.c
 *
 * One mutex guards everything the two threads share, and each side has an event descriptor to be
 * woken by; nothing is done under the mutex but copying, and the abort itself: it must not
 * meet a communicator that the step thread is just closing.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "proto/log.h"
#include "proto/wire.h"
#include "worker/control.h"

#define LAST_WORDS_MS 1000    /* how long FAILED may take to leave */
#define STOP_BOUND_US 3000000 /* a step thread that does not follow a STOP is left behind */
#define ROWS_PER_SPAN 128     /* so many rows double the time a step may take, as in the fleet */

struct notes {
    struct note ring[CONTROL_NOTES];
    unsigned head, tail;
    int fd; /* eventfd: something was put */
};

struct control {
    struct control_options o;
    struct wire *wire;
    struct msg *in, *out; /* large, reused */
    struct probe *probe;  /* of the control thread alone, once that runs */
    pthread_t thread;

    pthread_mutex_t mutex; /* guards everything below */
    struct notes inbox, outbox;
    struct coll *coll;
    bool any_aborted;
    uint32_t aborted; /* the newest generation that was aborted */
    struct msg_beat beat;
    uint64_t last_step_at_us;
    uint64_t step_began_us; /* 0: none is under way */
    int step_rows;
    int graphs; /* captured by the last JOIN that captured any */
    uint64_t graph_bytes;
    double graph_seconds;
    uint32_t generation;    /* of the newest communicator */
    char last_error[512];
    uint64_t stop_by_us; /* 0: no STOP yet */
    bool closing;
};

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* ---- the mailbox, under the mutex -------------------------------------------------------- */

/* Progress supersedes progress not yet sent, and an abort heard twice is one abort. */
static bool supersedes(const struct note *n, const struct note *last) {
    if (n->type != last->type) return false;
    return n->type == MSG_PROGRESS ||
           (n->type == MSG_ABORT && n->generation.generation == last->generation.generation);
}

static void notes_put(struct notes *q, const struct note *n) {
    if (q->tail != q->head && supersedes(n, &q->ring[(q->tail - 1) % CONTROL_NOTES])) {
        q->ring[(q->tail - 1) % CONTROL_NOTES] = *n;
        return;
    }
    if (q->tail - q->head == CONTROL_NOTES) {
        log_error("mailbox_full", "notes=%d", CONTROL_NOTES);
        abort();
    }
    q->ring[q->tail++ % CONTROL_NOTES] = *n;
    uint64_t one = 1;
    ssize_t rc = write(q->fd, &one, sizeof one);
    assert(rc == (ssize_t)sizeof one);
}

static bool notes_get(struct notes *q, struct note *out) {
    uint64_t count;
    if (q->head == q->tail) {
        ssize_t rc = read(q->fd, &count, sizeof count);
        assert(rc == (ssize_t)sizeof count || errno == EAGAIN);
        return false;
    }
    *out = q->ring[q->head++ % CONTROL_NOTES];
    return true;
}

/* ---- the control thread ------------------------------------------------------------------ */

static void send_out(struct control *c) {
    int rc = wire_send(c->wire, (struct wire_peer){0}, c->out);
    if (rc < 0)
        log_warn("control_send_failed", "type=%d error=%s", (int)c->out->type, err_name(rc));
}

static void send_note(struct control *c, const struct note *n) {
    struct msg *m = c->out;
    m->type = n->type;
    switch (n->type) {
    case MSG_PROGRESS:
        m->progress = n->progress;
        break;
    case MSG_LOADED:
        m->loaded = n->loaded;
        break;
    case MSG_JOINED:
        m->joined = n->generation;
        break;
    case MSG_ABORTED:
        m->aborted = n->generation;
        break;
    case MSG_FAILED:
        m->failed = n->failed;
        break;
    case MSG_HELLO:
        pthread_mutex_lock(&c->mutex);
        m->hello = c->o.hello;
        pthread_mutex_unlock(&c->mutex);
        break;
    default:
        assert(!"not a note for the coordinator");
    }
    send_out(c);
}

static void send_beat(struct control *c) {
    pthread_mutex_lock(&c->mutex);
    c->out->type = MSG_BEAT;
    c->out->beat = c->beat;
    c->out->beat.last_step_age_us = c->last_step_at_us ? now_us() - c->last_step_at_us : 0;
    pthread_mutex_unlock(&c->mutex);
    send_out(c);
}

static void send_notes(struct control *c) {
    struct note n = {0};
    for (;;) {
        pthread_mutex_lock(&c->mutex);
        bool any = notes_get(&c->outbox, &n);
        pthread_mutex_unlock(&c->mutex);
        if (!any) return;
        send_note(c, &n);
    }
}

static void turn_probe(struct control *c) {
    char last_error[sizeof c->last_error], device[sizeof c->o.hello.device];
    struct probe_status s = {.rank = c->o.rank,
                             .world = c->o.world,
                             .pid = c->o.hello.pid,
                             .start_time = c->o.hello.start_time,
                             .device = device,
                             .last_error = last_error};
    if (!c->probe) return;
    pthread_mutex_lock(&c->mutex);
    s.beat = c->beat;
    s.generation = c->generation;
    s.last_step_at_us = c->last_step_at_us;
    s.step_began_us = c->step_began_us;
    s.graphs = c->graphs;
    s.graph_bytes = c->graph_bytes;
    s.graph_seconds = c->graph_seconds;
    s.step_bound_us = (uint64_t)c->o.step_limit_s * 1000000 *
                      (uint64_t)(ROWS_PER_SPAN + c->step_rows) / ROWS_PER_SPAN;
    memcpy(last_error, c->last_error, sizeof last_error);
    memcpy(device, c->o.hello.device, sizeof device);
    pthread_mutex_unlock(&c->mutex);
    probe_turn(c->probe, &s, now_us());
}

/* ABORT: the communicator first, then the note for when the step thread comes out. */
static void hear_abort(struct control *c, uint32_t generation) {
    struct note n = {.type = MSG_ABORT, .generation = {generation}};
    pthread_mutex_lock(&c->mutex);
    if (!c->any_aborted || generation > c->aborted) c->aborted = generation;
    c->any_aborted = true;
    if (c->coll && c->coll->generation <= c->aborted) coll_abort(c->coll);
    notes_put(&c->inbox, &n);
    pthread_mutex_unlock(&c->mutex);
}

/* STOP: nobody waits for a peer any more. */
static void hear_stop(struct control *c) {
    struct note n = {.type = MSG_STOP};
    pthread_mutex_lock(&c->mutex);
    c->stop_by_us = now_us() + STOP_BOUND_US;
    c->beat.state = WORKER_DRAINING;
    if (c->coll) coll_abort(c->coll);
    notes_put(&c->inbox, &n);
    pthread_mutex_unlock(&c->mutex);
}

static void hear(struct control *c) {
    struct note n;
    switch (c->in->type) {
    case MSG_ABORT:
        hear_abort(c, c->in->abort.generation);
        break;
    case MSG_STOP:
        hear_stop(c);
        break;
    case MSG_JOIN:
        n = (struct note){.type = MSG_JOIN, .join = c->in->join};
        pthread_mutex_lock(&c->mutex);
        notes_put(&c->inbox, &n);
        pthread_mutex_unlock(&c->mutex);
        break;
    default:
        log_warn("unexpected_message", "socket=control type=%d", (int)c->in->type);
    }
}

static void hear_all(struct control *c) {
    struct wire_peer peer;
    for (;;) {
        int rc = wire_recv(c->wire, &peer, c->in, 0);
        if (rc == ERR_AGAIN || rc == ERR_SYS) return;
        if (rc < 0)
            log_error("bad_message", "socket=control error=%s", err_name(rc));
        else
            hear(c);
    }
}

/* The two ends that do not go through the step thread. */
static void check_ends(struct control *c) {
    pthread_mutex_lock(&c->mutex);
    bool late = c->stop_by_us && now_us() > c->stop_by_us;
    pthread_mutex_unlock(&c->mutex);
    if (c->o.parent_pid && getppid() != c->o.parent_pid) _exit(EXIT_FAILED);
    if (!late) return;
    log_warn("stopped_late", "bound_us=%d", STOP_BOUND_US);
    _exit(EXIT_ASKED);
}

static void *control_main(void *arg) {
    struct control *c = arg;
    uint64_t next_beat = now_us();
    send_note(c, &(struct note){.type = MSG_HELLO});
    for (bool closing = false; !closing;) {
        pthread_mutex_lock(&c->mutex);
        closing = c->closing;
        pthread_mutex_unlock(&c->mutex);
        send_notes(c);
        if (now_us() >= next_beat) {
            next_beat = now_us() + MSG_BEAT_MS * 1000;
            check_ends(c);
            if (!closing) send_beat(c);
        }
        turn_probe(c);
        hear_all(c); /* after sending: the descriptor is edge-triggered */
        if (closing) break;
        struct pollfd fds[2 + PROBE_FDS] = {{.fd = wire_fd(c->wire), .events = POLLIN},
                                            {.fd = c->outbox.fd, .events = POLLIN}};
        nfds_t n = 2 + (nfds_t)(c->probe ? probe_fds(c->probe, fds + 2) : 0);
        uint64_t now = now_us();
        poll(fds, n, now < next_beat ? (int)((next_beat - now) / 1000 + 1) : 0);
    }
    wire_close_within(c->wire, LAST_WORDS_MS);
    return NULL;
}

/* ---- the step thread's side -------------------------------------------------------------- */

static void control_free(struct control *c) {
    if (c->inbox.fd >= 0) close(c->inbox.fd);
    if (c->outbox.fd >= 0) close(c->outbox.fd);
    pthread_mutex_destroy(&c->mutex);
    probe_close(c->probe);
    free(c->in);
    free(c->out);
    free(c);
}

/* Signals are for the step thread: the control thread is started with all of them blocked. */
static int start_thread(struct control *c) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&c->thread, NULL, control_main, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

int control_start(struct control **out, const struct control_options *o, struct err_text *err) {
    struct control *c = calloc(1, sizeof *c);
    if (!c) {
        probe_close(o->probe);
        return err_set(err, ERR_NOMEM, "control: expected memory, found none");
    }
    c->o = *o;
    c->probe = o->probe;
    pthread_mutex_init(&c->mutex, NULL);
    c->inbox.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->outbox.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->in = malloc(sizeof *c->in);
    c->out = malloc(sizeof *c->out);
    int rc = c->in && c->out && c->inbox.fd >= 0 && c->outbox.fd >= 0
                 ? OK
                 : err_set(err, ERR_NOMEM, "control: expected memory and descriptors, found none");
    if (rc == OK)
        rc = wire_connect(&c->wire, o->endpoint, (struct wire_peer){o->rank, o->incarnation, 'c'},
                          err);
    if (rc == OK && start_thread(c) != 0) {
        wire_close(c->wire);
        rc = err_set(err, ERR_SYS, "control: expected to start a thread, found: %s",
                     strerror(errno));
    }
    if (rc < 0)
        control_free(c);
    else
        *out = c;
    return rc;
}

void control_stop(struct control *c) {
    uint64_t one = 1;
    pthread_mutex_lock(&c->mutex);
    c->closing = true;
    ssize_t rc = write(c->outbox.fd, &one, sizeof one);
    assert(rc == (ssize_t)sizeof one);
    pthread_mutex_unlock(&c->mutex);
    pthread_join(c->thread, NULL);
    control_free(c);
}

void control_post(struct control *c, const struct note *n) {
    pthread_mutex_lock(&c->mutex);
    if (n->type == MSG_PROGRESS) {
        c->beat.load_bytes = n->progress.bytes;
        c->beat.load_total = n->progress.total;
    }
    if (n->type == MSG_FAILED) memcpy(c->last_error, n->failed.text, sizeof c->last_error);
    notes_put(&c->outbox, n);
    pthread_mutex_unlock(&c->mutex);
}

bool control_next(struct control *c, struct note *out) {
    pthread_mutex_lock(&c->mutex);
    bool any = notes_get(&c->inbox, out);
    pthread_mutex_unlock(&c->mutex);
    return any;
}

bool control_has_next(struct control *c) {
    pthread_mutex_lock(&c->mutex);
    bool any = c->inbox.head != c->inbox.tail;
    pthread_mutex_unlock(&c->mutex);
    return any;
}

int control_fd(const struct control *c) {
    return c->inbox.fd;
}

void control_set_coll(struct control *c, struct coll *coll) {
    pthread_mutex_lock(&c->mutex);
    c->coll = coll;
    if (coll) c->generation = coll->generation;
    if (coll && ((c->any_aborted && coll->generation <= c->aborted) || c->stop_by_us))
        coll_abort(coll);
    pthread_mutex_unlock(&c->mutex);
}

void control_name_device(struct control *c, const char *name) {
    struct note n = {.type = MSG_HELLO};
    pthread_mutex_lock(&c->mutex);
    snprintf(c->o.hello.device, sizeof c->o.hello.device, "%s", name);
    notes_put(&c->outbox, &n);
    pthread_mutex_unlock(&c->mutex);
}

void control_set_state(struct control *c, enum worker_state state) {
    pthread_mutex_lock(&c->mutex);
    if (c->beat.state != WORKER_DRAINING) c->beat.state = state;
    pthread_mutex_unlock(&c->mutex);
}

void control_set_memory(struct control *c, uint64_t used_bytes, uint64_t free_bytes) {
    pthread_mutex_lock(&c->mutex);
    c->beat.memory_used_bytes = used_bytes;
    c->beat.memory_free_bytes = free_bytes;
    pthread_mutex_unlock(&c->mutex);
}

void control_set_graphs(struct control *c, int graphs, uint64_t bytes, double seconds) {
    pthread_mutex_lock(&c->mutex);
    c->graphs = graphs;
    c->graph_bytes = bytes;
    c->graph_seconds = seconds;
    pthread_mutex_unlock(&c->mutex);
}

void control_step_begin(struct control *c, int rows) {
    pthread_mutex_lock(&c->mutex);
    c->step_began_us = now_us();
    c->step_rows = rows;
    pthread_mutex_unlock(&c->mutex);
    control_set_state(c, WORKER_STEPPING);
}

void control_step_left(struct control *c) {
    pthread_mutex_lock(&c->mutex);
    c->step_began_us = 0;
    pthread_mutex_unlock(&c->mutex);
}

void control_step_done(struct control *c, uint64_t step_id) {
    pthread_mutex_lock(&c->mutex);
    c->beat.last_step = step_id;
    c->last_step_at_us = now_us();
    c->step_began_us = 0;
    pthread_mutex_unlock(&c->mutex);
}
