/* coordinator/cmd_probe.c: `octavo probe WHAT`: is it alive, ready, getting on, answering? For
 * scripts: one line for each that was asked, and an exit code.
 *
 *   octavo probe ready                    the coordinator
 *   octavo probe --all progress           each worker of this host, over its Unix socket
 *   octavo probe --rank 3 --port-base 9100 live
 *   octavo probe canary                   a token is produced now
 *   octavo probe --all canary             and each worker of this host took part in it
 * Exit code: 0 yes · 1 no · 2 asked wrongly · 3 no answer; of several, the largest.
 *
 * Owns: nothing.  Called by: main.c.  Fails how: see above.  Limits: LIMIT_RANKS.
 * Tested by: tests/faults/test_probe.py
 *
 * A worker's socket is found by its name in /proc/net/unix and not through the coordinator, which may
 * be what is ill. How many there should be is what any of them says: a rank that is missing at the
 * end of the row is missed too.
 */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/cmd.h"
#include "coordinator/http_ask.h"
#include "coordinator/probe_list.h"
#include "proto/base.h"
#include "proto/limits.h"
#include "proto/opt.h"

#define URL_DEFAULT   "http://127.0.0.1:8000"
#define KEY_BYTES     600

enum { YES = 0, NO = 1, WRONG = 2, SILENT = 3 };

struct probing {
    int64_t rank, port_base, pid, tp, timeout_s;
    bool all;
    const char *url, *key_file;
    char key[KEY_BYTES];
    const char *what;
};

static const char usage[] =
    "usage: octavo probe [OPTION…] live|ready|progress|canary\n"
    "Asks the coordinator, or with --rank or --all the workers, and says so in one line each.\n"
    "Exit code: 0 yes, 1 no, 2 asked wrongly, 3 no answer; of several answers, the largest.";

static int read_options(struct probing *p, int argc, char **argv, struct err_text *err) {
    const struct opt rows[] = {
        {.name = "rank", .value = "N", .kind = OPT_INT, .out = &p->rank, .min = 0,
         .max = LIMIT_RANKS - 1, .help = "Ask this worker."},
        {.name = "all", .kind = OPT_FLAG, .out = &p->all, .help = "Ask all workers."},
        {.name = "url", .value = "URL", .kind = OPT_STRING, .out = &p->url, .shown = URL_DEFAULT,
         .help = "Where the coordinator listens."},
        {.name = "port-base", .value = "N", .kind = OPT_INT, .out = &p->port_base, .min = 0,
         .max = 65535, .shown = "Unix sockets",
         .help = "Ask workers on 127.0.0.1, rank R on port N + R."},
        {.name = "pid", .value = "PID", .kind = OPT_INT, .out = &p->pid, .min = 0, .max = INT32_MAX,
         .shown = "any", .help = "Only workers of this coordinator, by their Unix sockets."},
        {.name = "tp", .value = "N", .kind = OPT_INT, .out = &p->tp, .min = 0, .max = LIMIT_RANKS,
         .shown = "as the workers say", .help = "How many workers --all must find."},
        {.name = "api-key-file", .value = "FILE", .kind = OPT_STRING, .out = &p->key_file,
         .help = "File whose first line is the key to show to the coordinator."},
        {.name = "timeout", .value = "SECONDS", .kind = OPT_INT, .out = &p->timeout_s, .min = 1,
         .max = 86400, .shown = "5, canary 60", .help = "How long an answer may take."},
    };
    int n = opt_parse(rows, ARRAY_LEN(rows), argc, argv, 1, usage, err);
    if (n < 0) return n;
    if (n == 0)
        return err_set(err, ERR_SETUP, "expected live, ready, progress or canary, found nothing");
    p->what = argv[1];
    bool canary = !strcmp(p->what, "canary");
    if (!canary && strcmp(p->what, "live") && strcmp(p->what, "ready") && strcmp(p->what, "progress"))
        return err_set(err, ERR_SETUP, "expected live, ready, progress or canary, found %.100s",
                       p->what);
    if (p->all && p->rank >= 0)
        return err_set(err, ERR_SETUP, "expected --rank or --all, found both");
    if (p->all && p->port_base && !p->tp)
        return err_set(err, ERR_SETUP, "--all with --port-base: expected --tp too, found none");
    if (p->timeout_s == 0) p->timeout_s = canary ? 60 : 5;
    return OK;
}

/* ---- answers --------------------------------------------------------------------------------- */

/* The first line of a body, without what a terminal would obey. */
static const char *line_of(const struct http_reply *r, char *out, size_t n) {
    snprintf(out, n, "%.*s", (int)strcspn(r->body, "\r\n"), r->body);
    for (char *c = out; *c; c++)
        if ((unsigned char)*c < 32 || *c == 127) *c = '?';
    return out;
}

static int ask(const struct probing *p, const char *who, struct http_ask *a, struct http_reply *r) {
    struct err_text err = {0};
    a->timeout_ms = (int)MIN(p->timeout_s * 1000, INT32_MAX);
    a->key = p->key[0] && !a->socket ? p->key : NULL;
    if (http_ask(a, r, &err) == OK) return YES;
    printf("%s %s: no answer: %s\n", who, p->what, err.text);
    return SILENT;
}

static int report(const struct probing *p, const char *who, const struct http_reply *r) {
    char line[400];
    bool yes = r->status == 200;
    printf("%s %s: %s (%d) %s\n", who, p->what, yes ? "yes" : "no", r->status,
           line_of(r, line, sizeof line));
    return yes ? YES : NO;
}

/* ---- the coordinator ------------------------------------------------------------------------- */

/* quiet: a yes is not printed. */
static int coordinator(const struct probing *p, bool quiet, struct err_text *err) {
    char host[256], path[64];
    struct http_ask a = {.method = "GET", .path = path};
    struct http_reply r;
    if (http_ask_url(p->url, host, sizeof host, &a.port, err) < 0) return WRONG;
    a.host = host;
    snprintf(path, sizeof path, "/health/%s", p->what);
    int rc = ask(p, "coordinator", &a, &r);
    if (rc == YES && !(quiet && r.status == 200)) rc = report(p, "coordinator", &r);
    http_reply_deinit(&r);
    return rc;
}

/* ---- the workers ----------------------------------------------------------------------------- */

struct sockets {
    int64_t pid[LIMIT_RANKS]; /* whose rank it is; 0: none found */
    int n, n_coordinators;    /* the highest rank found and one */
};

/* Worker sockets by rank. */
static void find_sockets(const struct probing *p, struct sockets *s) {
    struct probe_socket all[8 * LIMIT_RANKS];
    int64_t first = 0;
    int n = probe_list(all, ARRAY_LEN(all));
    *s = (struct sockets){0};
    for (int i = 0; i < n; i++) {
        const int64_t pid = all[i].pid;
        const int rank = all[i].rank;
        if (p->pid && pid != p->pid) continue;
        if (first == 0) s->n_coordinators = 1;
        else if (pid != first) s->n_coordinators = 2;
        if (first == 0) first = pid;
        s->pid[rank] = pid;
        s->n = MAX(s->n, rank + 1);
    }
}

static void aim(const struct probing *p, const struct sockets *s, int rank, struct http_ask *a,
                char name[64]) {
    if (p->port_base) {
        a->host = "127.0.0.1";
        a->port = (int)p->port_base + rank;
        return;
    }
    probe_name(name, s->pid[rank], rank);
    a->socket = name;
}

static int worker(const struct probing *p, const struct sockets *s, int rank) {
    char name[64], who[32], path[64];
    struct http_ask a = {.method = "GET", .path = path};
    struct http_reply r;
    snprintf(who, sizeof who, "rank %d", rank);
    snprintf(path, sizeof path, "/%s", p->what);
    if (!p->port_base && !s->pid[rank]) {
        printf("%s %s: no answer: no worker of that rank\n", who, p->what);
        return SILENT;
    }
    aim(p, s, rank, &a, name);
    int rc = ask(p, who, &a, &r);
    if (rc == YES) rc = report(p, who, &r);
    http_reply_deinit(&r);
    return rc;
}

/* A number of what the worker of that rank says of itself; -1: no answer. */
static int64_t number_of(const struct probing *p, const struct sockets *s, int rank,
                         const char *name) {
    char socket[64];
    struct http_ask a = {.method = "GET", .path = "/status",
                         .timeout_ms = (int)MIN(p->timeout_s * 1000, INT32_MAX)};
    struct http_reply r;
    int64_t n = -1;
    if (!p->port_base && !s->pid[rank]) return -1;
    aim(p, s, rank, &a, socket);
    if (http_ask(&a, &r, NULL) == OK) {
        json_t *root = json_loadb(r.body, r.n, 0, NULL);
        if (root) n = json_integer_value(json_object_get(root, name));
        json_decref(root);
    }
    http_reply_deinit(&r);
    return n;
}

/* How many ranks there are, from the first that answers; else what was found. */
static int world(const struct probing *p, const struct sockets *s) {
    int64_t n = p->tp;
    for (int rank = 0; n <= 0 && rank < s->n; rank++) n = number_of(p, s, rank, "world");
    return n > 0 && n <= LIMIT_RANKS ? (int)n : s->n;
}

/* No rank makes a token alone, so the whole is asked for one, and then who took part in it. */
static int canaries(const struct probing *p, const struct sockets *s, int first, int last,
                    struct err_text *err) {
    int64_t before[LIMIT_RANKS], after;
    for (int r = first; r < last; r++) before[r] = number_of(p, s, r, "last_step");
    int rc = coordinator(p, true, err), worst = rc;
    for (int r = first; rc != WRONG && r < last; r++) {
        after = number_of(p, s, r, "last_step");
        bool yes = rc == YES && before[r] >= 0 && after > before[r];
        if (after < 0) printf("rank %d canary: no answer\n", r);
        else printf("rank %d canary: %s, step %" PRId64 " after %" PRId64 "\n", r, yes ? "yes" : "no",
                    after, before[r]);
        worst = MAX(worst, after < 0 ? SILENT : yes ? YES : NO);
    }
    return worst;
}

static int workers(const struct probing *p, struct err_text *err) {
    struct sockets s = {0};
    int worst = YES;
    if (!p->port_base) find_sockets(p, &s);
    if (s.n_coordinators > 1) {
        err_set(err, ERR_SETUP, "--pid: expected one of the coordinators here, found more than one "
                                "and no --pid");
        return WRONG;
    }
    if (!p->port_base && s.n == 0) {
        printf("workers %s: no answer: none found\n", p->what);
        return SILENT;
    }
    int first = p->all ? 0 : (int)p->rank, last = p->all ? world(p, &s) : first + 1;
    if (!strcmp(p->what, "canary")) return canaries(p, &s, first, last, err);
    for (int rank = first; rank < last; rank++) {
        int rc = worker(p, &s, rank);
        worst = MAX(worst, rc);
    }
    return worst;
}

int cmd_probe(int argc, char **argv) {
    struct err_text err = {0};
    struct probing p = {.rank = -1, .url = URL_DEFAULT};
    int rc = read_options(&p, argc, argv, &err);
    if (rc == ERR_CLOSED) return EXIT_ASKED;
    if (rc >= 0) rc = http_ask_key(p.key, sizeof p.key, p.key_file, &err);
    int code = WRONG;
    if (rc >= 0) {
        code = p.all || p.rank >= 0 ? workers(&p, &err) : coordinator(&p, false, &err);
    }
    if (err.text[0]) fprintf(stderr, "octavo probe: %s\n", err.text);
    return code;
}
