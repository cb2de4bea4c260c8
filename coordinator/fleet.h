/* coordinator/fleet.h: the worker processes as one thing that can take a step.
 *
 *             all LOADED        all JOINED        one token        pages copied
 *   ┌──> LOADING ────────> JOINING ────────> CANARY ────────> RESTORING ─────> READY
 *   │       │                 │                 │                 │              │
 *   │       │   a death, silence, a step too long, an answer that makes no sense, FAILED:
 *   │       │   kill -9 that rank, ABORT to those in the group
 *   │       └─────────────────┴─────────────┬───┴─────────────────┴──────────────┘
 *   │ spawn the dead, nobody else           v
 *   └───── WAITING <─────────────────── CLEARING ⟲  a survivor that does not leave the step in time
 *          reclaim gate, back-off           │       is dead too; until every exit and every ABORTED
 *             │ another death: CLEARING     │       is seen
 *             v                             │ too many restarts; exit code 2 or 3
 *   fleet_stop, from anywhere               v
 *   STOPPING (STOP, after a bound SIGKILL) ──> STOPPED <── FAILED (kill -9, see all exits)
 *
 * One rank:  SPAWNED ─> LOADING ─> LOADED ─> READY <─> STEPPING
 *                            ^  \        ^________│________│ ABORTED: a survivor keeps its weights
 *   SPAWNED <─ RECLAIMING <─ DEAD <──────  from anywhere        and its caches
 *            and, asked to stop, DRAINING ─> DEAD
 *
 * What a recovery does to the scheduler: fleet_take_broken (steps in flight are void), and then
 * either fleet_wants_restore (a survivor has the caches: they are copied to the newborn, every slot
 * is told its history) or, when nobody has them, fleet_take_lost (all is computed again).
 *
 * Owns: the processes, the ROUTER socket, the shared memory of the present generation.
 * Called by: engine.c, from its tick on the loop thread.
 * Fails how: fleet_start with ERR_SETUP and a sentence; later it recovers by itself, or ends in
 * FLEET_FAILED with an exit code and a sentence.
 * Limits: LIMIT_RANKS.  Tested by: tests/unit/test_fleet.c (with tests/unit/fake_worker.c)
 */
#ifndef OCTAVO_COORDINATOR_FLEET_H
#define OCTAVO_COORDINATOR_FLEET_H

#include <uv.h>

#include "coordinator/engine.h"
#include "proto/base.h"
#include "proto/msg.h"

struct fleet;

enum fleet_state {
    FLEET_WAITING, FLEET_LOADING, FLEET_JOINING, FLEET_CANARY, FLEET_RESTORING, FLEET_READY,
    FLEET_CLEARING, FLEET_STOPPING, FLEET_FAILED, FLEET_STOPPED
};

/* Starts all workers. Of o, strings must outlive the fleet. */
int fleet_start(struct fleet **out, uv_loop_t *loop, const struct engine_options *o,
                uint64_t now_us, struct err_text *err);

/* Reads what has come and does what is due. Cheap when nothing is. */
void fleet_tick(struct fleet *f, uint64_t now_us);
/* Messages are waiting that fleet_tick has not read yet: their arrival will not be told again. */
bool fleet_pending(struct fleet *f);

enum fleet_state fleet_state(const struct fleet *f);
const char *fleet_why(const struct fleet *f);   /* one sentence when not ready */
int fleet_exit_code(const struct fleet *f);     /* when FAILED or STOPPED */
int64_t fleet_pages(const struct fleet *f);     /* cache pages; 0 before the first JOIN */

/* True once after the group fell apart: the steps in flight will not be answered. */
bool fleet_take_broken(struct fleet *f);
/* True once after it was found that no rank has the caches any more: slots and pages are gone. */
bool fleet_take_lost(struct fleet *f);

/* True when the group has joined and must show that it can answer: fleet_canary with the id of a
 * step. READY, and before it what the newborn are told, follow when its token has come. */
bool fleet_wants_canary(const struct fleet *f);
void fleet_canary(struct fleet *f, uint64_t id, uint64_t now_us);

/* True while the newborn wait for what the survivors know: fleet_restore for every COPY, ADMIT and
 * RESTORE, in order, then fleet_restore_end. READY follows when the pages are copied. */
bool fleet_wants_restore(const struct fleet *f);
void fleet_restore(struct fleet *f, struct msg *m, uint64_t now_us);
void fleet_restore_end(struct fleet *f, uint64_t now_us);

/* To every rank. m is ADMIT or STEP; the generation of a step is filled in. Only when READY. A rank
 * that cannot be reached is a lost rank, to be seen in fleet_take_broken. */
void fleet_send(struct fleet *f, struct msg *m, uint64_t now_us);

/* The tokens of the oldest step in flight once every rank has answered it, else NULL; valid until
 * fleet_answer_done. */
const struct msg_tokens *fleet_answer(const struct fleet *f);
void fleet_answer_done(struct fleet *f, uint64_t now_us);

/* The answer of `rank` made no sense: it is killed and replaced. */
void fleet_fail(struct fleet *f, int rank, const char *cause, uint64_t now_us);

/* For health: the phase, the canary, how loading gets on, the oldest step in flight. */
void fleet_health(const struct fleet *f, uint64_t now_us, struct engine_status *out);
bool fleet_recovers(const struct fleet *f); /* from a death or a slow step, until READY again */

void fleet_stop(struct fleet *f, uint64_t now_us); /* ends in STOPPED */
void fleet_workers(const struct fleet *f, struct engine_worker *out, uint64_t now_us);
uint64_t fleet_restarts(const struct fleet *f);
int fleet_world(const struct fleet *f);
/* How often device memory was waited for after a death, and how long altogether. */
double fleet_reclaim_seconds(const struct fleet *f, uint64_t *n);

/* An operator wants `rank` replaced: as any loss, but it does not count towards giving up. */
void fleet_restart(struct fleet *f, int rank, uint64_t now_us);

/* After STOPPED: closes the handles, frees f, then calls closed once. */
void fleet_close(struct fleet *f, void (*closed)(void *user), void *user);
void fleet_print(FILE *out, const struct fleet *f);

#endif
