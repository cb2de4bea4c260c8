/* coordinator/fleet_state.h: the inside of a fleet, for the files fleet*.c alone. See fleet.h.
 *
 * Owns: nothing.  Called by: fleet.c, fleet_canary.c, fleet_gate.c, fleet_hear.c, fleet_join.c, fleet_lose.c,
 * fleet_step.c.
 */
#ifndef OCTAVO_COORDINATOR_FLEET_STATE_H
#define OCTAVO_COORDINATOR_FLEET_STATE_H

#include "coordinator/child.h"
#include "coordinator/fleet.h"
#include "coordinator/launch.h"
#include "coordinator/progress.h"
#include "coordinator/reclaim.h"
#include "coordinator/sched.h"
#include "proto/wire.h"

#define SECOND_US       1000000ull
#define ABORT_LEAST_US  (SECOND_US * 3 / 4) /* ABORT to ABORTED, at the least */
#define JOIN_ABORT_US   (10 * SECOND_US) /* the same of a rank that may be allocating caches */
#define STOP_BOUND_US   (5 * SECOND_US)  /* STOP to SIGKILL */
#define LAST_WORDS_US   (SECOND_US / 5)  /* how long the FAILED of a dead worker may be on its way */
#define FAILED_BOUND_US (2 * SECOND_US)  /* FAILED to the exit that it promises */
#define HELLO_BOUND_US  (30 * SECOND_US) /* start to HELLO: programs are read from slow disks too */
#define DELAY_CAP       100 /* the back-off grows to so many times restart_delay_ms */
#define HEALTHY_US      (60 * SECOND_US) /* ready for so long: its back-off starts anew */
#define LOAD_STALL_MS   30000 /* a load in which nothing moves for so long is told as stalled */
#define ASLEEP_US       SECOND_US        /* a tick so late means that we were the ones asleep */

struct worker {
    int rank;
    uint32_t incarnation; /* how often it was started; in the name of its sockets */
    struct child child;
    enum worker_state state;
    bool lost;     /* given up: killed, to be started again */
    bool planned;  /* lost, and counted in a restart that has not begun */
    bool in_group; /* JOIN was sent, ABORTED has not come */
    bool caches;   /* its cache pages are what the scheduler thinks */
    bool hello, loaded, joined;
    bool worked; /* one of its incarnations was READY: its set-up is right */
    enum engine_cause cause;
    uint64_t lost_us, ready_us; /* given up; ready since */
    uint64_t abort_us;          /* ABORT sent, no answer yet */
    uint64_t copied;            /* the last COPY that it answered */
    int streak;                 /* restarts without HEALTHY_US between them */
    bool reachable; /* its step socket is known to ours */
    bool ended;     /* its exit has been dealt with */
    uint64_t spawned_us, heard_us, exit_seen_us, failed_us, deaf_us;
    struct msg_loaded sizes;
    struct msg_beat beat;
    struct msg_failed failed; /* text empty: it said nothing */
    uint64_t load_bytes, load_total;
    uint64_t answered, last_step, last_step_us;
    int restarts, restarts_by[ENGINE_CAUSES];
    char device[96];
    char last_error[256];
};

struct flight { /* a step in flight */
    uint64_t id;
    int rows;
    double work;               /* rows, weighed by how far they look back */
    uint64_t due_us, begun_us; /* set anew when it becomes the oldest */
    bool has_tokens;
    struct msg_tokens tokens;
};

/* How long what took, from the first death to READY. */
struct recovery {
    uint64_t died_us; /* 0: none under way */
    uint64_t lost_us, spawned_us, loaded_us, joined_us, sung_us;
    uint64_t step;  /* the oldest in flight when the group fell apart; 0: none */
    uint32_t ranks; /* bit r: rank r was replaced */
    int64_t pages;  /* copied */
};

/* How it stands with the canary of the present generation. */
enum fleet_canary {
    FLEET_CANARY_NONE, FLEET_CANARY_WANTED, FLEET_CANARY_ASKED, FLEET_CANARY_SUNG,
    FLEET_CANARY_FAILED
};

struct fleet {
    uv_loop_t *loop;
    struct engine_options o;
    struct launch launch;
    struct wire *wire;
    uv_poll_t poll;
    enum fleet_state state;
    uint32_t generation;
    uint32_t needs; /* bit r: rank r lacks the caches of the present generation */
    int root;       /* who has them; -1: nobody */
    bool want_restore;
    uint64_t copies; /* COPY messages sent */
    enum fleet_canary canary;
    bool canary_known;    /* a token has been sung since the last failure */
    int32_t canary_token;
    uint64_t canary_us;   /* how long it took */
    struct recovery recovery;
    struct worker w[LIMIT_RANKS];
    int world;
    int64_t pages; /* for sequences; the ranks hold one more, the canary's */
    int shm_fd; /* -1: none */
    struct flight flight[SCHED_DEPTH_MAX];
    int flight_head, n_flight;
    struct msg *in;   /* what is being read */
    bool has_pending; /* `in` holds a message that was read to look */
    struct wire_peer pending_from;
    struct progress progress;
    uint64_t moved_us; /* when loading last got on */
    bool broken, lost;
    double us_per_work;        /* measured; 0: not yet */
    int stalls;                /* steps in a row that were too slow with nobody stuck */
    uint64_t abort_bound_us;   /* how long a survivor may take to leave the step */
    uint64_t tick_us, state_us, due_us; /* last tick, state entered, next thing due in it */
    uint64_t restarts, failures; /* failures: those that no operator asked for */
    uint64_t *restart_us;        /* [restarts_max + 1] when the last failures were, a ring */
    struct device_memory memory;
    struct reclaim gate;
    uint64_t reclaims;
    double reclaim_seconds; /* of all reclaims together */
    int exit_code;
    char why[256];
    void (*closed)(void *user);
    void *closed_user;
};

/* fleet.c */
void fleet_enter(struct fleet *f, enum fleet_state state, uint64_t now_us);
void fleet_send_all(struct fleet *f, const struct msg *m, uint64_t now_us);

/* fleet_lose.c: one rank is given up; the fleet is. Both say why once. */
void fleet_lose(struct fleet *f, struct worker *w, enum engine_cause cause, uint64_t now_us,
                const char *fmt, ...) PRINTF_LIKE(5, 6);
void fleet_fatal(struct fleet *f, int code, uint64_t now_us, const char *fmt, ...)
    PRINTF_LIKE(4, 5);
/* The group falls apart and nobody is to blame yet. */
void fleet_break(struct fleet *f, uint64_t abort_bound_us, uint64_t now_us);
void fleet_kill_all(struct fleet *f);
bool fleet_any_open(const struct fleet *f);
void fleet_see_exits(struct fleet *f, uint64_t now_us);
void fleet_check_silence(struct fleet *f, uint64_t now_us);
void fleet_check_clear(struct fleet *f, uint64_t now_us);
/* Before the successor of w, which was lost at w->lost_us: none for the first in a while, then
 * restart_delay_ms, twice that, … */
uint64_t fleet_restart_delay_us(const struct fleet *f, struct worker *w);
void fleet_spawn_lost(struct fleet *f, uint64_t now_us);

/* fleet_step.c: a step is on its way; how long it may take. */
void fleet_note_step(struct fleet *f, const struct msg_step *m, uint64_t now_us);
uint64_t fleet_step_bound_us(const struct fleet *f, double work);
void fleet_step_health(const struct fleet *f, uint64_t now_us, struct engine_status *out);
uint64_t fleet_oldest_step(const struct fleet *f); /* 0: none in flight */
void fleet_check_step(struct fleet *f, uint64_t now_us);

static inline bool fleet_over(const struct fleet *f) { /* nothing more can be lost */
    return f->state == FLEET_STOPPING || f->state == FLEET_FAILED || f->state == FLEET_STOPPED;
}

static inline struct wire_peer fleet_peer(const struct worker *w, char channel) {
    return (struct wire_peer){w->rank, w->incarnation, channel};
}

/* fleet_gate.c: what ranks hold; whether the memory of the dead is back. passed: true, or false to be
 * asked again; a verdict other than returned ends the fleet. */
int fleet_gate_open(struct fleet *f, struct err_text *err);
void fleet_gate_close(struct fleet *f);
void fleet_gate_watch(struct fleet *f, uint64_t now_us);
void fleet_gate_begin(struct fleet *f, uint64_t now_us);
bool fleet_gate_begin_start(struct fleet *f, uint64_t now_us); /* true: start at once */
bool fleet_gate_passed(struct fleet *f, uint64_t now_us);

/* fleet_join.c: all are LOADED; some are JOINED; pages are copied. */
void fleet_join_all(struct fleet *f, uint64_t now_us);
void fleet_check_join(struct fleet *f, uint64_t now_us);
void fleet_check_canary(struct fleet *f, uint64_t now_us); /* fleet_canary.c */
void fleet_check_restore(struct fleet *f, uint64_t now_us);

/* fleet_hear.c: reads until nothing is left. */
void fleet_hear_all(struct fleet *f, uint64_t now_us);

#endif
