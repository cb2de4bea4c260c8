/* worker/probe.h: plain HTTP answers about this one worker, for probes that must not depend on the
 * coordinator.
 *
 *   GET /live      200 while the control thread turns
 *   GET /ready     200 when this rank could take a step, else 503
 *   GET /progress  503 when a step is under way for longer than steps of its size may take
 *   GET /status    200 and all of it as JSON
 * The first three answer one word, the state.
 *
 * Owns: a Unix socket, a TCP socket on 127.0.0.1, PROBE_CLIENTS connections.
 * Called by: the control thread, which polls for it.
 * Fails how: probe_open with ERR_SETUP and a sentence; a bad client loses its connection.
 * Limits: PROBE_CLIENTS connections (a further one takes the place of the oldest),
 * PROBE_REQUEST_BYTES of a request, PROBE_PATIENCE_US for all of it.  Tested by: tests/unit/test_probe.c
 */
#ifndef OCTAVO_WORKER_PROBE_H
#define OCTAVO_WORKER_PROBE_H

#include <poll.h>

#include "proto/msg.h"

#define PROBE_CLIENTS       16
#define PROBE_REQUEST_BYTES 2048
#define PROBE_PATIENCE_US   2000000
#define PROBE_FDS           (PROBE_CLIENTS + 2)

struct probe;

struct probe_options {
    const char *socket; /* "@name" (abstract, leaves no file) or a path; NULL: none */
    int port;           /* on 127.0.0.1; 0: none */
};

/* What there is to tell. Times are of the clock that probe_turn is given. */
struct probe_status {
    struct msg_beat beat;
    int32_t rank, world;
    int64_t pid;
    uint64_t start_time;
    const char *device;
    uint32_t generation;      /* of the communicator, 0: none yet */
    uint64_t step_began_us;   /* of the step under way; 0: none is */
    uint64_t step_bound_us;   /* how long it may take; 0: no bound */
    uint64_t last_step_at_us; /* 0: none yet */
    const char *last_error;   /* "": none */
    int graphs;               /* steps kept as graphs at the start, */
    uint64_t graph_bytes;     /* the device memory they took, */
    double graph_seconds;     /* and the time */
};

int probe_open(struct probe **out, const struct probe_options *o, struct err_text *err);
void probe_close(struct probe *p); /* NULL is fine */

/* Descriptors to poll for, at most PROBE_FDS; returns how many. */
int probe_fds(const struct probe *p, struct pollfd *out);

/* Accepts, reads, answers and closes as far as that goes without waiting. Cheap when nothing is to
 * be done. */
void probe_turn(struct probe *p, const struct probe_status *s, uint64_t now_us);

#endif
