/* coordinator/settings.c: what `octavo serve` was told. See settings.h.
 *
 * Owns: nothing beyond struct settings.  Called by: cmd_serve.c.
 * Fails how: ERR_SETUP with a sentence, ERR_CLOSED after --help.
 * Tested by: tests/faults/test_processes.py
 *
 * The programs stand side by side in a build folder, an installed prefix and a bundle alike, so the
 * worker is looked for beside this program and nowhere else: a worker of another build found on
 * some search path would be refused at HELLO anyway, with a sentence that is harder to act on.
 */
#include "coordinator/settings.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/limits.h"
#include "proto/log.h"
#include "proto/opt.h"

#define DEMONSTRATION "tests/models/tiny.gguf"

static const char usage[] =
    "usage: octavo serve [OPTION…]\n"
    "Serves a model over HTTP, OpenAI style, with one worker process per rank.";

static int read_options(struct settings *s, int argc, char **argv, struct err_text *err) {
#define TEXT(n, v, field, def, h)                                                                  \
    { .name = n, .value = v, .kind = OPT_STRING, .out = &s->field, .shown = def, .help = h }
#define NUMBER(n, v, field, lo, hi, def, h)                                                        \
    {                                                                                              \
        .name = n, .value = v, .kind = OPT_INT, .out = &s->field, .min = lo, .max = hi,            \
        .shown = def, .help = h                                                                    \
    }
    const struct opt rows[] = {
        TEXT("model", "PATH", model, "the demonstration model",
             "GGUF file to serve, or any part of a split one."),
        TEXT("served-model-name", "NAME", model_name, "the file's name",
             "Name that requests must ask for."),
        NUMBER("tp", "N", tp, 1, LIMIT_RANKS, "8 on cpu, one per GPU on cuda",
               "Ranks, one worker process each; must divide the model's heads."),
        {.name = "device",
         .kind = OPT_CHOICE,
         .out = &s->device,
         .choices = "cpu|cuda",
         .shown = "cuda if there is a GPU and a worker for it",
         .help = "Backend of the workers."},
        TEXT("devices", "LIST", devices, "all of them",
             "GPUs that ranks get in turn, like 0,1; a GPU may serve several ranks."),
        {.name = "collective",
         .kind = OPT_CHOICE,
         .out = &s->collective,
         .choices = "auto|shm|ipc|nccl",
         .shown = "auto: ipc, nccl or shm, what the devices can do",
         .help = "How ranks add up; cpu has shm alone."},
        {.name = "link-check",
         .kind = OPT_CHOICE,
         .out = &s->link_check,
         .choices = "auto|on|off",
         .shown = "auto: with several GPUs",
         .help = "Whether ranks add up once before weights are read, so that a link that hangs is "
                 "a sentence."},
        TEXT("shard-cache", "DIR", shard_cache, "none",
             "Keep each rank's repacked weights here, as much again as the model, for fast starts."),
        TEXT("host", "ADDRESS", host, "127.0.0.1", "Address to listen on."),
        NUMBER("port", "N", port, 0, 65535, "8000", "Port to listen on; 0: any free one."),
        NUMBER("ctx", "TOKENS", ctx, 2, LIMIT_CONTEXT_TOKENS, "the model's",
               "Longest sequence, prompt and answer together."),
        NUMBER("max-seqs", "N", max_seqs, 1, LIMIT_SLOTS, "64", "Sequences running at once."),
        NUMBER("max-step-tokens", "N", max_step_tokens, 1, LIMIT_STEP_ROWS, "512",
               "Tokens fed in one step, at least --max-seqs."),
        NUMBER("cache-tokens", "N", cache_tokens, 0, (int64_t)1 << 40, "from free memory",
               "Tokens that the cache holds, all sequences together."),
        {.name = "prefix-cache",
         .kind = OPT_CHOICE,
         .out = &s->prefix_cache,
         .choices = "on|off",
         .shown = "on",
         .help = "Whether what was computed before is found again."},
        NUMBER("max-gap", "MS", max_gap, 0, 600000, "200",
               "How long prompts may keep a stream waiting for its next token; 0: no bound."),
        NUMBER("queue-requests", "N", queue_requests, 1, LIMIT_QUEUE_REQUESTS, "4096",
               "Requests beyond those that run; more get 503. n answers count as n."),
        NUMBER("queue-tokens", "N", queue_tokens, 1, LIMIT_QUEUE_TOKENS, "67108864",
               "Tokens of the requests that wait, all together; more get 503."),
        NUMBER("key-concurrency", "N", key_concurrency, 0, LIMIT_QUEUE_REQUESTS, "0, no bound",
               "Answers that one key may have in progress; more get 429."),
        NUMBER("key-rate", "N", key_rate, 0, 1000000, "0, no bound",
               "Requests that one key may begin a minute; more get 429."),
        NUMBER("request-timeout", "SECONDS", request_timeout, 0, 86400, "0, none",
               "Longest time from a request to its last token."),
        TEXT("api-key-file", "FILE", api_key_file, "none",
             "Keys that clients must show, one a line."),
        NUMBER("pipeline", "N", pipeline, 1, 4, "2", "Steps in flight at once."),
        NUMBER("load-timeout", "SECONDS", load_timeout, 1, 86400, "3600",
               "Longest time a worker may take to load."),
        NUMBER("step-timeout", "SECONDS", step_timeout, 1, 86400, "3",
               "Longest time a step of one token may take; more tokens may take longer."),
        NUMBER("drain-timeout", "SECONDS", drain_timeout, 0, 86400, "60",
               "How long running answers may go on after SIGTERM."),
        NUMBER("restarts-max", "N", restarts_max, 1, 1000000, "10",
               "Restarts of the workers within ten minutes before giving up."),
        NUMBER("reclaim-timeout", "SECONDS", reclaim_timeout, 1, 86400, "60",
               "How long the device memory of a dead worker may take to return."),
        NUMBER("probe-port", "N", probe_port, 0, 65535 - LIMIT_RANKS, "0, none",
               "The worker of rank R answers probes on 127.0.0.1, port N + R."),
        TEXT("log-level", "LEVEL", log_level, "info", "debug, info, warn or error."),
        TEXT("log-file", "FILE", log_file, "standard error",
             "Where this program logs; opened again on SIGHUP."),
        {.name = "worker",
         .value = "PATH",
         .kind = OPT_STRING,
         .out = &s->worker,
         .help = "The worker's program.",
         .hidden = true},
        {.name = "restart-delay",
         .value = "MS",
         .kind = OPT_INT,
         .out = &s->restart_delay_ms,
         .min = 0,
         .max = 86400000,
         .help = "Before a rank's second restart in a row; then it doubles, up to a hundred times.",
         .hidden = true},
        {.name = "load-stall",
         .value = "MS",
         .kind = OPT_INT,
         .out = &s->load_stall_ms,
         .min = 0,
         .max = 86400000,
         .help = "A load in which nothing moves for so long is told as stalled.",
         .hidden = true},
        {.name = "device-memory",
         .value = "SOURCE",
         .kind = OPT_STRING,
         .out = &s->device_memory,
         .help = "none, nvml or script:PATH.",
         .hidden = true},
    };
#undef TEXT
#undef NUMBER
    return opt_parse(rows, ARRAY_LEN(rows), argc, argv, 0, usage, err);
}

/* The folder this program stands in. */
static int own_folder(char out[PATH_MAX], struct err_text *err) {
    ssize_t n = readlink("/proc/self/exe", out, PATH_MAX - 1);
    if (n <= 0)
        return err_set(err, ERR_SETUP, "/proc/self/exe: expected this program's path, found: %s",
                       strerror(errno));
    out[n] = 0;
    *strrchr(out, '/') = 0;
    return OK;
}

static int find_model(struct settings *s, const char *folder, struct err_text *err) {
    static const char *const places[] = {"%s/" DEMONSTRATION, "%s/../" DEMONSTRATION,
                                         "%s/../share/octavo/tiny.gguf"};
    char real[PATH_MAX];
    if (s->model) return OK;
    for (size_t i = 0; i < ARRAY_LEN(places); i++) {
        char path[SETTINGS_PATH_BYTES];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(path, sizeof path, places[i], folder);
#pragma GCC diagnostic pop
        if (!realpath(path, real) || strlen(real) >= sizeof s->model_path) continue;
        strcpy(s->model_path, real);
        s->model = s->model_path;
        return OK;
    }
    return err_set(err, ERR_SETUP,
                   "--model: expected a path, found none, nor the demonstration model near %.300s",
                   folder);
}

static void find_worker(struct settings *s, const char *folder, const char *device) {
    snprintf(s->worker_path, sizeof s->worker_path, "%.1100s/octavo-worker%s", folder,
             !strcmp(device, "cuda") ? "-cuda" : "");
}

static int find_device(struct settings *s, const char *folder, struct err_text *err) {
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 0); /* workers count as gpus.c does */
    gpus_find(&s->gpus, "", getenv("CUDA_VISIBLE_DEVICES"));
    int gpus = s->gpus.n;
    if (!s->device) {
        find_worker(s, folder, "cuda");
        s->device = gpus > 0 && access(s->worker_path, X_OK) == 0 ? "cuda" : "cpu";
    }
    bool cuda = !strcmp(s->device, "cuda");
    if (cuda && gpus == 0)
        return err_set(err, ERR_SETUP, "--device cuda: expected a GPU with its driver, found none");
    find_worker(s, folder, s->device);
    if (!s->worker) s->worker = s->worker_path;
    if (access(s->worker, X_OK) < 0)
        return err_set(err, ERR_SETUP, "--device %s: expected the program %.300s, found: %s",
                       s->device, s->worker, strerror(errno));
    if (s->devices && !cuda)
        return err_set(err, ERR_SETUP, "--devices: expected --device cuda with it, found %s",
                       s->device);
    if (cuda) TRY(gpus_deal(&s->gpus, s->devices, err));
    s->n_devices = cuda ? gpus : 0;
    if (s->tp == 0) s->tp = cuda ? gpus_ranks(&s->gpus) : 8;
    return OK;
}

int settings_find_device(struct settings *s, struct err_text *err) {
    char folder[PATH_MAX];
    TRY(own_folder(folder, err));
    return find_device(s, folder, err);
}

int settings_read(struct settings *s, int argc, char **argv, struct err_text *err) {
    char folder[PATH_MAX];
    enum log_level level;
    *s = (struct settings){.host = "127.0.0.1",
                           .port = 8000,
                           .max_seqs = 64,
                           .pipeline = 2,
                           .max_step_tokens = 512,
                           .prefix_cache = "on",
                           .link_check = "auto",
                           .max_gap = 200,
                           .queue_requests = LIMIT_QUEUE_REQUESTS,
                           .queue_tokens = LIMIT_QUEUE_TOKENS,
                           .load_timeout = 3600,
                           .step_timeout = 3,
                           .drain_timeout = 60,
                           .restarts_max = 10,
                           .reclaim_timeout = 60,
                           .log_level = "info"};
    TRY(read_options(s, argc, argv, err));
    if (!log_parse_level(s->log_level, &level))
        return err_set(err, ERR_SETUP, "--log-level: expected debug, info, warn or error, found %s",
                       s->log_level);
    if ((s->key_concurrency || s->key_rate) && !s->api_key_file)
        return err_set(err, ERR_SETUP, "--key-%s: expected --api-key-file with it, found none",
                       s->key_rate ? "rate" : "concurrency");
    if (s->max_step_tokens < s->max_seqs)
        return err_set(err, ERR_SETUP,
                       "--max-step-tokens: expected at least --max-seqs %" PRId64
                       ", found %" PRId64,
                       s->max_seqs, s->max_step_tokens);
    TRY(own_folder(folder, err));
    TRY(find_model(s, folder, err));
    if (!s->model_name) {
        const char *slash = strrchr(s->model, '/');
        s->model_name = slash ? slash + 1 : s->model;
    }
    return find_device(s, folder, err);
}

int settings_fit(struct settings *s, const struct gguf *g, struct err_text *err) {
    struct gguf_str arch;
    char key[128];
    uint64_t context, heads;
    int rc = gguf_get_str(g, "general.architecture", &arch, err);
    if (rc < 0 || arch.n > 32)
        return err_set(err, ERR_SETUP,
                       "%.300s: general.architecture: expected a short string, found %s", s->model,
                       rc < 0 ? "none" : "a long one");
    snprintf(key, sizeof key, "%.*s.context_length", (int)arch.n, arch.p);
    rc = gguf_get_u64(g, key, &context, err);
    if (rc < 0 || context < 2)
        return err_set(err, ERR_SETUP, "%.300s: %s: expected a number of tokens, found none",
                       s->model, key);
    if (context > LIMIT_CONTEXT_TOKENS) context = LIMIT_CONTEXT_TOKENS;
    if (s->ctx > (int64_t)context)
        return err_set(err, ERR_SETUP,
                       "--ctx: expected at most the model's %" PRIu64 " tokens, found %" PRId64,
                       context, s->ctx);
    if (s->ctx == 0) s->ctx = (int64_t)context;
    snprintf(key, sizeof key, "%.*s.attention.head_count", (int)arch.n, arch.p);
    if (gguf_get_u64(g, key, &heads, NULL) == OK && heads % (uint64_t)s->tp)
        return err_set(err, ERR_SETUP,
                       "--tp: expected a divisor of the model's %" PRIu64 " heads, found %" PRId64,
                       heads, s->tp);
    if (s->n_devices && s->tp > s->gpus.n_dealt)
        log_info("devices_shared", "ranks=%" PRId64 " devices=%d", s->tp, s->gpus.n_dealt);
    return OK;
}
