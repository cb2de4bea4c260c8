/* coordinator/proc.h: what the operating system says of a process that holds device memory.
 *
 * Owns: nothing.  Called by: reclaim.c through struct reclaim_host.
 * Fails how: a process that cannot be read is nobody's.  Tested by: tests/unit/test_reclaim.c
 */
#ifndef OCTAVO_COORDINATOR_PROC_H
#define OCTAVO_COORDINATOR_PROC_H

#include "proto/base.h"

/* Its environment was started with this cookie: a worker of ours, or a child of one. */
bool proc_has_cookie(int64_t pid, const char *cookie);

/* A worker whose coordinator, as its command line names it, is no more. */
bool proc_is_abandoned(int64_t pid);

/* SIGKILL to that process and to no later one of the same pid. OK, ERR_NOT_FOUND or ERR_SYS. */
int proc_kill(int64_t pid, uint64_t start_time);

/* "python3", or "not visible here". */
void proc_name(int64_t pid, char *out, size_t n);

#endif
