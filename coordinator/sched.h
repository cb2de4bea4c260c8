/* coordinator/sched.h: who runs, what the next step feeds, and what an answer means.
 *
 *              submit                admission              stop, length, finish, cancel
 *     (free) ─────────> SEQ_WAITING ──────────> SEQ_RUNNING ────────────────> (free)
 *                            ^                       │
 *                            └───────────────────────┘
 *                      out of pages (youngest) or all devices lost
 *
 * Owns: every request from submit to its end, the slots, the page account, the events not yet
 * delivered.  Called by: engine.c.  Pure: no socket, no clock, no global; time is an argument.
 * Fails how: codes of proto/base.h; a request that was accepted ends exactly once (a cancelled one
 * silently), whatever the device does.
 * Limits: LIMIT_QUEUE_*, LIMIT_STEP_*, LIMIT_SLOTS.
 * Files: sched.c, sched_queue.c, sched_gap.c, sched_prefix.c, sched_restore.c, sched_look.c.
 * Tested by: tests/unit/test_sched*.c (rules, and a simulation with a model of the workers)
 */
#ifndef OCTAVO_COORDINATOR_SCHED_H
#define OCTAVO_COORDINATOR_SCHED_H

#include "coordinator/engine.h"
#include "coordinator/pages.h"
#include "proto/base.h"
#include "proto/msg.h"

#define SCHED_DEPTH_MAX 4

struct sched;

struct sched_options {
    int max_seqs;        /* slots, 1..LIMIT_SLOTS */
    int max_step_rows;   /* token budget of one step, max_seqs..LIMIT_STEP_ROWS */
    int depth;           /* steps in flight at once, 1..SCHED_DEPTH_MAX */
    int queue_requests;  /* requests beyond those that have slots, at most LIMIT_QUEUE_REQUESTS */
    int64_t queue_tokens;/* tokens of those who wait; at least one always may */
    int64_t context;     /* tokens of one sequence, prompt and output */
    const int32_t *eog;  /* the model's end tokens; copied */
    int n_eog;
    uint64_t gap_us;     /* that prompts may keep a stream waiting between two tokens; 0: no bound */
    bool prefix_cache;   /* share the pages of what was computed before */
    struct digest secret;/* random: the names of pages cannot be guessed */
};

/* What is to be said to the workers next: what sched_plan_next gives, then the step. */
struct sched_plan {
    int n_admits, n_said;
    int admits[LIMIT_SLOTS]; /* slots */
    bool tell[LIMIT_SLOTS];  /* by index into admits: what it found in the cache is told by RESTORE */
    int32_t told;            /* positions of the one being told; -1: not even admitted */
    struct msg msg;          /* type MSG_STEP; the generation is left to the sender */
};

/* One event to deliver; `ev` points into this struct. */
struct sched_event {
    uint64_t id;
    engine_sink *sink;
    void *user;
    struct engine_event ev;
    struct msg_token token;
    char error[160];
    bool dead; /* finished or cancelled since it was written: not to be delivered */
};

struct sched_counts {
    int running, waiting;
    int64_t waiting_tokens;       /* to be prefilled before the waiting ones are served */
    int64_t pages_used, pages_total;
    uint64_t steps, preemptions, replays, resumed; /* resumed: without being computed again */
    uint64_t prompt_tokens, output_tokens;
    uint64_t cached_tokens;       /* of prompts, found in the cache */
    uint64_t refused, expired;
    int64_t pages_kept;           /* free to be taken, but may be found again */
};

int sched_new(struct sched **out, const struct sched_options *o);
void sched_free(struct sched *s);

/* The device has n cache pages. Called before the first plan; called again with another number it
 * is a sched_forget_device too. Sequences longer than the whole cache are clipped to it. */
int sched_set_pages(struct sched *s, int64_t n_pages);

/* OK with *id, ERR_FULL, ERR_LIMIT, ERR_NOMEM; see engine_submit. */
int sched_submit(struct sched *s, const struct engine_request *r, uint64_t now_us, uint64_t *id);

/* From now on no event of this request is delivered but, for finish, its end. The slot and the
 * pages go back in the next sched_sweep. Unknown ids (ended already) are ignored. */
void sched_finish(struct sched *s, uint64_t id);
void sched_cancel(struct sched *s, uint64_t id);
void sched_sweep(struct sched *s);

/* Ends with ENGINE_TIMEOUT whoever has had his time. Before a sweep. */
void sched_expire(struct sched *s, uint64_t now_us);

/* Ends every request: the events say ENGINE_CANCELLED or ENGINE_ERROR with the sentence. */
void sched_end_all(struct sched *s, enum engine_finish reason, const char *error);

/* The next step: 1 and *plan filled; 0: nothing to feed, or `depth` steps are in flight. */
int sched_plan(struct sched *s, uint64_t now_us, struct sched_plan *plan);
/* What comes before the step, one message at a time: an ADMIT for each sequence that takes a slot,
 * and a RESTORE or several if it is to be told what the cache holds of it already. False: all is said. */
bool sched_plan_next(const struct sched *s, struct sched_plan *plan, struct msg *m);
int sched_in_flight(const struct sched *s);
uint64_t sched_take_id(struct sched *s); /* for a step that is not the scheduler's: its id */
bool sched_idle(const struct sched *s); /* no request at all */

/* The oldest step in flight was answered by all ranks. ERR_STATE: not that step (an old answer,
 * dropped); ERR_FORMAT: the answer does not fit the step (a worker's bug; *err says which). */
int sched_commit(struct sched *s, const struct msg_tokens *t, uint64_t now_us,
                 struct err_text *err);

/* Caches, slots and steps in flight are gone: whoever ran waits again, in order, with prompt and
 * tokens so far, and will go on exactly where it was. */
void sched_forget_device(struct sched *s);

/* A rank was lost and others still have their caches: the steps in flight are void, as if they had
 * never been planned. Whoever ran keeps slot and pages and will go on from what was committed. */
void sched_take_back(struct sched *s);

/* After a take_back, what all ranks of the new group must be told before the next step, one message
 * at a time: COPY (pages that hold something; id, root and needs are left to the sender), then for
 * each running sequence ADMIT under a new slot generation and RESTORE. False when all is said. Nothing
 * else may happen to s between begin and that. */
void sched_restore_begin(struct sched *s);
bool sched_restore_next(struct sched *s, struct msg *m);

/* Events in order, to be delivered and cleared before the next commit or sweep. submit, finish and
 * cancel may be called while the array is walked; the latter two set `dead` in what is to come. */
const struct sched_event *sched_events(const struct sched *s, int *n);
void sched_events_clear(struct sched *s);

/* When to ask again: what is owed to those who are here, at the measured rate. */
int sched_retry_after_s(const struct sched *s);
void sched_prefill(const struct sched *s, struct engine_prefill *out);
void sched_counts(const struct sched *s, struct sched_counts *out);
void sched_print(FILE *f, const struct sched *s);

#endif
