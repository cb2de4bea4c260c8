/* proto/gguf_split.c: opens a model file, and all parts of one that was split.
 *
 * Owns: descriptors and mappings.  Called by: coordinator and worker, at start.
 * Fails how: ERR_SYS, ERR_FORMAT, ERR_LIMIT, ERR_NOMEM with a sentence that names the part; all
 * that was opened is closed again.  Limits: LIMIT_GGUF_PARTS, LIMIT_GGUF_HEADER_BYTES.
 * Tested by: tests/unit/test_gguf.c
 *
 * Names of sibling parts come from the path given, by exchanging five digits, never from anything
 * inside a file. Symbolic links are followed: download caches keep models as links to blobs. The
 * part that was named is read first, then its siblings in order, and everything is checked before
 * anybody reads a weight.
 *
 * The mapping is for tensor data only (the header is copied, see gguf_part.c) and the kernel's own
 * read-ahead is left on: loaders read tensors from one end to the other.
 */
#include "proto/gguf_part.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FIRST_READ_BYTES (64u << 10)

struct split {
    bool is; /* more than one part */
    uint64_t no, count, tensors;
};

static void part_close(struct gguf_part *p) {
    if (p->fd >= 0) {
        if (p->bytes) munmap((void *)(uintptr_t)p->bytes, p->size);
        close(p->fd);
    }
    gguf_part_deinit(p);
}

static int sys_failed(const struct gguf_part *p, const char *what, struct err_text *err) {
    int saved = errno;
    err_set(err, ERR_SYS, "%s: expected to %s, found: %s", gguf_show_path(p->path).text, what,
            strerror(saved));
    errno = saved;
    return ERR_SYS;
}

/* ---- one file ---- */

static int part_map(struct gguf_part *p, struct err_text *err) {
    p->fd = open(p->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (p->fd < 0) return sys_failed(p, "open this file", err);
    struct stat st;
    if (fstat(p->fd, &st) < 0) return sys_failed(p, "read this file's size", err);
    if (!S_ISREG(st.st_mode))
        return err_set(err, ERR_FORMAT, "%s: expected a file, found a %s",
                       gguf_show_path(p->path).text,
                       S_ISDIR(st.st_mode) ? "directory" : "device, pipe or socket");
    p->size = (uint64_t)st.st_size;
    if (p->size == 0)
        return err_set(err, ERR_FORMAT, "%s: expected a GGUF file, found an empty file",
                       gguf_show_path(p->path).text);
    void *map = mmap(NULL, p->size, PROT_READ, MAP_SHARED, p->fd, 0);
    if (map == MAP_FAILED) return sys_failed(p, "map this file", err);
    p->bytes = map;
    return OK;
}

/* Reads on until the copy of the file's start holds `want` bytes. */
static int read_head(struct gguf_part *p, uint64_t *have, uint64_t want, struct err_text *err) {
    uint8_t *grown = realloc(p->header, want);
    if (!grown)
        return err_set(err, ERR_NOMEM, "%s: expected %llu bytes of memory for the header, found "
                       "none", gguf_show_path(p->path).text, (unsigned long long)want);
    p->header = grown;
    while (*have < want) {
        ssize_t n = pread(p->fd, p->header + *have, want - *have, (off_t)*have);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return sys_failed(p, "read this file", err);
        if (n == 0)
            return err_set(err, ERR_FORMAT, "%s: expected %llu bytes, found %llu: the file was "
                           "cut while it was read", gguf_show_path(p->path).text,
                           (unsigned long long)p->size, (unsigned long long)*have);
        *have += (uint64_t)n;
    }
    return OK;
}

static int part_open(struct gguf_part *p, const char *path, struct err_text *err) {
    *p = (struct gguf_part){.fd = -1, .path = strdup(path)};
    if (!p->path) return err_set(err, ERR_NOMEM, "expected memory for a path, found none");
    TRY(part_map(p, err));
    uint64_t have = 0, want = FIRST_READ_BYTES, need = 0;
    for (;;) {
        want = MIN(want, p->size);
        if (want > LIMIT_GGUF_HEADER_BYTES)
            return err_set(err, ERR_LIMIT, "%s: expected a header of at most %llu bytes, found a "
                           "longer one", gguf_show_path(path).text, LIMIT_GGUF_HEADER_BYTES);
        TRY(read_head(p, &have, want, err));
        int rc = gguf_part_parse(p, p->header, have, &need, err);
        if (rc != ERR_AGAIN) return rc;
        want = MAX(need, MIN(4 * have, LIMIT_GGUF_HEADER_BYTES));
    }
}

/* ---- split models ---- */

static int split_key(const struct gguf_part *p, const char *key, uint64_t *out, bool *there,
                     struct err_text *err) {
    const struct gguf_kv *kv = gguf_part_find(p, key);
    *there = kv != NULL;
    if (!kv || gguf_kv_u64(kv, out)) return OK;
    return err_set(err, ERR_FORMAT, "%s: key '%s': expected an integer of at least 0, found "
                   "another value of type %s", gguf_show_path(p->path).text, key,
                   gguf_value_type_name(kv->type));
}

static int read_split(const struct gguf_part *p, struct split *s, struct err_text *err) {
    bool has_no, has_count, has_tensors;
    const char *file = p->path;
    *s = (struct split){0};
    TRY(split_key(p, "split.no", &s->no, &has_no, err));
    TRY(split_key(p, "split.count", &s->count, &has_count, err));
    TRY(split_key(p, "split.tensors.count", &s->tensors, &has_tensors, err));
    if (!has_count) return OK; /* a single file */
    if (s->count < 1 || s->count > LIMIT_GGUF_PARTS)
        return err_set(err, ERR_FORMAT, "%s: key 'split.count': expected 1 to %d, found %llu",
                       gguf_show_path(file).text, LIMIT_GGUF_PARTS, (unsigned long long)s->count);
    if (s->no >= s->count)
        return err_set(err, ERR_FORMAT, "%s: key 'split.no': expected 0 to %llu, found %llu",
                       gguf_show_path(file).text, (unsigned long long)s->count - 1,
                       (unsigned long long)s->no);
    s->is = s->count > 1;
    if (s->is && (!has_no || !has_tensors))
        return err_set(err, ERR_FORMAT, "%s: key '%s': expected it in a part of %llu, found none",
                       gguf_show_path(file).text, has_no ? "split.tensors.count" : "split.no",
                       (unsigned long long)s->count);
    return OK;
}

/* "…-00002-of-00011.gguf": fills in the two numbers. */
static bool numbers_of_name(const char *path, uint64_t *number, uint64_t *of) {
    static const char form[] = "-ddddd-of-ddddd.gguf";
    size_t n = strlen(path), k = sizeof form - 1;
    if (n < k) return false;
    const char *tail = path + n - k;
    *number = *of = 0;
    for (size_t i = 0; i < k; i++) {
        bool digit = tail[i] >= '0' && tail[i] <= '9';
        if (form[i] == 'd' ? !digit : tail[i] != form[i]) return false;
        uint64_t *v = i < 7 ? number : of;
        if (form[i] == 'd') *v = *v * 10 + (uint64_t)(tail[i] - '0');
    }
    return true;
}

static char *sibling_name(const char *path, uint64_t number, uint64_t of) {
    char *name = NULL;
    int prefix = (int)(strlen(path) - strlen("-ddddd-of-ddddd.gguf"));
    if (asprintf(&name, "%.*s-%05u-of-%05u.gguf", prefix, path, (unsigned)number, (unsigned)of) < 0)
        return NULL;
    return name;
}

static int check_name(const struct gguf_part *p, const struct split *s, struct err_text *err) {
    uint64_t number, of;
    unsigned no = (unsigned)s->no + 1, count = (unsigned)s->count;
    if (!numbers_of_name(p->path, &number, &of))
        return err_set(err, ERR_FORMAT, "%s: expected part %u of %u to be named "
                       "…-%05u-of-%05u.gguf, found another name, from which its siblings' cannot "
                       "be told", gguf_show_path(p->path).text, no, count, no, count);
    if (number != s->no + 1 || of != s->count)
        return err_set(err, ERR_FORMAT, "%s: expected part %llu of %llu as the name says, found "
                       "part %u of %u inside", gguf_show_path(p->path).text,
                       (unsigned long long)number, (unsigned long long)of, no, count);
    return OK;
}

static int open_sibling(struct gguf_part *p, const char *path, const struct split *first,
                        uint64_t no, struct err_text *err) {
    struct split s;
    char *name = sibling_name(path, no + 1, first->count);
    if (!name) return err_set(err, ERR_NOMEM, "expected memory for a path, found none");
    int rc = part_open(p, name, err);
    if (rc == ERR_SYS && errno == ENOENT)
        err_set(err, ERR_SYS, "%s: expected part %llu of %llu, found no such file",
                gguf_show_path(name).text, (unsigned long long)no + 1,
                (unsigned long long)first->count);
    free(name);
    TRY(rc);
    TRY(read_split(p, &s, err));
    if (!s.is)
        return err_set(err, ERR_FORMAT, "%s: expected part %llu of %llu, found a file that is no "
                       "part", gguf_show_path(p->path).text, (unsigned long long)no + 1,
                       (unsigned long long)first->count);
    if (s.no != no || s.count != first->count)
        return err_set(err, ERR_FORMAT, "%s: expected part %llu of %llu as the name says, found "
                       "part %llu of %llu inside", gguf_show_path(p->path).text,
                       (unsigned long long)no + 1, (unsigned long long)first->count,
                       (unsigned long long)s.no + 1, (unsigned long long)s.count);
    if (s.tensors != first->tensors)
        return err_set(err, ERR_FORMAT, "%s: key 'split.tensors.count': expected %llu as in the "
                       "other parts, found %llu", gguf_show_path(p->path).text,
                       (unsigned long long)first->tensors, (unsigned long long)s.tensors);
    return OK;
}

/* parts[s->no] is open; opens the others and joins all. */
static int open_parts(struct gguf *g, struct gguf_part *parts, const struct split *s,
                      struct err_text *err) {
    const char *path = parts[s->no].path;
    TRY(check_name(&parts[s->no], s, err));
    for (uint64_t no = 0; no < s->count; no++)
        if (no != s->no) TRY(open_sibling(&parts[no], path, s, no, err));
    TRY(gguf_join(g, parts, (int)s->count, err));
    if (g->n_tensors != s->tensors)
        return err_set(err, ERR_FORMAT, "%s: key 'split.tensors.count': expected %llu tensors in "
                       "all parts, found %llu", gguf_show_path(path).text,
                       (unsigned long long)s->tensors, (unsigned long long)g->n_tensors);
    return OK;
}

static void free_parts(struct gguf_part *parts, uint64_t n) {
    for (uint64_t i = 0; parts && i < n; i++) part_close(&parts[i]);
    free(parts);
}

static void free_all(struct gguf *g, struct gguf_part *parts, uint64_t n_parts) {
    free_parts(parts, n_parts);
    if (!g) return;
    free(g->tensors);
    free(g->tensor_order);
    free(g);
}

/* Takes over `first`, opened and parsed, whatever comes of it. */
static int open_around(struct gguf **out, struct gguf_part first, struct err_text *err) {
    struct split s = {0};
    int rc = read_split(&first, &s, err);
    uint64_t n = rc == OK && s.is ? s.count : 1, at = s.is ? s.no : 0;
    struct gguf *g = calloc(1, sizeof *g);
    struct gguf_part *parts = calloc(n, sizeof *parts);
    if (rc == OK && (!g || !parts))
        rc = err_set(err, ERR_NOMEM, "expected memory for %llu parts, found none",
                     (unsigned long long)n);
    if (rc < 0) {
        part_close(&first);
        free(parts);
        free(g);
        return rc;
    }
    for (uint64_t i = 0; i < n; i++) parts[i].fd = -1;
    parts[at] = first;
    rc = s.is ? open_parts(g, parts, &s, err) : gguf_join(g, parts, 1, err);
    if (rc < 0) free_all(g, parts, n);
    else *out = g;
    return rc;
}

int gguf_open(struct gguf **out, const char *path, struct err_text *err) {
    struct gguf_part first;
    int rc = part_open(&first, path, err);
    if (rc < 0) {
        int saved = errno;
        part_close(&first);
        errno = saved;
        return rc;
    }
    return open_around(out, first, err);
}

/* A part of a split model is parsed like any file here; there is no path to find others by. */
int gguf_parse(struct gguf **out, const uint8_t *bytes, uint64_t n, const char *name,
               struct err_text *err) {
    struct gguf_part p = {.fd = -1, .bytes = bytes, .size = n, .path = strdup(name)};
    struct split s;
    uint64_t need;
    struct gguf *g = calloc(1, sizeof *g);
    struct gguf_part *parts = calloc(1, sizeof *parts);
    int rc = g && parts && p.path ? OK : err_set(err, ERR_NOMEM, "expected memory, found none");
    if (rc == OK) rc = gguf_part_parse(&p, bytes, n, &need, err);
    if (rc == OK) rc = read_split(&p, &s, err);
    if (rc == OK) *parts = p, rc = gguf_join(g, parts, 1, err);
    if (rc < 0) {
        part_close(&p);
        free(parts);
        free_all(g, NULL, 0);
        return rc;
    }
    *out = g;
    return OK;
}

void gguf_close(struct gguf *g) {
    if (g) free_all(g, g->parts, (uint64_t)g->n_parts);
}
