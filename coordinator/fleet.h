/* coordinator/fleet.h: the worker processes as one thing that can take a step.
 *
 *                      all LOADED           all JOINED
 *      ┌──> LOADING ──────────────> JOINING ──────────> READY
 *      │       │                       │                  │   a death, silence, a step too long,
 *      │       └───────────────────────┴──────────────────┤   an answer that does not fit, FAILED
 *      │ spawn all                                        v
 *   WAITING <──────────────────────────────────────── CLEARING   kill -9 the rest, see all exits
 *   reclaim gate, back-off                                │
 *                                                         │ too many, or exit code 2 or 3
 *      fleet_stop, from anywhere                          v
 *   STOPPING (STOP, after a bound SIGKILL) ──> STOPPED <── FAILED (kill -9, see all exits)
 *
 * One rank:  SPAWNED ─> LOADING ─> LOADED ─> READY <─> STEPPING
 *                \________\__________\________\__________\____> DEAD ─> RECLAIMING ─> SPAWNED
 *            and, asked to stop, DRAINING ─> DEAD
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
    FLEET_WAITING, FLEET_LOADING, FLEET_JOINING, FLEET_READY, FLEET_CLEARING, FLEET_STOPPING,
    FLEET_FAILED, FLEET_STOPPED
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

/* True once after the group was lost: slots, caches and steps in flight are gone. */
bool fleet_take_lost(struct fleet *f);

/* To every rank. m is ADMIT or STEP; the generation of a step is filled in. Only when READY. A rank
 * that cannot be reached is a lost rank, to be seen in fleet_take_lost. */
void fleet_send(struct fleet *f, struct msg *m, uint64_t now_us);

/* The tokens of the oldest step in flight once every rank has answered it, else NULL; valid until
 * fleet_answer_done. */
const struct msg_tokens *fleet_answer(const struct fleet *f);
void fleet_answer_done(struct fleet *f, uint64_t now_us);

/* The answer of `rank` made no sense: the group is restarted. */
void fleet_fail(struct fleet *f, int rank, const char *cause, uint64_t now_us);

void fleet_stop(struct fleet *f, uint64_t now_us); /* ends in STOPPED */
void fleet_workers(const struct fleet *f, struct engine_worker *out, uint64_t now_us);
uint64_t fleet_restarts(const struct fleet *f);
int fleet_world(const struct fleet *f);
/* How often device memory was waited for after a death, and how long altogether. */
double fleet_reclaim_seconds(const struct fleet *f, uint64_t *n);

/* After STOPPED: closes the handles, frees f, then calls closed once. */
void fleet_close(struct fleet *f, void (*closed)(void *user), void *user);
void fleet_print(FILE *out, const struct fleet *f);

#endif
