/* coordinator/settings.h: what `octavo serve` was told, completed from the machine and the model.
 *
 * Owns: the strings it made up (paths beside the program).  Called by: cmd_serve.c, cmd_doctor.c.
 * Fails how: ERR_SETUP with a sentence that names the option; ERR_CLOSED after --help.
 * Tested by: tests/faults/test_processes.py
 */
#ifndef OCTAVO_COORDINATOR_SETTINGS_H
#define OCTAVO_COORDINATOR_SETTINGS_H

#include "coordinator/gpus.h"
#include "proto/base.h"
#include "proto/gguf.h"

#define SETTINGS_PATH_BYTES 1200

struct settings {
    const char *model, *model_name, *device, *host, *api_key_file, *log_level, *log_file, *worker;
    int64_t tp, port, ctx, max_seqs, max_step_tokens, cache_tokens, pipeline;
    int64_t load_timeout, step_timeout, drain_timeout, restarts_max;
    int64_t reclaim_timeout, probe_port;
    int64_t load_stall_ms, restart_delay_ms;
    const char *device_memory;
    const char *devices, *collective, *shard_cache;
    const char *link_check; /* "auto", "on", "off" */
    const char *prefix_cache; /* "on", "off" */
    int64_t queue_requests, queue_tokens, request_timeout, key_concurrency, key_rate, max_gap;
    int n_devices;
    struct gpus gpus;
    char model_path[SETTINGS_PATH_BYTES]; /* the demonstration model, if none was named */
    char worker_path[SETTINGS_PATH_BYTES];
};

/* Options and environment; paths and the device completed from where the program stands. */
int settings_read(struct settings *s, int argc, char **argv, struct err_text *err);

/* Of device, devices, tp and worker what is missing, as `octavo serve` would have it. */
int settings_find_device(struct settings *s, struct err_text *err);

/* The numbers that depend on the model: context, ranks. */
int settings_fit(struct settings *s, const struct gguf *g, struct err_text *err);

#endif
