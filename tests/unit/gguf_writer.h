/* tests/unit/gguf_writer.h: writes GGUF bytes, right or wrong, for the tests of the reader.
 *
 * Owns: a growing buffer.  Used by: tests/unit/test_gguf.c, test_gguf_split.c
 */
#ifndef OCTAVO_TESTS_UNIT_GGUF_WRITER_H
#define OCTAVO_TESTS_UNIT_GGUF_WRITER_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct bytes {
    uint8_t *p;
    size_t n, cap;
};

static inline void put(struct bytes *b, const void *p, size_t n) {
    if (b->n + n > b->cap) {
        b->cap = 2 * (b->n + n) + 64;
        b->p = realloc(b->p, b->cap);
        if (!b->p) abort();
    }
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
}

static inline void put_u16(struct bytes *b, uint16_t v) { put(b, &v, sizeof v); }
static inline void put_u32(struct bytes *b, uint32_t v) { put(b, &v, sizeof v); }
static inline void put_u64(struct bytes *b, uint64_t v) { put(b, &v, sizeof v); }

static inline void put_strn(struct bytes *b, const char *s, size_t n) {
    put_u64(b, n);
    put(b, s, n);
}

static inline void put_str(struct bytes *b, const char *s) { put_strn(b, s, strlen(s)); }

static inline void put_header(struct bytes *b, uint32_t version, uint64_t n_tensors,
                              uint64_t n_kv) {
    put(b, "GGUF", 4);
    put_u32(b, version);
    put_u64(b, n_tensors);
    put_u64(b, n_kv);
}

/* A key and its value's type; the value is put after it. */
static inline void put_key(struct bytes *b, const char *key, uint32_t type) {
    put_str(b, key);
    put_u32(b, type);
}

static inline void put_tensor(struct bytes *b, const char *name, uint32_t n_dims,
                              const uint64_t *ne, uint32_t type, uint64_t offset) {
    put_str(b, name);
    put_u32(b, n_dims);
    for (uint32_t d = 0; d < n_dims; d++) put_u64(b, ne[d]);
    put_u32(b, type);
    put_u64(b, offset);
}

static inline void put_padding(struct bytes *b, size_t align) {
    while (b->n % align) put(b, "", 1);
}

static inline void put_fill(struct bytes *b, size_t n, uint8_t with) {
    while (n--) put(b, &with, 1);
}

#endif
