/* coordinator/debris.h: files that dead processes of ours left behind, removed before a start.
 *
 * Owns: nothing.  Called by: cmd_serve.c before the workers are started.
 * Fails how: what cannot be looked at or removed stays; nothing is worth a start.
 * Limits: DEBRIS_MAX files a call.  Tested by: tests/unit/test_debris.c,
 * tests/faults/test_restart_debris.py
 */
#ifndef OCTAVO_COORDINATOR_DEBRIS_H
#define OCTAVO_COORDINATOR_DEBRIS_H

#include "proto/base.h"

#define DEBRIS_MAX 256

/* NCCL's segments in `shm` ("/dev/shm") that are this user's, older than `age_s` and that no
 * process has open or mapped. Returns how many were removed. */
int debris_clear_nccl(const char *shm, int64_t now_s, int64_t age_s);

/* Half-written files of a shard cache, "….shard.PID", that nobody has written for `age_s`. */
int debris_clear_shards(const char *dir, int64_t now_s, int64_t age_s);

#endif
