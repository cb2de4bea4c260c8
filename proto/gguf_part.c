/* proto/gguf_part.c: parses one GGUF file, trusting none of it.
 *
 * Owns: the tables of a struct gguf_part.  Called by: gguf_split.c.
 * Fails how: ERR_FORMAT, ERR_LIMIT, ERR_NOMEM with a sentence (file, key or tensor, expected,
 * found); ERR_AGAIN asks for more of the header.
 * Limits: LIMIT_GGUF_*.  Pure.  Tested by: tests/unit/test_gguf.c, tests/fuzz/fuzz_gguf.c
 *
 * One function, take(), moves through the file and compares with the bytes that are left before it
 * moves; every count is compared with the bytes its elements need at least before a table of that
 * size is allocated. Keys and names are sorted to find doubles: a hash table would do it faster for
 * honest files and in quadratic time for one made to collide.
 *
 * The header is parsed from a private copy, not from the mapping: a file that is cut or rewritten
 * while it is open would otherwise take the coordinator, which needs the vocabulary for as long as
 * it lives, down with SIGBUS. The reader does not know where the header ends until it is there, so
 * it asks for more (ERR_AGAIN) and starts over; sizes grow geometrically, so that all rounds
 * together cost less than twice the last one.
 */
#include "proto/gguf_part.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "values are read in place");

#define HEADER_BYTES     24
#define KV_BYTES_MIN     14 /* key length, one key byte, type, one value byte */
#define TENSOR_BYTES_MIN 33 /* name length, one name byte, n_dims, one dim, type, offset */

struct reader {
    struct gguf_part *p;
    const uint8_t *head;
    uint64_t at, have, size; /* at <= have <= size */
    uint64_t need;
    char what[140]; /* "key 'a.b'", for the sentence */
    struct err_text *err;
};

typedef unsigned long long ull; /* for %llu */

struct gguf_shown gguf_show(const char *p, uint64_t n) {
    struct gguf_shown s;
    const uint64_t cap = sizeof s.text - 4;
    uint64_t k = MIN(n, cap);
    for (uint64_t i = 0; i < k; i++)
        s.text[i] = (unsigned char)p[i] < ' ' || p[i] == 127 ? '?' : p[i];
    memcpy(s.text + k, n > cap ? "..." : "", n > cap ? 4 : 1);
    return s;
}

struct gguf_shown gguf_show_path(const char *path) {
    size_t n = strlen(path), cap = sizeof(struct gguf_shown) - 4;
    if (n <= cap) return gguf_show(path, n);
    const char *tail = path + n - cap + 3;
    char cut[sizeof(struct gguf_shown)];
    snprintf(cut, sizeof cut, "...%s", tail);
    return gguf_show(cut, strlen(cut));
}

static PRINTF_LIKE(3, 4) int refuse(struct reader *r, int code, const char *fmt, ...) {
    char text[320];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return err_set(r->err, code, "%s: %s%s%s", gguf_show_path(r->p->path).text, r->what,
                   r->what[0] ? ": " : "", text);
}

/* ---- moving through the bytes ---- */

static uint64_t left(const struct reader *r) {
    return r->size - r->at;
}

static int take(struct reader *r, uint64_t n, const uint8_t **p) {
    if (n > left(r))
        return refuse(r, ERR_FORMAT, "expected %llu bytes at offset %llu, found %llu before the "
                      "end of the file", (ull)n, (ull)r->at, (ull)left(r));
    if (n > r->have - r->at) {
        r->need = r->at + n;
        return ERR_AGAIN;
    }
    *p = r->head + r->at;
    r->at += n;
    return OK;
}

static int take_u32(struct reader *r, uint32_t *out) {
    const uint8_t *p = NULL;
    TRY(take(r, sizeof *out, &p));
    memcpy(out, p, sizeof *out);
    return OK;
}

static int take_u64(struct reader *r, uint64_t *out) {
    const uint8_t *p = NULL;
    TRY(take(r, sizeof *out, &p));
    memcpy(out, p, sizeof *out);
    return OK;
}

static int take_str(struct reader *r, uint64_t limit, struct gguf_str *out) {
    const uint8_t *p = NULL;
    uint64_t n = 0;
    TRY(take_u64(r, &n));
    if (n <= left(r) && n > limit)
        return refuse(r, ERR_LIMIT, "expected a string of at most %llu bytes, found %llu",
                      (ull)limit, (ull)n);
    TRY(take(r, n, &p));
    *out = (struct gguf_str){(const char *)p, n};
    return OK;
}

/* A count of records, each at least `least` bytes long. Negative counts are huge ones here. */
static int check_count(struct reader *r, const char *of, uint64_t n, uint64_t least,
                       uint64_t limit) {
    if (n > INT64_MAX)
        return refuse(r, ERR_FORMAT, "expected a count of %s, found %lld", of, (long long)n);
    if (n > left(r) / least)
        return refuse(r, ERR_FORMAT, "expected at most %llu %s in the %llu bytes left, found %llu",
                      (ull)(left(r) / least), of, (ull)left(r), (ull)n);
    if (n > limit)
        return refuse(r, ERR_LIMIT, "expected at most %llu %s, found %llu", (ull)limit, of, (ull)n);
    return OK;
}

static int check_name(struct reader *r, const char *kind, struct gguf_str s) {
    if (s.n == 0) return refuse(r, ERR_FORMAT, "expected a %s, found an empty one", kind);
    for (uint64_t i = 0; i < s.n; i++)
        if ((unsigned char)s.p[i] < ' ' || s.p[i] == 127)
            return refuse(r, ERR_FORMAT, "expected a %s of printable bytes, found byte 0x%02x in "
                          "'%s'", kind, (unsigned char)s.p[i], gguf_show(s.p, s.n).text);
    return OK;
}

/* ---- keys and values ---- */

static uint64_t value_bytes(uint32_t type) { /* 0: of no fixed size */
    static const uint8_t bytes[GGUF_VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < GGUF_VALUE_TYPES ? bytes[type] : 0;
}

static int parse_strings(struct reader *r, struct gguf_kv *kv) {
    uint64_t start = r->at;
    for (uint64_t i = 0; i < kv->count; i++) {
        struct gguf_str s;
        TRY(take_str(r, LIMIT_GGUF_STRING_BYTES, &s));
    }
    kv->data = r->head + start;
    kv->data_bytes = r->at - start;
    return OK;
}

static int parse_array(struct reader *r, struct gguf_kv *kv) {
    uint32_t elem;
    TRY(take_u32(r, &elem));
    TRY(take_u64(r, &kv->count));
    if (elem == GGUF_ARRAY || elem >= GGUF_VALUE_TYPES)
        return refuse(r, ERR_FORMAT, "expected an array of a simple type, found one of type %u "
                      "(%s)", elem, gguf_value_type_name(elem));
    kv->elem_type = (enum gguf_value_type)elem;
    uint64_t each = value_bytes(elem);
    TRY(check_count(r, "array elements", kv->count, each ? each : 8, LIMIT_GGUF_ARRAY));
    if (elem == GGUF_STRING) return parse_strings(r, kv);
    kv->data_bytes = kv->count * each;
    return take(r, kv->data_bytes, &kv->data);
}

static int parse_value(struct reader *r, struct gguf_kv *kv) {
    if (kv->type == GGUF_ARRAY) {
        TRY(parse_array(r, kv));
    } else if (kv->type == GGUF_STRING) {
        struct gguf_str s;
        kv->count = 1;
        TRY(take_str(r, LIMIT_GGUF_STRING_BYTES, &s));
        kv->data = (const uint8_t *)s.p;
        kv->data_bytes = s.n;
    } else {
        kv->count = 1;
        kv->data_bytes = value_bytes(kv->type);
        TRY(take(r, kv->data_bytes, &kv->data));
    }
    if (kv->type == GGUF_BOOL || (kv->type == GGUF_ARRAY && kv->elem_type == GGUF_BOOL))
        for (uint64_t i = 0; i < kv->count; i++)
            if (kv->data[i] > 1)
                return refuse(r, ERR_FORMAT, "expected a bool of 0 or 1, found %u", kv->data[i]);
    return OK;
}

static int parse_kv(struct reader *r, struct gguf_kv *kv, uint64_t i) {
    snprintf(r->what, sizeof r->what, "key %llu", (ull)i);
    TRY(take_str(r, LIMIT_GGUF_KEY_BYTES, &kv->key));
    TRY(check_name(r, "key", kv->key));
    snprintf(r->what, sizeof r->what, "key '%s'", gguf_show(kv->key.p, kv->key.n).text);
    uint32_t type;
    TRY(take_u32(r, &type));
    if (type >= GGUF_VALUE_TYPES)
        return refuse(r, ERR_FORMAT, "expected a value type from 0 to 12, found %u", type);
    kv->type = (enum gguf_value_type)type;
    return parse_value(r, kv);
}

static int compare_str(struct gguf_str a, struct gguf_str b) {
    int c = memcmp(a.p, b.p, MIN(a.n, b.n));
    return c ? c : (a.n > b.n) - (a.n < b.n);
}

static int by_key(const void *a, const void *b, void *kv) {
    return compare_str(((struct gguf_kv *)kv)[*(const uint32_t *)a].key,
                       ((struct gguf_kv *)kv)[*(const uint32_t *)b].key);
}

const struct gguf_kv *gguf_part_find(const struct gguf_part *p, const char *key) {
    struct gguf_str k = {key, strlen(key)};
    uint64_t lo = 0, hi = p->n_kv;
    while (lo < hi) {
        uint64_t mid = lo + (hi - lo) / 2;
        const struct gguf_kv *kv = &p->kv[p->kv_order[mid]];
        int c = compare_str(kv->key, k);
        if (c == 0) return kv;
        if (c < 0) lo = mid + 1;
        else hi = mid;
    }
    return NULL;
}

static int parse_keys(struct reader *r, uint64_t n) {
    struct gguf_part *p = r->p;
    p->kv = calloc(n + 1, sizeof *p->kv);
    p->kv_order = calloc(n + 1, sizeof *p->kv_order);
    if (!p->kv || !p->kv_order)
        return refuse(r, ERR_NOMEM, "expected memory for %llu keys, found none", (ull)n);
    for (; p->n_kv < n; p->n_kv++) {
        TRY(parse_kv(r, &p->kv[p->n_kv], p->n_kv));
        p->kv_order[p->n_kv] = (uint32_t)p->n_kv;
    }
    qsort_r(p->kv_order, n, sizeof *p->kv_order, by_key, p->kv);
    for (uint64_t i = 1; i < n; i++) {
        struct gguf_str a = p->kv[p->kv_order[i - 1]].key, b = p->kv[p->kv_order[i]].key;
        if (compare_str(a, b)) continue;
        snprintf(r->what, sizeof r->what, "key '%s'", gguf_show(a.p, a.n).text);
        return refuse(r, ERR_FORMAT, "expected every key once, found a duplicate");
    }
    r->what[0] = 0;
    return OK;
}

static int read_alignment(struct reader *r, uint64_t *out) {
    *out = 32;
    const struct gguf_kv *kv = gguf_part_find(r->p, "general.alignment");
    if (!kv) return OK;
    snprintf(r->what, sizeof r->what, "key 'general.alignment'");
    if (kv->type != GGUF_U32)
        return refuse(r, ERR_FORMAT, "expected a u32, found %s", gguf_value_type_name(kv->type));
    uint32_t v;
    memcpy(&v, kv->data, sizeof v);
    if (v < 8 || v > LIMIT_GGUF_ALIGNMENT || (v & (v - 1)))
        return refuse(r, ERR_FORMAT, "expected a power of two from 8 to %u, found %u",
                      LIMIT_GGUF_ALIGNMENT, v);
    *out = v;
    r->what[0] = 0;
    return OK;
}

/* ---- tensors ---- */

static int parse_dims(struct reader *r, struct gguf_tensor *t) {
    uint32_t n_dims;
    TRY(take_u32(r, &n_dims));
    if (n_dims < 1 || n_dims > 4)
        return refuse(r, ERR_FORMAT, "expected 1 to 4 dimensions, found %u", n_dims);
    t->n_dims = (int)n_dims;
    int64_t elems = 1;
    for (int d = 0; d < 4; d++) {
        t->ne[d] = 1;
        if (d >= t->n_dims) continue;
        TRY(take_u64(r, &t->ne[d]));
        if ((int64_t)t->ne[d] <= 0)
            return refuse(r, ERR_FORMAT, "expected dimension %d of at least 1, found %lld", d,
                          (long long)t->ne[d]);
        if (__builtin_mul_overflow(elems, (int64_t)t->ne[d], &elems))
            return refuse(r, ERR_FORMAT, "expected fewer than 2^63 elements, found more at "
                          "dimension %d of %lld", d, (long long)t->ne[d]);
    }
    return OK;
}

static int parse_type(struct reader *r, struct gguf_tensor *t) {
    TRY(take_u32(r, &t->type));
    const struct gguf_type_info *info = gguf_type_info(t->type);
    if (!info)
        return refuse(r, ERR_FORMAT, "expected a tensor type that can be stored, found id %d (%s)",
                      (int32_t)t->type, gguf_type_refusal(t->type));
    if (t->ne[0] % info->block_elems)
        return refuse(r, ERR_FORMAT, "expected rows of a multiple of %u elements (%s), found %llu",
                      info->block_elems, info->name, (ull)t->ne[0]);
    bool wraps = __builtin_mul_overflow(t->ne[0] / info->block_elems, info->block_bytes,
                                        &t->row_bytes);
    t->bytes = t->row_bytes;
    for (int d = 1; d < 4; d++) wraps |= __builtin_mul_overflow(t->bytes, t->ne[d], &t->bytes);
    if (wraps || t->bytes > INT64_MAX)
        return refuse(r, ERR_FORMAT, "expected fewer than 2^63 bytes, found more");
    return OK;
}

/* Leaves the offset relative to the data section, whose start is not known yet. */
static int parse_tensor(struct reader *r, struct gguf_tensor *t, uint64_t i) {
    struct gguf_str name = {0};
    snprintf(r->what, sizeof r->what, "tensor %llu", (ull)i);
    TRY(take_str(r, LIMIT_GGUF_NAME_BYTES - 1, &name));
    TRY(check_name(r, "tensor name", name));
    static_assert(sizeof t->name == LIMIT_GGUF_NAME_BYTES, "names fit with their terminator");
    memcpy(t->name, name.p, name.n);
    snprintf(r->what, sizeof r->what, "tensor '%s'", t->name);
    TRY(parse_dims(r, t));
    TRY(parse_type(r, t));
    return take_u64(r, &t->offset);
}

static uint64_t pad(uint64_t n, uint64_t align) { /* n is far from wrapping: a place in a file */
    return (n + align - 1) & ~(align - 1);
}

/* Every tensor starts where the one before ended, padded: no gap, no overlap, no other order. */
static int place_tensors(struct reader *r, uint64_t align, uint64_t data_at, uint64_t *data_end) {
    struct gguf_part *p = r->p;
    uint64_t at = 0, room = data_at <= r->size ? r->size - data_at : 0;
    if (p->n_tensors && data_at > r->size) {
        r->what[0] = 0;
        return refuse(r, ERR_FORMAT, "expected the tensor data at offset %llu, found the end of "
                      "the file at %llu", (ull)data_at, (ull)r->size);
    }
    for (uint64_t i = 0; i < p->n_tensors; i++) {
        struct gguf_tensor *t = &p->tensors[i];
        snprintf(r->what, sizeof r->what, "tensor '%s'", t->name);
        if (t->offset % align)
            return refuse(r, ERR_FORMAT, "expected an offset that is a multiple of %llu, found "
                          "%llu", (ull)align, (ull)t->offset);
        if (t->offset != pad(at, align))
            return refuse(r, ERR_FORMAT, "expected offset %llu, right after the tensor before it, "
                          "found %llu", (ull)pad(at, align), (ull)t->offset);
        if (t->offset > room || t->bytes > room - t->offset)
            return refuse(r, ERR_FORMAT, "expected %llu bytes of data at offset %llu, found %llu "
                          "before the end of the file", (ull)t->bytes, (ull)(data_at + t->offset),
                          (ull)(t->offset < room ? room - t->offset : 0));
        at = t->offset + t->bytes;
        t->offset += data_at;
        t->data = p->bytes + t->offset;
    }
    *data_end = data_at + at;
    r->what[0] = 0;
    return OK;
}

/* Parts that were joined with cat: another file's magic where this one should end. */
static int check_not_joined(struct reader *r, uint64_t align, uint64_t info_end,
                            uint64_t data_end) {
    const uint64_t ends[] = {data_end, pad(data_end, align), info_end};
    int n = r->p->n_tensors ? 2 : 3;
    for (int i = 0; i < n; i++) {
        uint8_t magic[4];
        if (ends[i] > r->size || r->size - ends[i] < HEADER_BYTES) continue;
        if (r->p->fd < 0) memcpy(magic, r->p->bytes + ends[i], sizeof magic);
        else if (pread(r->p->fd, magic, sizeof magic, (off_t)ends[i]) != sizeof magic) continue;
        if (!memcmp(magic, "GGUF", 4))
            return refuse(r, ERR_FORMAT, "expected the end of the file at %llu bytes, found "
                          "another GGUF file there; were parts joined with cat? Keep them apart "
                          "and open any one of them", (ull)ends[i]);
    }
    return OK;
}

static int parse_tensors(struct reader *r, uint64_t n) {
    struct gguf_part *p = r->p;
    uint64_t align = 0, data_end = 0;
    TRY(read_alignment(r, &align));
    TRY(check_count(r, "tensors", n, TENSOR_BYTES_MIN, LIMIT_GGUF_TENSORS));
    p->tensors = calloc(n + 1, sizeof *p->tensors);
    if (!p->tensors)
        return refuse(r, ERR_NOMEM, "expected memory for %llu tensors, found none", (ull)n);
    for (; p->n_tensors < n; p->n_tensors++)
        TRY(parse_tensor(r, &p->tensors[p->n_tensors], p->n_tensors));
    uint64_t info_end = r->at;
    TRY(place_tensors(r, align, pad(info_end, align), &data_end));
    return check_not_joined(r, align, info_end, data_end);
}

/* ---- the file ---- */

static int check_magic(struct reader *r) {
    static const char lfs[] = "version https://git-lfs";
    char first[sizeof lfs - 1] = {0};
    if (r->have) memcpy(first, r->head, MIN(sizeof first, r->have));
    if (!memcmp(first, lfs, sizeof first))
        return refuse(r, ERR_FORMAT, "expected a GGUF file, found a Git LFS pointer: the file "
                      "itself was never fetched");
    if (r->size < HEADER_BYTES)
        return refuse(r, ERR_FORMAT, "expected a GGUF file of at least %d bytes, found %llu",
                      HEADER_BYTES, (ull)r->size);
    if (memcmp(first, "GGUF", 4))
        return refuse(r, ERR_FORMAT, "expected a GGUF file, found one that starts with '%s'",
                      gguf_show(first, strnlen(first, 4)).text);
    r->at = 4;
    return OK;
}

static int parse_header(struct reader *r) {
    uint32_t version;
    uint64_t n_tensors, n_kv;
    TRY(check_magic(r));
    TRY(take_u32(r, &version));
    if (version && !(version & 0xffff))
        return refuse(r, ERR_FORMAT, "expected a little-endian file, found version 0x%08x: a "
                      "big-endian one", version);
    if (version != 2 && version != 3)
        return refuse(r, ERR_FORMAT, "expected GGUF version 2 or 3, found %u", version);
    TRY(take_u64(r, &n_tensors));
    TRY(take_u64(r, &n_kv));
    TRY(check_count(r, "tensors", n_tensors, TENSOR_BYTES_MIN, LIMIT_GGUF_TENSORS));
    TRY(check_count(r, "keys", n_kv, KV_BYTES_MIN, LIMIT_GGUF_KEYS));
    TRY(parse_keys(r, n_kv));
    return parse_tensors(r, n_tensors);
}

static void free_tables(struct gguf_part *p) {
    free(p->kv);
    free(p->kv_order);
    free(p->tensors);
    p->kv = NULL;
    p->kv_order = NULL;
    p->tensors = NULL;
    p->n_kv = p->n_tensors = 0;
}

int gguf_part_parse(struct gguf_part *p, const uint8_t *head, uint64_t have, uint64_t *need,
                    struct err_text *err) {
    assert(have <= p->size && (have >= HEADER_BYTES || have == p->size));
    struct reader r = {.p = p, .head = head, .have = have, .size = p->size, .err = err};
    int rc = parse_header(&r);
    if (rc < 0) free_tables(p);
    *need = r.need;
    return rc;
}

void gguf_part_deinit(struct gguf_part *p) {
    free_tables(p);
    free(p->header);
    free(p->path);
    p->header = NULL;
    p->path = NULL;
}
