/* coordinator/progress.h: how far the workers have come with loading, for whoever watches.
 *
 * Owns: the state of one bar.  Called by: fleet.c.  Fails how: it does not.
 * Tested by: tests/faults/test_processes.py
 */
#ifndef OCTAVO_COORDINATOR_PROGRESS_H
#define OCTAVO_COORDINATOR_PROGRESS_H

#include "proto/base.h"

struct progress {
    bool bar;         /* stderr is a terminal: one line, redrawn; else a log line a second */
    bool drawn;       /* the bar stands on an unfinished line */
    uint64_t last_us; /* 0: nothing shown yet */
    uint64_t last_bytes;
};

void progress_show(struct progress *p, uint64_t bytes, uint64_t total, uint64_t now_us);
void progress_end(struct progress *p); /* before anything else is written */

#endif
