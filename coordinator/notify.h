/* coordinator/notify.h: what the service manager is told: ready, alive, how much longer, and a line
 * for people.
 *
 * Owns: a socket, the last line that was told.  Called by: cmd_serve.c, on the loop thread.
 * Fails how: it does not; without a manager that listens (NOTIFY_SOCKET) nothing is sent.
 * Limits: one line of NOTIFY_LINE_BYTES.  Like sd_notify(3), but never waits.
 * Tested by: tests/unit/test_notify.c, tests/faults/test_restart_systemd.py
 */
#ifndef OCTAVO_COORDINATOR_NOTIFY_H
#define OCTAVO_COORDINATOR_NOTIFY_H

#include "coordinator/engine.h"
#include "proto/base.h"

#define NOTIFY_LINE_BYTES 400
#define NOTIFY_BYTES      600

struct notify {
    int fd;             /* -1: nobody listens */
    bool watchdog;      /* the manager counts: it kills us when it hears nothing */
    unsigned period_ms; /* how often notify_look should be called */
    bool ready, stopping;
    char line[NOTIFY_LINE_BYTES];
};

/* Reads the environment that the manager gave us. */
void notify_open(struct notify *n);
void notify_close(struct notify *n);

/* Tells what is to be told. ready: what /health/ready says. stopping: asked to stop, or failed.
 * Call it from the loop, every period_ms and when something changed. */
void notify_look(struct notify *n, const struct engine_status *st, bool ready, bool stopping);

/* What notify_look sends: lines of KEY=VALUE, or "" for nothing. */
const char *notify_text(struct notify *n, const struct engine_status *st, bool ready, bool stopping,
                        char out[NOTIFY_BYTES]);

#endif
