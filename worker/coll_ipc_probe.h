/* worker/coll_ipc_probe.h: which algorithm for which size, found by measuring.
 *
 * No device in here: coll_ipc.cu brings the stopwatch, tests bring numbers.
 */
#ifndef OCTAVO_WORKER_COLL_IPC_PROBE_H
#define OCTAVO_WORKER_COLL_IPC_PROBE_H

#include "worker/coll_ipc.h"

#ifdef __cplusplus
extern "C" {
#endif

#define IPC_PROBE_BYTES (1 << 20) /* the largest size measured */
#define IPC_PROBE_US    300000    /* after so long, what is not measured keeps its default */

/* Sums up to packets_max bytes go as packets, up to one_shot_max in one shot, the rest in two. */
struct ipc_choice {
    int64_t packets_max, one_shot_max;
    int32_t one_shot, two_shot; /* enum ipc_algorithm */
    int32_t known;              /* settled by an earlier generation */
};

struct ipc_choice ipc_choice_default(void);

/* Blocks of a kernel of `asked` at most, so that those of `sharing` ranks on one device of `sms`
 * processors, of two kernels each, are resident together. */
int ipc_blocks(int asked, int sharing, int sms);
enum ipc_algorithm ipc_choose(const struct ipc_choice *c, int64_t bytes);

/* All ranks of shm measure the same in the same order and come to the same choice, which is the one
 * that is best for the slowest rank. time_sum: microseconds on this rank. ERR_ABORTED or OK. */
int ipc_probe(struct ipc_choice *out, struct coll *shm,
              float (*time_sum)(void *user, enum ipc_algorithm, int64_t bytes), void *user);

#ifdef __cplusplus
}
#endif
#endif
