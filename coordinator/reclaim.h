/* coordinator/reclaim.h: the gate between a death and the next start: is the memory back?
 *
 *               reclaim_watch: what each rank holds, while it lives
 *                    │ reclaim_begin: these ranks are dead
 *                    v
 *    ┌──────────> WAITING ──> the dead are off the device, memory has fallen by theirs ─> RETURNED
 *    │ look again    │
 *    └───────────────┤──────> the device is off the bus, or must be reset ──────────────> LOST
 *                    │ the bound has passed, and the memory is held
 *                    ├─ by a process of ours, which was killed and does not end ────────> HELD_BY_OURS
 *                    ├─ by a stranger, who is named and left alone ─────────────────────> HELD_BY_STRANGER
 *                    └─ by nobody that the driver knows of ─────────────────────────────> HELD_BY_NOBODY
 *
 * Owns: what was seen of each device while its ranks lived.  Called by: fleet_gate.c, cmd_guard.c.
 * Fails how: by a verdict and a sentence.  Limits: LIMIT_RANKS, DEVICE_MAX.
 * Tested by: tests/unit/test_reclaim.c, tests/faults/test_reclaim.py
 */
#ifndef OCTAVO_COORDINATOR_RECLAIM_H
#define OCTAVO_COORDINATOR_RECLAIM_H

#include "coordinator/device_memory.h"
#include "proto/base.h"
#include "proto/limits.h"

enum reclaim_verdict {
    RECLAIM_WAITING, RECLAIM_RETURNED, RECLAIM_HELD_BY_OURS, RECLAIM_HELD_BY_STRANGER,
    RECLAIM_HELD_BY_NOBODY, RECLAIM_LOST
};
const char *reclaim_verdict_name(enum reclaim_verdict v);

/* The processes of this host; tests have others. ctx comes first everywhere. */
struct reclaim_host {
    uint64_t (*start_time)(void *ctx, int64_t pid);       /* 0: no such process */
    bool (*is_ours)(void *ctx, int64_t pid);              /* started by this coordinator */
    bool (*is_abandoned)(void *ctx, int64_t pid);         /* a worker whose coordinator is gone */
    int (*kill)(void *ctx, int64_t pid, uint64_t start_time);
    void (*name)(void *ctx, int64_t pid, char *out, size_t n);
    void *ctx;
};

/* The real one; cookie (launch.h) must outlive it. */
struct reclaim_host reclaim_host_here(const char *cookie);

struct reclaim_rank {
    int rank;
    int64_t pid;
    uint64_t start_time;
    int device;          /* as struct device_memory counts; -1: not known */
    uint64_t said_bytes; /* what it says that it holds; 0: has not said yet */
};

/* What one rank held when its device was last looked at. */
struct reclaim_held {
    bool known;
    struct reclaim_rank rank;
    uint64_t bytes;
    bool listed; /* under its own pid; else, in a container, perhaps under one of the host's */
};

struct reclaim {
    const struct device_memory *memory;
    struct reclaim_host host;
    uint64_t bound_us, poll_us;
    /* while they live */
    int next_device;
    uint64_t watch_due_us;
    struct device_sample seen[DEVICE_MAX]; /* total 0: never */
    int seen_hidden[DEVICE_MAX];           /* of these, processes that cannot be seen from here */
    struct reclaim_held held[LIMIT_RANKS];
    struct device_sample fresh[DEVICE_MAX]; /* the last look, which the next will confirm */
    int fresh_hidden[DEVICE_MAX];
    struct reclaim_held fresh_held[LIMIT_RANKS];
    /* the gate */
    bool starting;                   /* the check before the first start */
    struct reclaim_held dead[LIMIT_RANKS];
    int n_dead;
    bool on_device[DEVICE_MAX];      /* to be looked at */
    bool told[DEVICE_MAX];           /* its strangers were named */
    uint64_t least_used[DEVICE_MAX], fell_us[DEVICE_MAX];
    uint64_t begun_us, due_us;
    int64_t killed_pid;              /* the last one that was killed */
    uint64_t killed_start;
    enum reclaim_verdict verdict;
    double seconds;
    char sentence[256];
};

/* memory must outlive r. bound_us: how long memory may take to return. */
void reclaim_init(struct reclaim *r, const struct device_memory *memory,
                  const struct reclaim_host *host, uint64_t bound_us);

/* Looks at one device in turn, at most every `every_us`, and notes what the ranks there hold. ranks:
 * all that live. */
void reclaim_watch(struct reclaim *r, const struct reclaim_rank *ranks, int n, uint64_t every_us,
                   uint64_t now_us);

/* These ranks have been seen to exit. */
void reclaim_begin(struct reclaim *r, const struct reclaim_rank *dead, int n, uint64_t now_us);

/* Before anything is started on the first `n_devices`: kills abandoned workers there and waits for
 * them, names strangers; only a lost device or a worker that does not end keeps us from starting. */
void reclaim_begin_start(struct reclaim *r, int n_devices, uint64_t now_us);

/* After a begin: looks at these devices only. */
void reclaim_look_at(struct reclaim *r, const bool on[DEVICE_MAX]);

/* The verdict so far; looks again when that is due. Once it is not WAITING it stays. */
enum reclaim_verdict reclaim_poll(struct reclaim *r, uint64_t now_us);

const char *reclaim_sentence(const struct reclaim *r); /* of a verdict */
double reclaim_seconds(const struct reclaim *r);       /* from begin to the verdict */
void reclaim_print(FILE *out, const struct reclaim *r);

#endif
