/* coordinator/engine.h: what the API files see of the machine behind them.
 *
 * A request is a token list and sampling parameters; what comes back are events, delivered from the
 * engine's tick on the loop thread (never from inside engine_submit, engine_cancel or
 * engine_finish). The engine joins the scheduler (pure), the fleet (processes) and the clock; once
 * per loop turn, in this order: signals · dead workers · replies committed · cancellations ·
 * admissions · one scheduling step per idle group · deltas written · counters.
 *
 * Owns: sched, fleet.  Called by: cmd_serve.c, api_*.c, all on the loop thread.
 * Fails how: codes below; a request that was accepted always gets exactly one ENGINE_FINISHED.
 */
#ifndef OCTAVO_COORDINATOR_ENGINE_H
#define OCTAVO_COORDINATOR_ENGINE_H

#include <uv.h>

#include "proto/base.h"
#include "proto/msg.h"

struct engine;
struct gpus; /* gpus.h */

enum engine_finish {
    ENGINE_STOP,    /* an end token was sampled (or engine_finish was called) */
    ENGINE_LENGTH,  /* max_tokens or the context was reached */
    ENGINE_CANCELLED,
    ENGINE_ERROR,   /* sentence in event.error */
    ENGINE_TIMEOUT, /* the same: it was not done in the time that it was given */
};

struct engine_event {
    bool finished;
    /* a token (finished false) */
    const struct msg_token *token;
    /* the end (finished true) */
    enum engine_finish reason;
    int32_t stop_token;    /* the end token that was sampled, -1: none; it counts in n_output but is
                            * not delivered as a token of its own */
    const char *error;
    int32_t n_prompt, n_cached, n_output;
};

typedef void engine_sink(void *user, const struct engine_event *ev);

/* Replaces one rank as soon as all are there; no request is lost, and it does not count towards
 * giving up. ERR_STATE unless READY, ERR_RANGE for a rank that is none. */
int engine_restart(struct engine *e, int rank);

#define ENGINE_PRIORITY_FIRST INT32_MIN /* the canary's: before everything that waits */

struct engine_request {
    const int32_t *tokens; /* copied */
    int32_t n_tokens;
    int32_t max_tokens;    /* > 0; clipped to the context */
    bool ignore_eos;
    const int32_t *stop_ids; /* besides the model's end tokens; copied */
    int n_stop_ids;
    bool lockstep;         /* no row of it is sent before its last token is known, as a grammar needs;
                            * the others of a step are sent ahead all the same */
    int priority;          /* lower runs first; default 0 */
    uint64_t timeout_us;   /* from now to its end; 0: as long as it takes */
    const void *cache_salt; /* what is computed is found again by requests of the same salt alone */
    size_t n_cache_salt;
    struct msg_sampling sampling;
    engine_sink *sink;
    void *user;
};

/* OK with *id; ERR_FULL (503, engine_retry_after), ERR_STATE (draining or recovery exhausted),
 * ERR_LIMIT (prompt leaves no room in the context). Requests are accepted while loading and while a
 * rank restarts: they wait. */
int engine_submit(struct engine *e, const struct engine_request *r, uint64_t *id);
void engine_finish(struct engine *e, uint64_t id); /* stop string found: finish with ENGINE_STOP */
void engine_cancel(struct engine *e, uint64_t id); /* client left: no more events for it */
int engine_retry_after(const struct engine *e);    /* seconds */

enum engine_state {
    ENGINE_STARTING,   /* memory that others held is waited for: no worker yet */
    ENGINE_LOADING,
    ENGINE_CANARY,     /* joined; the first token of all is awaited */
    ENGINE_READY,
    ENGINE_RECOVERING,
    ENGINE_DRAINING,
    ENGINE_FAILED
};
static inline const char *engine_state_name(enum engine_state s) {
    static const char *const names[] = {"starting",   "loading",  "canary", "ready",
                                        "recovering", "draining", "failed"};
    return s <= ENGINE_FAILED ? names[s] : "unknown";
}

/* Why a rank had to be replaced. */
enum engine_cause {
    CAUSE_EXIT,     /* it ended by itself, or somebody killed it */
    CAUSE_SILENT,   /* no heartbeat, no HELLO, not loaded in time */
    CAUSE_STUCK,    /* it beats but does not leave its step */
    CAUSE_FAILED,   /* it said FAILED */
    CAUSE_NONSENSE, /* what it said does not fit */
    CAUSE_CANARY,   /* the group gave no token, or a wrong one, before it was to be READY */
    CAUSE_ASKED,    /* an operator wanted it: engine_restart */
    ENGINE_CAUSES
};
static inline const char *engine_cause_name(enum engine_cause c) {
    static const char *const names[] = {"exit", "silent", "stuck", "failed", "nonsense", "canary", "asked"};
    return c < ENGINE_CAUSES ? names[c] : "unknown";
}

struct engine_worker {
    int rank;
    int64_t pid;
    uint64_t start_time;
    enum worker_state state;
    char device[96];
    uint64_t last_step, age_us;  /* age of the last completed step; UINT64_MAX: none yet */
    uint64_t load_bytes, load_total;
    uint64_t memory_used_bytes, memory_free_bytes;
    int restarts;
    int restarts_by[ENGINE_CAUSES]; /* the same, by cause */
    char last_error[256];
};

struct engine_status {
    enum engine_state state;
    const char *phase;           /* what of it: reclaiming, back_off, loading, joining, canary, … */
    char why[256];               /* one sentence when not ready */
    uint64_t ready_us;           /* ready for so long, 0: it is not; the canary came before */
    const char *canary;          /* none, asked, ok, failed: of this generation */
    uint64_t canary_us;          /* how long the last one took */
    int32_t canary_token;
    uint64_t load_bytes, load_total;        /* of all ranks, as far as they have said */
    uint64_t load_quiet_us, load_bound_us;  /* nothing has moved for so long; it may for so long */
    int n_workers;
    struct engine_worker workers[LIMIT_RANKS];
    int running, waiting;        /* sequences */
    int64_t pages_used, pages_total;
    uint64_t steps, restarts;
    uint64_t step;               /* the oldest step in flight, 0: none */
    int step_rows;               /* tokens that it feeds */
    uint64_t step_age_us, step_bound_us; /* how long it has taken, and may take */
    uint64_t last_step_us;       /* age of the last step that was completed; UINT64_MAX: none yet */
    struct engine_prefill {      /* the prompts that are being computed */
        int n;                   /* 0: none */
        int64_t done, total;     /* tokens of the oldest of them */
    } prefill;
    uint64_t prompt_tokens, output_tokens;
    uint64_t cached_tokens;      /* of prompts, not computed but found */
    int64_t pages_kept;          /* of those not used, hold what may be found again */
    uint64_t refused, expired, preempted; /* queue full; out of time; computed again for want of pages */
    uint64_t reclaims;           /* how often device memory was waited for after a death */
    double reclaim_seconds;      /* altogether */
};
void engine_status(const struct engine *e, struct engine_status *out);

struct engine_options {
    const char *model_path;      /* any part of a split model */
    const char *worker_path;     /* octavo-worker or octavo-worker-cuda */
    const char *device;          /* "cpu", "cuda" */
    int tp, max_seqs, max_step_rows;
    int n_devices;               /* of this host; 0 for the CPU backend */
    const struct gpus *gpus;     /* how ranks are dealt over them; NULL: in turn */
    const char *collective;      /* how ranks add up, or NULL: the workers' own choice */
    const char *shard_cache;     /* folder of repacked weights, or NULL */
    int64_t context;             /* tokens per sequence */
    int64_t cache_tokens;        /* 0: planned from free memory */
    bool prefix_cache;           /* what was computed before is found again */
    int gap_ms;                  /* that prompts may keep a stream waiting; 0: no bound */
    int queue_requests;          /* beyond those that have slots; 0: LIMIT_QUEUE_REQUESTS */
    int64_t queue_tokens;        /* of those who wait; 0: LIMIT_QUEUE_TOKENS */
    const int32_t *eog;          /* the model's end tokens; copied */
    int n_eog;
    int load_timeout_s, drain_timeout_s;
    int load_stall_ms;           /* a load in which nothing moves for so long is told as stalled */
    int step_timeout_s;          /* of a step of one row; see fleet_step.c for larger ones */
    bool progress_bar;           /* stderr is a terminal */
    int depth;                   /* steps in flight; 0: 1 */
    /* Supervision; 0 takes the default of engine.c. */
    int beat_timeout_ms;         /* a rank silent for so long is dead */
    int restart_delay_ms;        /* before a rank's second restart in a row; then it doubles */
    const char *device_memory;   /* where it is looked up, see device_memory.h; NULL: by device */
    int reclaim_timeout_s;       /* how long memory of the dead may take to return */
    int probe_port;              /* rank r answers probes on 127.0.0.1:probe_port + r; 0: none */
    int restarts_max, restart_window_s; /* more than so many in so long: ENGINE_FAILED */
};

int engine_start(struct engine **out, uv_loop_t *loop, const struct engine_options *o,
                 struct err_text *err);

/* Stop admission, let running sequences finish (bounded), stop the workers, then call done once.
 * now: do not wait for running sequences. Calling again with now hurries a drain. */
void engine_stop(struct engine *e, bool now, void (*done)(void *user, int exit_code), void *user);

/* Called once if the engine ends by itself (recovery exhausted, set-up error in a worker), when no
 * worker is left. engine_stop is still owed. */
void engine_on_fatal(struct engine *e, void (*fatal)(void *user, int exit_code), void *user);

/* Called each time the engine becomes ready: after loading and after every recovery. */
void engine_on_ready(struct engine *e, void (*ready)(void *user), void *user);

/* After engine_stop's done. */
void engine_free(struct engine *e);

#endif
