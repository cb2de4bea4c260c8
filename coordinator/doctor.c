/* coordinator/doctor.c: the report, its findings, and how files below a root are read. See
 * doctor.h.
 *
 * Owns: the report.  Called by: the parts, cmd_doctor.c.  Fails how: see doctor.h.
 * Limits: DOCTOR_TEXT_BYTES.  Tested by: tests/unit/test_doctor.c
 */
#include "coordinator/doctor.h"

#include <dirent.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

static const char *const level_names[] = {"note", "slows", "stops"};

/* JSON takes no bytes that are not UTF-8, and a terminal should get none it would obey. */
static void make_plain(char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        if ((c < 32 || c > 126) && c != '\n' && c != '\t') text[i] = '?';
    }
}

int doctor_init(struct doctor *d, const char *root) {
    *d = (struct doctor){.root = root, .report = json_object(), .findings = json_array()};
    if (d->report && json_object_set_new(d->report, "findings", d->findings) == 0) return OK;
    doctor_deinit(d);
    return ERR_NOMEM;
}

void doctor_deinit(struct doctor *d) {
    json_decref(d->report);
    *d = (struct doctor){0};
}

void doctor_find(struct doctor *d, enum doctor_level level, const char *what, const char *expected,
                 const char *fix, const char *fmt, ...) {
    char found[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(found, sizeof found, fmt, ap);
    va_end(ap);
    make_plain(found, strlen(found));
    json_array_append_new(d->findings, json_pack("{s:s, s:s, s:s, s:s, s:s}", "level",
                                                 level_names[level], "what", what, "expected",
                                                 expected, "found", found, "fix", fix));
}

enum doctor_level doctor_worst(const struct doctor *d) {
    enum doctor_level worst = DOCTOR_NOTE;
    size_t i;
    json_t *f;
    json_array_foreach(d->findings, i, f) {
        const char *level = json_string_value(json_object_get(f, "level"));
        for (int l = DOCTOR_NOTE; level && l <= DOCTOR_STOPS; l++)
            if (!strcmp(level, level_names[l])) worst = MAX(worst, (enum doctor_level)l);
    }
    return worst;
}

/* ---- reading --------------------------------------------------------------------------------- */

static void path_below(const struct doctor *d, char out[PATH_MAX], const char *fmt, va_list ap) {
    int n = snprintf(out, PATH_MAX, "%.2000s", d->root);
    vsnprintf(out + n, PATH_MAX - (size_t)n, fmt, ap);
}

static bool read_text(const char *path, char *out, size_t n) {
    FILE *f = fopen(path, "re");
    size_t got = f ? fread(out, 1, n - 1, f) : 0;
    bool fine = f && !ferror(f); /* a folder opens, and cannot be read */
    if (f) fclose(f);
    if (got && out[got - 1] == '\n') got--;
    out[got] = 0;
    make_plain(out, got);
    return fine;
}

bool doctor_read(const struct doctor *d, char *out, size_t n, const char *fmt, ...) {
    char path[PATH_MAX];
    va_list ap;
    va_start(ap, fmt);
    path_below(d, path, fmt, ap);
    va_end(ap);
    return read_text(path, out, n);
}

int64_t doctor_number(const struct doctor *d, int64_t otherwise, const char *fmt, ...) {
    char path[PATH_MAX], text[64], *end;
    va_list ap;
    va_start(ap, fmt);
    path_below(d, path, fmt, ap);
    va_end(ap);
    if (!read_text(path, text, sizeof text)) return otherwise;
    int64_t n = strtoll(text, &end, 10);
    return end == text ? otherwise : n;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

json_t *doctor_names(const struct doctor *d, const char *fmt, ...) {
    char path[PATH_MAX], *name[1024];
    size_t n = 0;
    va_list ap;
    va_start(ap, fmt);
    path_below(d, path, fmt, ap);
    va_end(ap);
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && n < ARRAY_LEN(name) && (e = readdir(dir));)
        if (e->d_name[0] != '.' && (name[n] = strdup(e->d_name))) n++;
    if (dir) closedir(dir);
    qsort(name, n, sizeof name[0], by_name);
    json_t *all = json_array();
    for (size_t i = 0; i < n; i++) {
        json_array_append_new(all, json_string(name[i]));
        free(name[i]);
    }
    return all;
}
