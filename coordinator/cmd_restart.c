/* coordinator/cmd_restart.c: `octavo restart --rank N`: asks a running server to replace one rank,
 * and waits until it has.
 *
 *   ask for it ──202──> the rank has another pid, is ready, and so is the service ──> 0
 *      │ 503: a rank is being replaced already; again in a moment
 *      └─ until --timeout ──> 1
 * Exit code: 0 replaced · 1 not, or not in time · 2 asked wrongly · 3 no answer.
 *
 * Owns: nothing.  Called by: main.c; deploy/restart.  Fails how: see above, with a sentence.
 * Limits: LIMIT_RANKS.  Tested by: tests/faults/test_restart.py
 */
#include <inttypes.h>
#include <jansson.h>
#include <string.h>
#include <time.h>

#include "coordinator/cmd.h"
#include "coordinator/http_ask.h"
#include "proto/base.h"
#include "proto/limits.h"
#include "proto/opt.h"

#define URL_DEFAULT "http://127.0.0.1:8000"
#define LOOK_MS     50
#define ANSWER_MS   10000
#define KEY_BYTES   600

enum { REPLACED = 0, NOT_REPLACED = 1, WRONG = 2, SILENT = 3 };

struct restarting {
    int64_t rank, timeout_s;
    const char *url, *key_file;
    char key[KEY_BYTES], host[256];
    int port;
    int64_t old_pid, new_pid;
    char why[400]; /* what is waited for */
};

static const char usage[] =
    "usage: octavo restart --rank N [OPTION…]\n"
    "Has a running server replace one rank, while its streams go on, and waits for it.\n"
    "Exit code: 0 replaced, 1 not in time, 2 asked wrongly, 3 no answer.";

static int read_options(struct restarting *r, int argc, char **argv, struct err_text *err) {
    const struct opt rows[] = {
        {.name = "rank",
         .value = "N",
         .kind = OPT_INT,
         .out = &r->rank,
         .min = 0,
         .max = LIMIT_RANKS - 1,
         .help = "The rank to replace."},
        {.name = "url",
         .value = "URL",
         .kind = OPT_STRING,
         .out = &r->url,
         .shown = URL_DEFAULT,
         .help = "Where the coordinator listens."},
        {.name = "api-key-file",
         .value = "FILE",
         .kind = OPT_STRING,
         .out = &r->key_file,
         .help = "File whose first line is the key to show to the coordinator."},
        {.name = "timeout",
         .value = "SECONDS",
         .kind = OPT_INT,
         .out = &r->timeout_s,
         .min = 1,
         .max = 86400,
         .shown = "3600",
         .help = "How long replacing it may take."},
    };
    TRY(opt_parse(rows, ARRAY_LEN(rows), argc, argv, 0, usage, err));
    if (r->rank < 0) return err_set(err, ERR_SETUP, "expected --rank N, found none");
    TRY(http_ask_key(r->key, sizeof r->key, r->key_file, err));
    return http_ask_url(r->url, r->host, sizeof r->host, &r->port, err);
}

static int ask(const struct restarting *r, const char *method, const char *path,
               struct http_reply *out, struct err_text *err) {
    struct http_ask a = {.method = method,
                         .path = path,
                         .host = r->host,
                         .port = r->port,
                         .key = r->key[0] ? r->key : NULL,
                         .timeout_ms = ANSWER_MS};
    if (!strcmp(method, "POST")) a.body = "";
    return http_ask(&a, out, err);
}

static int64_t number(const json_t *o, const char *name) {
    return json_integer_value(json_object_get(o, name));
}

/* 202: the pid that will go. */
static int request(struct restarting *r, struct err_text *err) {
    char path[64];
    struct http_reply reply;
    snprintf(path, sizeof path, "/v1/restart/%" PRId64, r->rank);
    int rc = ask(r, "POST", path, &reply, err), status = 0;
    if (rc == OK) {
        json_t *root = json_loadb(reply.body, reply.n, 0, NULL);
        const char *why =
            json_string_value(json_object_get(json_object_get(root, "error"), "message"));
        status = reply.status;
        r->old_pid = number(root, "pid");
        snprintf(r->why, sizeof r->why, "%d: %.300s", status, why ? why : "no reason given");
        json_decref(root);
    }
    http_reply_deinit(&reply);
    return rc < 0 ? rc : status;
}

/* The rank has another process, which is ready. */
static bool is_replaced(struct restarting *r, struct err_text *err) {
    struct http_reply reply;
    bool there = false;
    if (ask(r, "GET", "/v1/workers", &reply, err) == OK) {
        json_t *root = json_loadb(reply.body, reply.n, 0, NULL);
        json_t *w = json_array_get(json_object_get(root, "data"), (size_t)r->rank);
        const char *state = json_string_value(json_object_get(w, "state"));
        r->new_pid = number(w, "pid");
        there = state && (!strcmp(state, "ready") || !strcmp(state, "stepping")) &&
                r->new_pid != r->old_pid;
        snprintf(r->why, sizeof r->why, "its process is %" PRId64 ", %.40s", r->new_pid,
                 state ? state : "unknown");
        json_decref(root);
    }
    http_reply_deinit(&reply);
    return there;
}

static bool is_ready(struct restarting *r, struct err_text *err) {
    struct http_reply reply;
    bool ready = ask(r, "GET", "/health/ready", &reply, err) == OK && reply.status == 200;
    http_reply_deinit(&reply);
    return ready;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static bool wait_a_look(double due_s) {
    nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000}, NULL);
    return now_s() < due_s;
}

static int replace(struct restarting *r, struct err_text *err) {
    double begun_s = now_s(), due_s = begun_s + (double)r->timeout_s;
    int status;
    do status = request(r, err);
    while (status == 503 && wait_a_look(due_s));
    if (status < 0) {
        printf("rank %" PRId64 ": no answer: %s\n", r->rank, err->text);
        return SILENT;
    }
    if (status != 202) {
        printf("rank %" PRId64 ": not replaced: %s\n", r->rank, r->why);
        return status == 503 || status == 401 ? NOT_REPLACED : WRONG;
    }
    while (!(is_replaced(r, err) && is_ready(r, err)))
        if (!wait_a_look(due_s)) {
            printf("rank %" PRId64 ": not replaced within %" PRId64 " s: %s\n", r->rank,
                   r->timeout_s, r->why);
            return NOT_REPLACED;
        }
    printf("rank %" PRId64 ": replaced, process %" PRId64 " by %" PRId64 ", in %.1f s\n", r->rank,
           r->old_pid, r->new_pid, now_s() - begun_s);
    return REPLACED;
}

int cmd_restart(int argc, char **argv) {
    struct err_text err = {0};
    struct restarting r = {.rank = -1, .timeout_s = 3600, .url = URL_DEFAULT};
    int rc = read_options(&r, argc, argv, &err);
    if (rc == ERR_CLOSED) return EXIT_ASKED;
    if (rc >= 0) return replace(&r, &err);
    fprintf(stderr, "octavo restart: %s\n", err.text);
    return WRONG;
}
