/* coordinator/doctor_bundle.c: one file for a bug report. See doctor_bundle.h.
 *
 * Owns: the archive while it is written.  Called by: cmd_doctor.c.  Fails how: see the header.
 * Limits: BUNDLE_LOG_BYTES, USTAR's hundred bytes of a name.
 * Tested by: tests/unit/test_doctor.c, tests/faults/test_doctor.py
 *
 * The plain archive format of POSIX, a header of fixed fields and padded data, is written here:
 * less than a call of tar would need in temporary folders. Every byte goes through the cleaning, so
 * that no part can forget it.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "coordinator/doctor_bundle.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "coordinator/http_ask.h"
#include "coordinator/probe_list.h"
#include "proto/limits.h"

#define BLOCK        512
#define PATTERNS_MAX 16
#define REPLACEMENT  "$1[removed]"
#define ASK_MS       5000

static const char *const secrets[] = {
    "(?i)(bearer\\s+)[^\\s\"',;]+",
    "(?i)((?:api[-_]?key|authorization|password|cookie|secret)[\"']?\\s*[=:]\\s*[\"']?)"
    "(?!bearer\\b)[^\\s\"',;]+",
    "([A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|COOKIE)=)\\S+",
    "()\\bsk-[A-Za-z0-9_-]{8,}",
};

struct bundle {
    FILE *f;
    char path[400], folder[33];
    int n_patterns;
    pcre2_code *pattern[PATTERNS_MAX];
};

/* ---- cleaning -------------------------------------------------------------------------------- */

static void add_pattern(struct bundle *b, const char *text) {
    int code;
    PCRE2_SIZE at;
    assert(b->n_patterns < PATTERNS_MAX);
    pcre2_code *p = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, 0, &code, &at, NULL);
    if (p) b->pattern[b->n_patterns++] = p;
}

static char *replace(pcre2_code *pattern, char *text, size_t *n) {
    PCRE2_SIZE room = *n + *n / 4 + 1024;
    for (int turn = 0; turn < 2; turn++) {
        char *out = malloc(room + 1);
        assert(out);
        int rc = pcre2_substitute(pattern, (PCRE2_SPTR)text, *n, 0,
                                  PCRE2_SUBSTITUTE_GLOBAL | PCRE2_SUBSTITUTE_OVERFLOW_LENGTH, NULL,
                                  NULL, (PCRE2_SPTR)REPLACEMENT, PCRE2_ZERO_TERMINATED,
                                  (PCRE2_UCHAR *)out, &room);
        if (rc >= 0) {
            free(text);
            *n = room;
            out[room] = 0;
            return out;
        }
        free(out); /* room now says how much is needed */
        if (rc != PCRE2_ERROR_NOMEMORY) break;
    }
    *n = (size_t)snprintf(text, *n + 1, "(left out: could not be cleaned)");
    return text;
}

char *bundle_clean(struct bundle *b, const char *text, size_t n, size_t *out_n) {
    char *clean = malloc(n + 64);
    assert(clean);
    memcpy(clean, text, n);
    clean[n] = 0;
    *out_n = n;
    for (int i = 0; i < b->n_patterns; i++) clean = replace(b->pattern[i], clean, out_n);
    return clean;
}

/* ---- the archive ----------------------------------------------------------------------------- */

struct header { /* of USTAR; numbers are octal text */
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], sum[8], type, link[100], magic[6],
        version[2], user[32], group[32], major[8], minor[8], prefix[155], rest[12];
};
_Static_assert(sizeof(struct header) == BLOCK, "a header is one block");

static void write_header(struct bundle *b, const char *name, size_t n) {
    struct header h = {.type = '0'};
    unsigned sum = 0;
    snprintf(h.name, sizeof h.name, "%s/%.60s", b->folder, name);
    strcpy(h.mode, "0000644");
    strcpy(h.uid, "0000000");
    strcpy(h.gid, "0000000");
    snprintf(h.size, sizeof h.size, "%011zo", n);
    snprintf(h.mtime, sizeof h.mtime, "%011" PRIo64, (uint64_t)time(NULL));
    memcpy(h.magic, "ustar", 6);
    memcpy(h.version, "00", 2);
    memset(h.sum, ' ', sizeof h.sum);
    for (size_t i = 0; i < sizeof h; i++) sum += ((const unsigned char *)&h)[i];
    snprintf(h.sum, sizeof h.sum, "%06o", sum);
    fwrite(&h, 1, sizeof h, b->f);
}

int bundle_open(struct bundle **out, const char *path, const char *folder, const char *const *keys,
                struct err_text *err) {
    struct bundle *b = calloc(1, sizeof *b);
    if (!b) return err_set(err, ERR_NOMEM, "--bundle: expected memory, found none");
    snprintf(b->path, sizeof b->path, "%s", path);
    snprintf(b->folder, sizeof b->folder, "%s", folder);
    b->f = fopen(path, "we");
    if (!b->f) {
        free(b);
        return err_set(err, ERR_SETUP, "--bundle %.300s: expected to write it, found: %s", path,
                       strerror(errno));
    }
    for (const char *const *key = keys; *key && b->n_patterns < PATTERNS_MAX / 2; key++) {
        char text[4 * LIMIT_API_KEY_BYTES + 8];
        size_t at = (size_t)snprintf(text, sizeof text, "()");
        if (!**key) continue;
        for (const char *c = *key; *c && c < *key + LIMIT_API_KEY_BYTES; c++)
            at += (size_t)snprintf(text + at, sizeof text - at, "\\x%02x", (unsigned char)*c);
        add_pattern(b, text);
    }
    for (size_t i = 0; i < ARRAY_LEN(secrets); i++) add_pattern(b, secrets[i]);
    *out = b;
    return OK;
}

void bundle_add(struct bundle *b, const char *name, const char *text, size_t n) {
    static const char zeros[BLOCK];
    size_t clean_n;
    char *clean = bundle_clean(b, text, n, &clean_n);
    write_header(b, name, clean_n);
    fwrite(clean, 1, clean_n, b->f);
    fwrite(zeros, 1, (BLOCK - clean_n % BLOCK) % BLOCK, b->f);
    free(clean);
}

int bundle_close(struct bundle *b, struct err_text *err) {
    static const char zeros[2 * BLOCK];
    int rc = OK;
    fwrite(zeros, 1, sizeof zeros, b->f);
    bool bad = ferror(b->f);
    if (fclose(b->f) != 0 || bad)
        rc = err_set(err, ERR_SETUP, "--bundle %.300s: expected to write all of it, found: %s",
                     b->path, strerror(errno));
    for (int i = 0; i < b->n_patterns; i++) pcre2_code_free(b->pattern[i]);
    free(b);
    return rc;
}

/* ---- what goes in ---------------------------------------------------------------------------- */

void bundle_add_log(struct bundle *b, int number, const char *path) {
    char name[80], *text = malloc(BUNDLE_LOG_BYTES);
    const char *slash = strrchr(path, '/');
    assert(text);
    snprintf(name, sizeof name, "logs/%02d-%.50s", number, slash ? slash + 1 : path);
    FILE *f = fopen(path, "re");
    if (f && fseeko(f, -(off_t)BUNDLE_LOG_BYTES, SEEK_END) < 0) rewind(f); /* shorter than that */
    size_t n = f ? fread(text, 1, BUNDLE_LOG_BYTES, f) : 0;
    if (!f || (n == 0 && ferror(f)))
        n = (size_t)snprintf(text, BUNDLE_LOG_BYTES, "%s: %s\n", path, strerror(errno));
    if (f) fclose(f);
    bundle_add(b, name, text, n);
    free(text);
}

/* One GET; the body of the answer, or why there is none. */
static void add_answer(struct bundle *b, struct http_ask *a, const char *path, const char *name,
                       struct http_reply *r) {
    char sentence[600], status[80];
    struct err_text err = {0};
    a->path = path;
    if (http_ask(a, r, &err) < 0) {
        int n = snprintf(sentence, sizeof sentence, "GET %s: %s\n", path, err.text);
        bundle_add(b, name, sentence, (size_t)n);
        return;
    }
    snprintf(status, sizeof status, "%.70s.status", name);
    int n = snprintf(sentence, sizeof sentence, "%d\n", r->status);
    bundle_add(b, status, sentence, (size_t)n);
    bundle_add(b, name, r->body, r->n);
}

void bundle_add_service(struct bundle *b, const char *url, const char *key) {
    static const char *const routes[][2] = {
        {"/version", "service/version"},        {"/health/live", "service/live"},
        {"/health/ready", "service/ready"},     {"/health/progress", "service/progress"},
        {"/v1/models", "service/models.json"},  {"/metrics", "service/metrics"},
        {"/v1/workers", "service/workers.json"}};
    char host[256], path[64], name[64];
    struct err_text err = {0};
    struct http_ask a = {.host = host, .method = "GET", .key = key, .timeout_ms = ASK_MS};
    struct http_reply r = {0};
    if (http_ask_url(url, host, sizeof host, &a.port, &err) < 0) {
        bundle_add(b, "service/workers.json", err.text, strlen(err.text));
        return;
    }
    size_t ranks = 0;
    for (size_t i = 0; i < ARRAY_LEN(routes); i++) {
        r = (struct http_reply){0};
        add_answer(b, &a, routes[i][0], routes[i][1], &r);
        if (i + 1 == ARRAY_LEN(routes) && r.body) {
            json_t *root = json_loadb(r.body, r.n, 0, NULL);
            ranks = json_array_size(json_object_get(root, "data"));
            json_decref(root);
        }
        http_reply_deinit(&r);
    }
    for (size_t rank = 0; rank < MIN(ranks, LIMIT_RANKS); rank++) {
        snprintf(path, sizeof path, "/v1/workers/%zu", rank);
        snprintf(name, sizeof name, "service/worker-%zu.json", rank);
        r = (struct http_reply){0};
        add_answer(b, &a, path, name, &r);
        http_reply_deinit(&r);
    }
}

void bundle_add_workers(struct bundle *b) {
    struct probe_socket all[4 * LIMIT_RANKS];
    int n = probe_list(all, ARRAY_LEN(all));
    for (int i = 0; i < n; i++) {
        char socket[PROBE_NAME_BYTES], name[64];
        struct http_ask a = {.socket = socket, .method = "GET", .timeout_ms = ASK_MS};
        struct http_reply r = {0};
        probe_name(socket, all[i].pid, all[i].rank);
        snprintf(name, sizeof name, "workers/%" PRId64 "-%d.json", all[i].pid, all[i].rank);
        add_answer(b, &a, "/status", name, &r);
        http_reply_deinit(&r);
    }
}
