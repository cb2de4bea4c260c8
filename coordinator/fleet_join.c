/* coordinator/fleet_join.c: from LOADED to READY: one cache size, one shared memory, one
 * generation, the same caches.
 *
 * Owns: the shared memory of the present generation.  Called by: fleet.c from its tick.
 * Fails how: a rank is lost, or the fleet ends with EXIT_SETUP when no cache page fits.
 * Tested by: tests/unit/test_engine.c, tests/unit/test_fleet.c
 *
 * Every generation of the communicator has memory of its own: what a dead rank left half done in
 * the old one is never read. It has no name in any file system; workers open it through this
 * process's descriptor, so it is gone when the last of us is.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "coordinator/cacheplan.h"
#include "coordinator/fleet_state.h"
#include "proto/log.h"

#define COPY_LEAST_US   (10 * SECOND_US)
#define COPY_LEAST_RATE 20.0 /* bytes a microsecond: slower is stuck */

static int plan_pages(const struct fleet *f, int64_t *pages, struct err_text *err) {
    struct cache_room room = {.host_memory = !strcmp(f->o.device, "cpu"),
                              .host_available_bytes = cache_host_available(),
                              .free_bytes = UINT64_MAX,
                              .world = f->world,
                              .context = f->o.context,
                              .max_seqs = f->o.max_seqs,
                              .cache_tokens = f->o.cache_tokens};
    for (int r = 0; r < f->world; r++) {
        int shared = 0;
        for (int k = 0; k < f->world; k++) shared += !strcmp(f->w[k].device, f->w[r].device);
        room.ranks_per_device = MAX(room.ranks_per_device, shared);
        room.free_bytes = MIN(room.free_bytes, f->w[r].sizes.free_bytes);
        room.page_bytes = MAX(room.page_bytes, f->w[r].sizes.page_bytes);
    }
    return cache_plan(&room, pages, err);
}

static uint64_t shm_open_new(struct fleet *f) {
    uint64_t bytes = 0;
    for (int r = 0; r < f->world; r++) bytes = MAX(bytes, f->w[r].sizes.shm_bytes);
    if (bytes == 0) return 0;
    assert(f->shm_fd < 0);
    f->shm_fd = memfd_create("octavo-collective", MFD_CLOEXEC);
    if (f->shm_fd >= 0 && ftruncate(f->shm_fd, (off_t)bytes) == 0) return bytes;
    return UINT64_MAX;
}

/* Whose caches the others can have. When nobody has them, all start empty and all that was known is
 * computed again. */
static void look_for_caches(struct fleet *f) {
    f->root = -1;
    f->needs = 0;
    f->copies = 0;
    for (int r = f->world - 1; r >= 0; r--) {
        f->w[r].copied = 0;
        if (f->w[r].caches)
            f->root = r;
        else
            f->needs |= 1u << r;
    }
    f->lost |= f->root < 0;
}

/* All are LOADED: says JOIN to everybody, with the same numbers. */
void fleet_join_all(struct fleet *f, uint64_t now_us) {
    progress_end(&f->progress);
    struct err_text err;
    if (f->pages == 0 && plan_pages(f, &f->pages, &err) < 0) {
        fleet_fatal(f, EXIT_SETUP, now_us, "%s", err.text);
        return;
    }
    uint64_t shm_bytes = shm_open_new(f);
    if (shm_bytes == UINT64_MAX) {
        fleet_fatal(f, EXIT_FAILED, now_us, "shared memory for the collectives: %s",
                    strerror(errno));
        return;
    }
    f->recovery.loaded_us = now_us;
    look_for_caches(f);
    struct msg *m = f->in; /* nothing is being read */
    m->type = MSG_JOIN;
    m->join = (struct msg_join){.generation = ++f->generation,
                                .world = f->world,
                                .pages = f->pages + 1, /* the canary's is the last */
                                .shm_bytes = shm_bytes};
    if (shm_bytes)
        snprintf(m->join.shm_path, sizeof m->join.shm_path, "/proc/%d/fd/%d", (int)getpid(),
                 f->shm_fd);
    fleet_enter(f, FLEET_JOINING, now_us);
    for (int r = 0; r < f->world; r++) {
        m->join.caches_valid = f->w[r].caches;
        f->w[r].joined = false;
        f->w[r].in_group = true;
        int rc = wire_send(f->wire, fleet_peer(&f->w[r], 'c'), m);
        if (rc < 0) {
            fleet_lose(f, &f->w[r], CAUSE_EXIT, now_us, "JOIN could not be sent: %s", err_name(rc));
            return;
        }
    }
}

/* JOINED came over the control socket and says nothing of the step socket, whose connection may
 * still be on its way. A step of generation 0 with nothing in it, which every worker drops, knocks:
 * it can be sent, or the socket is not known yet. */
static bool knock(struct fleet *f, struct worker *w, uint64_t now_us) {
    struct msg *m = f->in; /* nothing is being read */
    if (w->reachable) return true;
    m->type = MSG_STEP;
    m->step.id = 0;
    m->step.generation = 0;
    m->step.n_entries = m->step.n_tokens = m->step.n_pages = 0;
    int rc = wire_send(f->wire, fleet_peer(w, 's'), m);
    if (rc < 0 && rc != ERR_CLOSED)
        fleet_lose(f, w, CAUSE_EXIT, now_us, "its step socket could not be reached: %s",
                   err_name(rc));
    return w->reachable = rc == OK;
}

static void check_joined(struct fleet *f, uint64_t now_us) {
    for (int r = 0; r < f->world; r++)
        if (!f->w[r].joined || !knock(f, &f->w[r], now_us)) return;
    log_info("joined", "ranks=%d generation=%u pages=%" PRId64 " cache_tokens=%" PRId64, f->world,
             f->generation, f->pages, f->pages * LIMIT_PAGE_TOKENS);
    f->recovery.joined_us = now_us;
    f->recovery.pages = 0;
    f->canary = FLEET_CANARY_WANTED;
    fleet_enter(f, FLEET_CANARY, now_us);
}

static double ms(uint64_t from_us, uint64_t to_us) {
    return to_us > from_us ? (double)(to_us - from_us) / 1e3 : 0;
}

static void tell_recovery(struct fleet *f, uint64_t now_us) {
    const struct recovery *r = &f->recovery;
    char ranks[4 * LIMIT_RANKS] = "none";
    for (int k = 0, n = 0; k < f->world; k++)
        if (r->ranks >> k & 1)
            n += snprintf(ranks + n, sizeof ranks - (size_t)n, "%s%d", n ? "," : "", k);
    if (r->died_us)
        log_info("recovered",
                 "ranks=%s by=%s notice_ms=%.1f reclaim_ms=%.1f load_ms=%.1f join_ms=%.1f"
                 " canary_ms=%.1f copy_ms=%.1f pages=%" PRId64 " total_ms=%.1f",
                 ranks, f->root < 0 ? "replay" : "copy", ms(r->died_us, r->lost_us),
                 ms(r->lost_us, r->spawned_us), ms(r->spawned_us, r->loaded_us),
                 ms(r->loaded_us, r->joined_us), ms(r->joined_us, r->sung_us),
                 ms(r->sung_us, now_us), r->pages,
                 ms(r->died_us, now_us));
    f->recovery = (struct recovery){0};
}

static uint64_t copy_bound_us(const struct fleet *f) {
    double bytes = (double)f->recovery.pages * (double)f->w[f->root].sizes.page_bytes;
    return COPY_LEAST_US + (uint64_t)(bytes / COPY_LEAST_RATE);
}

void fleet_check_restore(struct fleet *f, uint64_t now_us) {
    if (f->want_restore) return; /* to be sent yet */
    for (int r = 0; r < f->world; r++)
        if (f->w[r].copied < f->copies) {
            if (now_us - f->state_us > copy_bound_us(f)) {
                log_warn("copy_late", "pages=%" PRId64 " first_without_answer=%d",
                         f->recovery.pages, r);
                fleet_break(f, SECOND_US, now_us);
            }
            return;
        }
    for (int r = 0; r < f->world; r++) {
        f->w[r].state = WORKER_READY;
        f->w[r].caches = f->w[r].worked = true;
        if (!f->w[r].ready_us) f->w[r].ready_us = now_us;
    }
    f->why[0] = 0;
    tell_recovery(f, now_us);
    fleet_enter(f, FLEET_READY, now_us);
}

void fleet_check_join(struct fleet *f, uint64_t now_us) {
    if (now_us - f->state_us > (uint64_t)f->o.load_timeout_s * SECOND_US)
        for (int r = 0; r < f->world; r++)
            if (!f->w[r].joined || !f->w[r].reachable)
                fleet_lose(f, &f->w[r], CAUSE_STUCK, now_us, "not joined within %d s",
                           f->o.load_timeout_s);
    if (f->state == FLEET_JOINING) check_joined(f, now_us);
}
