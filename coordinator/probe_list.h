/* coordinator/probe_list.h: the sockets at which workers of this host answer probes, whatever has
 * become of their coordinators.
 *
 * Owns: nothing.  Called by: cmd_probe.c, doctor_bundle.c.
 * Fails how: what cannot be read is not there.  Limits: those that the caller has room for.
 * Tested by: tests/faults/test_probe.py, tests/faults/test_doctor.py
 */
#ifndef OCTAVO_COORDINATOR_PROBE_LIST_H
#define OCTAVO_COORDINATOR_PROBE_LIST_H

#include "proto/base.h"

#define PROBE_NAME_BYTES 64

struct probe_socket {
    int64_t pid; /* of the coordinator */
    int rank;
};

int probe_list(struct probe_socket *out, int most); /* how many, in the kernel's order */
void probe_name(char out[PROBE_NAME_BYTES], int64_t pid, int rank); /* "@octavo-probe-…" */

#endif
