/* coordinator/device_memory.c: the sources none and script, and what all sources share. See
 * device_memory.h.
 *
 * Owns: the path of a script.  Called by: see device_memory.h.
 * Fails how: see device_memory.h.  Limits: SCRIPT_LINE_BYTES a line.
 * Tested by: tests/unit/test_reclaim.c
 *
 * A script could hold the answers of one look after another; it holds states by time instead, and is
 * read again each time, because a test of whole processes does not know how often anybody looks, and
 * learns the pids to write down only while it runs.
 */
#include "coordinator/device_memory.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/nvml.h"

#define SCRIPT_LINE_BYTES 4096

void device_sample_add(struct device_sample *s, int64_t pid, uint64_t bytes) {
    for (int i = 0; i < s->n_holders; i++) /* computing and drawing are listed apart */
        if (s->holders[i].pid == pid) {
            if (s->holders[i].bytes == DEVICE_BYTES_UNKNOWN) s->holders[i].bytes = bytes;
            return;
        }
    if (s->n_holders < DEVICE_HOLDERS_MAX)
        s->holders[s->n_holders++] = (struct device_holder){pid, bytes};
    else s->n_unlisted++;
}

void device_sample_fail(struct device_sample *s, enum device_health health, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    s->health = health;
    vsnprintf(s->error, sizeof s->error, fmt, ap);
    va_end(ap);
}

/* ---- none ------------------------------------------------------------------------------------ */

static int none_count(void *ctx) {
    UNUSED(ctx);
    return 0;
}

static void none_look(void *ctx, int device, uint64_t now_us, struct device_sample *out) {
    UNUSED(ctx), UNUSED(device), UNUSED(now_us), UNUSED(out);
}

static void none_describe(void *ctx, int device, char *out, size_t n) {
    UNUSED(ctx), UNUSED(device);
    snprintf(out, n, "no device");
}

static void none_close(void *ctx) {
    UNUSED(ctx);
}

static const struct device_memory_ops none_ops = {"none", none_count, none_look, none_describe,
                                                  none_close};

/* ---- script ---------------------------------------------------------------------------------- */

struct script {
    char *path;
    uint64_t first_us; /* 0: not looked at yet */
};

static char *skip_spaces(char *p) {
    while (isspace((unsigned char)*p)) p++;
    return p;
}

/* Goes past `word` if *p starts with it. */
static bool take_word(char **p, const char *word) {
    size_t n = strlen(word);
    char *at = skip_spaces(*p);
    if (strncmp(at, word, n) || (at[n] && !isspace((unsigned char)at[n]))) return false;
    *p = skip_spaces(at + n);
    return true;
}

static bool take_number(char **p, uint64_t *out) {
    char *end, *at = skip_spaces(*p);
    if (!isdigit((unsigned char)*at)) return false;
    *out = strtoull(at, &end, 10);
    *p = skip_spaces(end);
    return true;
}

static bool read_usage(char *p, struct device_sample *out) {
    uint64_t pid, bytes;
    if (!take_number(&p, &out->used_bytes) || !take_word(&p, "of") ||
        !take_number(&p, &out->total_bytes))
        return false;
    while (take_word(&p, "pid")) {
        if (!take_number(&p, &pid)) return false;
        if (take_word(&p, "unknown")) bytes = DEVICE_BYTES_UNKNOWN;
        else if (!take_number(&p, &bytes)) return false;
        device_sample_add(out, (int64_t)pid, bytes);
    }
    return *p == 0;
}

static bool read_device(char *p, struct device_sample *out) {
    *out = (struct device_sample){0};
    p[strcspn(p, "\n")] = 0;
    if (take_word(&p, "used")) return read_usage(p, out);
    if (take_word(&p, "lost")) device_sample_fail(out, DEVICE_LOST, "%s", p);
    else if (take_word(&p, "unreadable")) device_sample_fail(out, DEVICE_UNREADABLE, "%s", p);
    else return false;
    return true;
}

/* Reads all that holds at `seconds`; the last line that speaks of `device` counts. */
static void script_read(const struct script *s, int device, double seconds, int *count,
                        struct device_sample *out) {
    char line[SCRIPT_LINE_BYTES];
    bool holds = true;
    FILE *f = fopen(s->path, "re");
    *count = 0;
    device_sample_fail(out, DEVICE_UNREADABLE, "%.100s: %s", s->path,
                       f ? "says nothing of it" : strerror(errno));
    for (int n = 1; f && fgets(line, sizeof line, f); n++) {
        char *p = skip_spaces(line);
        uint64_t value;
        bool good = true;
        if (*p == 0 || *p == '#') continue;
        if (take_word(&p, "at")) holds = seconds >= strtod(p, NULL);
        else if (take_word(&p, "devices")) {
            good = take_number(&p, &value) && value <= DEVICE_MAX;
            if (good) *count = (int)value;
        } else if (take_word(&p, "device") && take_number(&p, &value)) {
            if (holds && (int)value == device) good = read_device(p, out);
        } else good = false;
        if (good) continue;
        device_sample_fail(out, DEVICE_UNREADABLE, "%.100s:%d: expected a device's state", s->path, n);
        break;
    }
    if (f) fclose(f);
}

static int script_count(void *ctx) {
    struct device_sample unused = {0};
    int count;
    script_read(ctx, -1, 0, &count, &unused);
    return count;
}

static void script_look(void *ctx, int device, uint64_t now_us, struct device_sample *out) {
    struct script *s = ctx;
    int count;
    if (!s->first_us) s->first_us = now_us;
    script_read(s, device, (double)(now_us - s->first_us) / 1e6, &count, out);
}

static void script_describe(void *ctx, int device, char *out, size_t n) {
    UNUSED(ctx);
    snprintf(out, n, "scripted device %d", device);
}

static void script_close(void *ctx) {
    struct script *s = ctx;
    free(s->path);
    free(s);
}

static const struct device_memory_ops script_ops = {"script", script_count, script_look,
                                                    script_describe, script_close};

int device_memory_open_script(struct device_memory *m, const char *path, struct err_text *err) {
    struct script *s = calloc(1, sizeof *s);
    if (s) s->path = strdup(path);
    if (!s || !s->path) {
        free(s);
        return err_set(err, ERR_NOMEM, "out of memory");
    }
    *m = (struct device_memory){&script_ops, s};
    if (script_count(s) > 0) return OK;
    device_memory_close(m);
    return err_set(err, ERR_SETUP, "device memory: %.300s: expected a script that names devices, "
                                   "found none", path);
}

/* ---- the interface --------------------------------------------------------------------------- */

int device_memory_open(struct device_memory *m, const char *source, struct err_text *err) {
    *m = (struct device_memory){&none_ops, NULL};
    if (!strcmp(source, "none")) return OK;
    if (!strncmp(source, "script:", 7)) return device_memory_open_script(m, source + 7, err);
    if (!strcmp(source, "nvml")) return device_memory_open_nvml(m, err);
    return err_set(err, ERR_SETUP, "device memory: expected none, nvml or script:PATH, found %.200s",
                   source);
}

void device_memory_close(struct device_memory *m) {
    if (m->ops) m->ops->close(m->ctx);
    *m = (struct device_memory){&none_ops, NULL};
}

int device_memory_count(const struct device_memory *m) {
    return MIN(m->ops->count(m->ctx), DEVICE_MAX);
}

void device_memory_look(const struct device_memory *m, int device, uint64_t now_us,
                        struct device_sample *out) {
    *out = (struct device_sample){0};
    m->ops->look(m->ctx, device, now_us, out);
    if (!out->asked_us) out->asked_us = now_us; /* it was answered at once */
}

void device_memory_describe(const struct device_memory *m, int device, char *out, size_t n) {
    m->ops->describe(m->ctx, device, out, n);
}

/* A PCI address is written with a domain of four digits by one library and of eight by another. */
static bool same_address(const char *word, const char *text) {
    const char *colon = strchr(word, ':');
    size_t n = strlen(word);
    if (!colon || n < 12 || word[n - 2] != '.') return false;
    const char *tail = word + n - 12; /* "0000:01:00.0" */
    return strcasestr(text, tail) != NULL;
}

int device_memory_find(const struct device_memory *m, const char *text) {
    for (int d = 0; d < device_memory_count(m); d++) {
        char words[256], *save = NULL;
        device_memory_describe(m, d, words, sizeof words);
        for (char *w = strtok_r(words, " ", &save); w; w = strtok_r(NULL, " ", &save))
            if ((!strncmp(w, "GPU-", 4) && strcasestr(text, w)) || same_address(w, text)) return d;
    }
    return -1;
}
