/* proto/gguf.c: answers questions about an open model: tensors by name, keys by name and type.
 *
 * Owns: struct gguf's joined tensor table.  Called by: coordinator and worker.
 * Fails how: NULL or ERR_NOT_FOUND for what is absent, ERR_FORMAT with a sentence for what has the
 * wrong kind.  Limits: LIMIT_GGUF_TENSORS over all parts.  Pure.
 * Tested by: tests/unit/test_gguf.c
 *
 * Writers disagree on integer widths (the same count is u32 in one file, i32 in the next), so a
 * typed read goes by value, not by width. A string is never taken for a number, nor an array of
 * one element for a scalar.
 */
#include "proto/gguf_part.h"

#include <stdlib.h>
#include <string.h>

static int by_name(const void *a, const void *b, void *tensors) {
    const struct gguf_tensor *t = tensors;
    return strcmp(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

static int check_unique(const struct gguf *g, const struct gguf_part *parts, struct err_text *err) {
    for (uint64_t i = 1; i < g->n_tensors; i++) {
        const struct gguf_tensor *a = &g->tensors[g->tensor_order[i - 1]];
        const struct gguf_tensor *b = &g->tensors[g->tensor_order[i]];
        if (strcmp(a->name, b->name)) continue;
        return err_set(err, ERR_FORMAT, "%s: tensor '%s': expected every tensor once, found a "
                       "duplicate in %s", gguf_show_path(parts[MIN(a->part, b->part)].path).text,
                       a->name, gguf_show_path(parts[MAX(a->part, b->part)].path).text);
    }
    return OK;
}

int gguf_join(struct gguf *g, struct gguf_part *parts, int n_parts, struct err_text *err) {
    uint64_t n = 0;
    for (int i = 0; i < n_parts; i++) n += parts[i].n_tensors;
    const char *path = parts[0].path;
    if (n > LIMIT_GGUF_TENSORS)
        return err_set(err, ERR_LIMIT, "%s: expected at most %d tensors in all parts, found %llu",
                       gguf_show_path(path).text, LIMIT_GGUF_TENSORS, (unsigned long long)n);
    g->tensors = calloc(n + 1, sizeof *g->tensors);
    g->tensor_order = calloc(n + 1, sizeof *g->tensor_order);
    if (!g->tensors || !g->tensor_order)
        return err_set(err, ERR_NOMEM, "%s: expected memory for %llu tensors, found none",
                       gguf_show_path(path).text, (unsigned long long)n);
    for (int i = 0; i < n_parts; i++)
        for (uint64_t k = 0; k < parts[i].n_tensors; k++) {
            struct gguf_tensor *t = &g->tensors[g->n_tensors];
            *t = parts[i].tensors[k];
            t->part = i;
            g->total_bytes += t->bytes; /* each lies inside its file: no sum of them wraps */
            g->tensor_order[g->n_tensors] = (uint32_t)g->n_tensors;
            g->n_tensors++;
        }
    qsort_r(g->tensor_order, n, sizeof *g->tensor_order, by_name, g->tensors);
    TRY(check_unique(g, parts, err));
    g->parts = parts;
    g->n_parts = n_parts;
    return OK;
}

int gguf_parts(const struct gguf *g) {
    return g->n_parts;
}

const char *gguf_part_path(const struct gguf *g, int part) {
    assert(part >= 0 && part < g->n_parts);
    return g->parts[part].path;
}

int gguf_part_fd(const struct gguf *g, int part) {
    assert(part >= 0 && part < g->n_parts);
    return g->parts[part].fd;
}

uint64_t gguf_total_bytes(const struct gguf *g) {
    return g->total_bytes;
}

uint64_t gguf_n_tensors(const struct gguf *g) {
    return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, uint64_t i) {
    assert(i < g->n_tensors);
    return &g->tensors[i];
}

const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name) {
    uint64_t lo = 0, hi = g->n_tensors;
    while (lo < hi) {
        uint64_t mid = lo + (hi - lo) / 2;
        const struct gguf_tensor *t = &g->tensors[g->tensor_order[mid]];
        int c = strcmp(t->name, name);
        if (c == 0) return t;
        if (c < 0) lo = mid + 1;
        else hi = mid;
    }
    return NULL;
}

uint64_t gguf_n_kv(const struct gguf *g) {
    return g->parts[0].n_kv;
}

const struct gguf_kv *gguf_kv_at(const struct gguf *g, uint64_t i) {
    assert(i < g->parts[0].n_kv);
    return &g->parts[0].kv[i];
}

const struct gguf_kv *gguf_find(const struct gguf *g, const char *key) {
    return gguf_part_find(&g->parts[0], key);
}

/* ---- values ---- */

/* An integer or bool at p as sign and magnitude in 65 bits: false if type is neither. */
static bool read_integer(enum gguf_value_type type, const uint8_t *p, uint64_t *out,
                         bool *negative) {
    int64_t s = 0;
    uint64_t u = 0;
    switch (type) {
    case GGUF_U8:
    case GGUF_BOOL: u = *p; break;
    case GGUF_U16: memcpy(&u, p, 2); break;
    case GGUF_U32: memcpy(&u, p, 4); break;
    case GGUF_U64: memcpy(&u, p, 8); break;
    case GGUF_I8: s = (int8_t)*p; break;
    case GGUF_I16: { int16_t v; memcpy(&v, p, 2); s = v; break; }
    case GGUF_I32: { int32_t v; memcpy(&v, p, 4); s = v; break; }
    case GGUF_I64: memcpy(&s, p, 8); break;
    default: return false;
    }
    *negative = s < 0;
    *out = s ? (uint64_t)s : u;
    return true;
}

bool gguf_kv_u64(const struct gguf_kv *kv, uint64_t *out) {
    bool negative;
    return kv->type != GGUF_BOOL && read_integer(kv->type, kv->data, out, &negative) && !negative;
}

static int wrong_kind(const struct gguf *g, const struct gguf_kv *kv, const char *expected,
                      struct err_text *err) {
    uint64_t v;
    bool negative = false;
    char found[40];
    snprintf(found, sizeof found, "%s", gguf_value_type_name(kv->type));
    if (kv->type != GGUF_BOOL && read_integer(kv->type, kv->data, &v, &negative) && negative)
        snprintf(found, sizeof found, "%lld", (long long)v);
    return err_set(err, ERR_FORMAT, "%s: key '%s': expected %s, found %s%s",
                   gguf_show_path(g->parts[0].path).text, gguf_show(kv->key.p, kv->key.n).text,
                   expected, negative ? "" : "a value of type ", found);
}

int gguf_get_u64(const struct gguf *g, const char *key, uint64_t *out, struct err_text *err) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return ERR_NOT_FOUND;
    if (!gguf_kv_u64(kv, out)) return wrong_kind(g, kv, "an integer of at least 0", err);
    return OK;
}

int gguf_get_f64(const struct gguf *g, const char *key, double *out, struct err_text *err) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return ERR_NOT_FOUND;
    if (kv->type == GGUF_F64) {
        memcpy(out, kv->data, sizeof *out);
    } else if (kv->type == GGUF_F32) {
        float f;
        memcpy(&f, kv->data, sizeof f);
        *out = f;
    } else {
        return wrong_kind(g, kv, "a float", err);
    }
    return OK;
}

int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct err_text *err) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return ERR_NOT_FOUND;
    if (kv->type != GGUF_BOOL) return wrong_kind(g, kv, "a bool", err);
    *out = kv->data[0] != 0;
    return OK;
}

int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out,
                 struct err_text *err) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return ERR_NOT_FOUND;
    if (kv->type != GGUF_STRING) return wrong_kind(g, kv, "a string", err);
    *out = (struct gguf_str){(const char *)kv->data, kv->data_bytes};
    return OK;
}

/* The lengths were checked when the file was parsed; they are checked again because it is cheap
 * and a cursor may come from another array. */
bool gguf_next_str(const struct gguf_kv *kv, struct gguf_cursor *c, struct gguf_str *out) {
    if (kv->type != GGUF_ARRAY || kv->elem_type != GGUF_STRING || c->index >= kv->count)
        return false;
    uint64_t n;
    if (c->at > kv->data_bytes || kv->data_bytes - c->at < sizeof n) return false;
    memcpy(&n, kv->data + c->at, sizeof n);
    if (n > kv->data_bytes - c->at - sizeof n) return false;
    *out = (struct gguf_str){(const char *)kv->data + c->at + sizeof n, n};
    c->at += sizeof n + n;
    c->index++;
    return true;
}

int gguf_array_i64(const struct gguf_kv *kv, uint64_t i, int64_t *out) {
    if (kv->type != GGUF_ARRAY || kv->elem_type == GGUF_STRING) return ERR_FORMAT;
    if (i >= kv->count) return ERR_RANGE;
    uint64_t v;
    bool negative;
    uint64_t each = kv->data_bytes / kv->count;
    if (!read_integer(kv->elem_type, kv->data + i * each, &v, &negative)) return ERR_FORMAT;
    if (!negative && v > INT64_MAX) return ERR_RANGE;
    *out = (int64_t)v;
    return OK;
}
