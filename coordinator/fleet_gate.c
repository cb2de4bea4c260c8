/* coordinator/fleet_gate.c: the reclaim gate as the fleet uses it. See reclaim.h.
 *
 * Owns: the source of device memory, the gate.  Called by: fleet.c, from its tick.
 * Fails how: fleet_gate_open with ERR_SETUP or ERR_TIMEOUT and a sentence; a verdict other than returned is fatal.
 * Tested by: tests/unit/test_engine.c, tests/faults/test_reclaim.py
 *
 * What a rank holds is looked at often while it loads, when that changes, and seldom afterwards, one
 * device at a time: this is the thread that feeds the workers. A look takes 40 to 70 us on an H200
 * (2026-12); a driver in trouble may never answer, so it is asked from a thread (device_thread.h).
 */
#include <inttypes.h>
#include <string.h>

#include "coordinator/device_thread.h"
#include "coordinator/fleet_state.h"
#include "coordinator/gpus.h"
#include "proto/log.h"

#define WATCH_LOADING_US 250000ull
#define WATCH_READY_US   (SECOND_US / 2)

int fleet_gate_open(struct fleet *f, struct err_text *err) {
    const struct engine_options *o = &f->o;
    bool cuda = !strcmp(o->device, "cuda");
    const char *source = o->device_memory ? o->device_memory : cuda ? "nvml" : "none";
    struct reclaim_host host = reclaim_host_here(f->launch.cookie);
    struct err_text why = {0};
    int rc = device_thread_open(&f->memory, source, DEVICE_OPEN_MS, &why);
    if (rc == ERR_NOT_FOUND) /* still serves; a restart may then meet memory that is not back yet */
        log_warn("no_device_memory", "why=\"%s\"", why.text);
    else if (rc < 0) return err_set(err, rc == ERR_TIMEOUT ? rc : ERR_SETUP, "%s", why.text);
    reclaim_init(&f->gate, &f->memory, &host, (uint64_t)o->reclaim_timeout_s * SECOND_US);
    return OK;
}

void fleet_gate_close(struct fleet *f) {
    if (f->memory.ops) device_memory_close(&f->memory);
}

/* The device as the driver counts; -1: it has not said. A script has no names, only numbers. */
static int device_of(const struct fleet *f, const struct worker *w) {
    int count = device_memory_count(&f->memory);
    if (count == 0) return -1;
    if (strcmp(f->memory.ops->name, "nvml")) return w->rank % count;
    return w->hello ? device_memory_find(&f->memory, w->device) : -1;
}

static struct reclaim_rank rank_of(const struct fleet *f, const struct worker *w) {
    return (struct reclaim_rank){w->rank, w->child.pid, w->child.start_time, device_of(f, w),
                                 w->beat.memory_used_bytes};
}

void fleet_gate_watch(struct fleet *f, uint64_t now_us) {
    struct reclaim_rank ranks[LIMIT_RANKS];
    int n = 0;
    if (now_us < f->gate.watch_due_us) return;
    for (int r = 0; r < f->world; r++)
        if (f->w[r].child.open && !f->w[r].child.exited) ranks[n++] = rank_of(f, &f->w[r]);
    reclaim_watch(&f->gate, ranks, n,
                  f->state == FLEET_READY ? WATCH_READY_US : WATCH_LOADING_US, now_us);
    if (f->gate.watch_due_us <= now_us) f->gate.watch_due_us = now_us + WATCH_READY_US;
}

void fleet_gate_begin(struct fleet *f, uint64_t now_us) {
    struct reclaim_rank dead[LIMIT_RANKS];
    int n = 0;
    if (f->gate.verdict == RECLAIM_WAITING && !f->gate.starting) /* another died meanwhile */
        for (int i = 0; i < f->gate.n_dead; i++)
            f->gate.held[f->gate.dead[i].rank.rank] = f->gate.dead[i];
    for (int r = 0; r < f->world; r++) {
        if (!f->w[r].lost) continue;
        f->w[r].state = WORKER_RECLAIMING;
        if (f->w[r].child.pid > 0) dead[n++] = rank_of(f, &f->w[r]);
    }
    reclaim_begin(&f->gate, dead, n, now_us);
}

bool fleet_gate_begin_start(struct fleet *f, uint64_t now_us) {
    bool on[DEVICE_MAX];
    reclaim_begin_start(&f->gate, f->o.n_devices ? MIN(f->o.n_devices, f->world) : f->world, now_us);
    if (f->o.gpus && gpus_devices(f->o.gpus, f->world, &f->memory, on))
        reclaim_look_at(&f->gate, on);
    if (reclaim_poll(&f->gate, now_us) == RECLAIM_RETURNED) return true;
    for (int r = 0; r < f->world; r++) f->w[r].state = WORKER_RECLAIMING;
    return false;
}

bool fleet_gate_passed(struct fleet *f, uint64_t now_us) {
    bool waited = f->gate.verdict == RECLAIM_WAITING;
    enum reclaim_verdict v = reclaim_poll(&f->gate, now_us);
    if (v == RECLAIM_WAITING) {
        if (now_us - f->gate.begun_us > SECOND_US)
            snprintf(f->why, sizeof f->why, "waiting for device memory: %.200s",
                     reclaim_sentence(&f->gate));
        return false;
    }
    if (v != RECLAIM_RETURNED) {
        fleet_fatal(f, EXIT_DEVICE, now_us, "%s", reclaim_sentence(&f->gate));
        return false;
    }
    if (waited && !f->gate.starting) {
        f->reclaims++;
        f->reclaim_seconds += reclaim_seconds(&f->gate);
    }
    return true;
}
