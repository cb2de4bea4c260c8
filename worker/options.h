/* worker/options.h: what a worker is told when it is started.
 *
 * Owns: nothing; strings are argv's or the environment's.  Called by: main.c.
 * Fails how: ERR_SETUP with a sentence; ERR_CLOSED when help was asked for and given.
 * Limits: LIMIT_RANKS, LIMIT_SLOTS, LIMIT_STEP_ROWS.  Tested by: tests/unit/test_worker.c
 */
#ifndef OCTAVO_WORKER_OPTIONS_H
#define OCTAVO_WORKER_OPTIONS_H

#include "proto/base.h"

struct options {
    int64_t rank, world, device_index, context, max_slots, max_rows, incarnation, parent_pid,
        parent_start, probe_port, step_limit;
    const char *probe_socket;
    const char *model, *device, *collective, *endpoint, *cpus, *dump, *dump_to, *log_level,
        *load_share, *shard_cache, *switches;
};

/* Over the defaults in *o: environment, then command line. Sets the debug switches too. */
int options_parse(struct options *o, int argc, char **argv, struct err_text *err);

#endif
