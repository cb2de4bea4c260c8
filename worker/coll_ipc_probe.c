/* worker/coll_ipc_probe.c: push or pull, one shot or two: measured, since no rule tells.
 *
 * Owns: nothing.  Called by: coll_ipc.cu, in the first generation.
 * Fails how: ERR_ABORTED when a peer is gone.
 * Limits: about IPC_PROBE_US.  Tested by: tests/unit/test_coll_probe.c
 *
 * Stores to a peer are ten times slower than loads on one published box and faster on the next, so
 * all five ways are timed at three sizes. The ranks exchange their times after each and keep the
 * largest: they must choose alike, and a sum is through when its slowest rank is. The clock is
 * shared the same way, so that they also stop alike.
 */
#include <string.h>
#include <time.h>

#include "proto/limits.h"
#include "proto/log.h"
#include "worker/coll_ipc_probe.h"

struct probe {
    struct coll *shm;
    float (*time_sum)(void *, enum ipc_algorithm, int64_t);
    void *user;
    uint64_t start_us;
    float us[IPC_ALGORITHMS]; /* of the size at hand, on the slowest rank */
};

static const int64_t probe_bytes[] = {IPC_PROBE_BYTES, 128 << 10, 32 << 10};

const char *ipc_algorithm_name(enum ipc_algorithm a) {
    static const char *const names[IPC_ALGORITHMS] = {"auto",     "packets",  "one-push",
                                                      "one-pull", "two-push", "two-pull"};
    return names[a];
}

/* Where a sum of its size waits for peers longer than it moves bytes, fewer trips are better. */
struct ipc_choice ipc_choice_default(void) {
    return (struct ipc_choice){.packets_max = 64 << 10,
                               .one_shot_max = 128 << 10,
                               .one_shot = IPC_ONE_PUSH,
                               .two_shot = IPC_TWO_PUSH};
}

int ipc_blocks(int asked, int sharing, int sms) {
    return sharing < 2 ? asked : MAX(1, MIN(asked, sms / (2 * sharing)));
}

enum ipc_algorithm ipc_choose(const struct ipc_choice *c, int64_t bytes) {
    if (bytes <= c->packets_max) return IPC_PACKETS;
    return (enum ipc_algorithm)(bytes <= c->one_shot_max ? c->one_shot : c->two_shot);
}

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* ERR_TIMEOUT, on every rank, when the time of one is up. */
static int measure(struct probe *p, enum ipc_algorithm a, int64_t bytes) {
    float mine[2], all[2 * LIMIT_RANKS], spent = 0;
    mine[0] = p->time_sum(p->user, a, bytes);
    mine[1] = (float)(now_us() - p->start_us);
    TRY(coll_all_gather(p->shm, mine, all, sizeof mine));
    p->us[a] = 0;
    for (int r = 0; r < p->shm->world; r++) {
        p->us[a] = MAX(p->us[a], all[2 * r]);
        spent = MAX(spent, all[2 * r + 1]);
    }
    return spent < IPC_PROBE_US ? OK : ERR_TIMEOUT;
}

static enum ipc_algorithm faster(const struct probe *p, enum ipc_algorithm a,
                                 enum ipc_algorithm b) {
    return p->us[b] < p->us[a] ? b : a;
}

static void log_size(const struct probe *p, int64_t bytes) {
    if (p->shm->rank != 0) return;
    log_debug("collective_probe",
              "bytes=%lld packets_us=%.1f one_push_us=%.1f one_pull_us=%.1f two_push_us=%.1f "
              "two_pull_us=%.1f",
              (long long)bytes, (double)p->us[IPC_PACKETS], (double)p->us[IPC_ONE_PUSH],
              (double)p->us[IPC_ONE_PULL], (double)p->us[IPC_TWO_PUSH],
              (double)p->us[IPC_TWO_PULL]);
}

/* From the largest size down: two shots as they are best there; one shot, and packets, up to the
 * largest size at which nothing was faster. */
static int probe_sizes(struct probe *p, struct ipc_choice *found) {
    for (size_t s = 0; s < ARRAY_LEN(probe_bytes); s++) {
        int64_t bytes = probe_bytes[s];
        for (int a = IPC_PACKETS; a < IPC_ALGORITHMS; a++)
            TRY(measure(p, (enum ipc_algorithm)a, bytes));
        log_size(p, bytes);
        enum ipc_algorithm one = faster(p, IPC_ONE_PUSH, IPC_ONE_PULL);
        enum ipc_algorithm two = faster(p, IPC_TWO_PUSH, IPC_TWO_PULL);
        if (s == 0) found->two_shot = two;
        found->one_shot = one;
        if (!found->one_shot_max && faster(p, one, two) == one) found->one_shot_max = bytes;
        if (!found->packets_max && faster(p, IPC_PACKETS, faster(p, one, two)) == IPC_PACKETS)
            found->packets_max = bytes;
    }
    return OK;
}

int ipc_probe(struct ipc_choice *out, struct coll *shm,
              float (*time_sum)(void *user, enum ipc_algorithm, int64_t bytes), void *user) {
    struct probe p = {.shm = shm, .time_sum = time_sum, .user = user, .start_us = now_us()};
    struct ipc_choice found = ipc_choice_default();
    found.packets_max = found.one_shot_max = 0;
    int rc = probe_sizes(&p, &found);
    *out = rc == OK ? found : ipc_choice_default();
    return rc == ERR_TIMEOUT ? OK : rc;
}
