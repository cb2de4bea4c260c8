/* coordinator/reap.h: the duty of the first process of a container: to bury those nobody else does.
 *
 * Owns: nothing.  Called by: cmd_serve.c, on the loop thread, once in a while.
 * Fails how: it does not.  Tested by: tests/faults/test_restart_container.py
 */
#ifndef OCTAVO_COORDINATOR_REAP_H
#define OCTAVO_COORDINATOR_REAP_H

#include "proto/base.h"

/* Orphans of others become our children: this is the first process of its pid namespace, or was
 * made a subreaper. */
bool reap_is_owed(void);

/* Takes the exit of every child that has ended and is not among ours[n], whose exits libuv takes.
 * Returns how many. */
int reap_strangers(const int64_t *ours, int n);

#endif
