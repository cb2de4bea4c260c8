/* coordinator/gpus.h: the GPUs of this host, which ranks get which, and the cores beside them.
 *
 * Owns: nothing.  Called by: settings.c, launch.c, fleet_gate.c, cmd_guard.c.
 * Fails how: gpus_deal with ERR_SETUP and a sentence; what cannot be found out counts as not there.
 * Limits: GPUS_MAX, LIMIT_RANKS.  Tested by: tests/unit/test_gpus.c
 */
#ifndef OCTAVO_COORDINATOR_GPUS_H
#define OCTAVO_COORDINATOR_GPUS_H

#include <sched.h>

#include "coordinator/device_memory.h"
#include "proto/base.h"
#include "proto/limits.h"

#define GPUS_MAX 64

struct gpu {
    char pci[24];   /* "0000:01:00.0", empty: unknown */
    cpu_set_t near; /* cores of its NUMA node; empty: unknown */
};

struct gpus {
    int n;
    struct gpu gpu[GPUS_MAX]; /* by ordinal, in the order of the bus */
    int n_dealt;
    int dealt[LIMIT_RANKS]; /* ordinals that ranks get in turn */
};

/* Looks below `root` ("" is this host, anything else a test's folder). visible: the value of
 * CUDA_VISIBLE_DEVICES, or NULL. */
void gpus_find(struct gpus *g, const char *root, const char *visible);

/* list: ordinals like "0,1,1", or NULL for all of them once. */
int gpus_deal(struct gpus *g, const char *list, struct err_text *err);

int gpus_ranks(const struct gpus *g); /* one per GPU, as far as that is 1, 2, 4 or 8 */
int gpus_of_rank(const struct gpus *g, int rank);

/* Which devices, as the driver counts them, ranks below `world` get. false: it does not know one of
 * them by its address (MIG, a container), and `on` says nothing. */
bool gpus_devices(const struct gpus *g, int world, const struct device_memory *m,
                  bool on[DEVICE_MAX]);

/* The cores of `rank`: those near its GPU, shared evenly with the other ranks near them. */
void gpus_cores(const struct gpus *g, cpu_set_t *out, const cpu_set_t *allowed, int rank,
                int world);

#endif
