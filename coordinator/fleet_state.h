/* coordinator/fleet_state.h: the inside of a fleet, for the files fleet*.c alone. See fleet.h.
 *
 * Owns: nothing.  Called by: fleet.c, fleet_gate.c, fleet_hear.c, fleet_join.c.
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
#define STOP_BOUND_US   (5 * SECOND_US)  /* STOP to SIGKILL */
#define LAST_WORDS_US   (SECOND_US / 5)  /* how long the FAILED of a dead worker may be on its way */
#define FAILED_BOUND_US (2 * SECOND_US)  /* FAILED to the exit that it promises */
#define HELLO_BOUND_US  (30 * SECOND_US) /* start to HELLO */
#define DELAY_MAX_US    (10 * SECOND_US) /* cap of the back-off */
#define ASLEEP_US       SECOND_US        /* a tick so late means that we were the ones asleep */
#define ROWS_PER_SPAN   128              /* so many rows double the time a step may take */
#define RESTARTS_KEPT   64

struct worker {
    int rank;
    struct child child;
    enum worker_state state;
    bool hello, loaded, joined;
    bool reachable; /* its step socket is known to ours */
    bool ended;     /* its exit has been dealt with */
    uint64_t spawned_us, heard_us, exit_seen_us, failed_us, deaf_us;
    struct msg_loaded sizes;
    struct msg_beat beat;
    struct msg_failed failed; /* text empty: it said nothing */
    uint64_t load_bytes, load_total;
    uint64_t answered, last_step, last_step_us;
    int restarts;
    char device[96];
    char last_error[256];
};

struct flight { /* a step in flight */
    uint64_t id;
    int rows;
    uint64_t due_us; /* set while it is the oldest */
    bool has_tokens;
    struct msg_tokens tokens;
};

struct fleet {
    uv_loop_t *loop;
    struct engine_options o;
    struct launch launch;
    struct wire *wire;
    uv_poll_t poll;
    enum fleet_state state;
    uint32_t incarnation, generation;
    struct worker w[LIMIT_RANKS];
    int world;
    int64_t pages;
    int shm_fd; /* -1: none */
    struct flight flight[SCHED_DEPTH_MAX];
    int flight_head, n_flight;
    struct msg *in;   /* what is being read */
    bool has_pending; /* `in` holds a message that was read to look */
    struct wire_peer pending_from;
    struct progress progress;
    bool lost;
    uint64_t tick_us, state_us, due_us; /* last tick, state entered, next thing due in it */
    uint64_t restarts, restart_us[RESTARTS_KEPT];
    struct device_memory memory;
    struct reclaim gate;
    uint64_t reclaims;
    double reclaim_seconds; /* of all reclaims together */
    int exit_code;
    char why[256];
    void (*closed)(void *user);
    void *closed_user;
};

/* fleet.c: the two ways down. Both say why once, and take every process along. */
void fleet_lose(struct fleet *f, struct worker *w, uint64_t now_us, const char *fmt, ...)
    PRINTF_LIKE(4, 5);
void fleet_fatal(struct fleet *f, int code, uint64_t now_us, const char *fmt, ...)
    PRINTF_LIKE(4, 5);
void fleet_enter(struct fleet *f, enum fleet_state state, uint64_t now_us);

/* fleet_gate.c: what ranks hold; whether the memory of the dead is back. passed: true, or false to be
 * asked again; a verdict other than returned ends the fleet. */
int fleet_gate_open(struct fleet *f, struct err_text *err);
void fleet_gate_close(struct fleet *f);
void fleet_gate_watch(struct fleet *f, uint64_t now_us);
void fleet_gate_begin(struct fleet *f, uint64_t now_us);
bool fleet_gate_begin_start(struct fleet *f, uint64_t now_us); /* true: start at once */
bool fleet_gate_passed(struct fleet *f, uint64_t now_us);

/* fleet_join.c: all are LOADED; some are JOINED. */
void fleet_join_all(struct fleet *f, uint64_t now_us);
void fleet_check_join(struct fleet *f, uint64_t now_us);

/* fleet_hear.c: reads until nothing is left. */
void fleet_hear_all(struct fleet *f, uint64_t now_us);

#endif
