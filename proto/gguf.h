/* proto/gguf.h: reads GGUF v2/v3 files, single or split, in place.
 *
 * Every count, length, offset and product is checked against the bytes that are there before
 * anything is allocated or followed; a malformed file is refused with file, tensor (or key),
 * expected, found. Values are not unpacked: strings and arrays point into one private copy of the
 * file's header (a file cut or rewritten later harms no reader of it), tensor data to the mapping.
 * A file cut while its tensor data is read kills that reader with SIGBUS: never edit in place.
 * Layout and the list of what must be refused: the format's own specification (version 3).
 *
 * Owns: the descriptors and mappings of all parts, the sorted key and tensor tables.
 * Called by: the coordinator (tokenizer, plan), the worker (weights).
 * Fails how: ERR_FORMAT, ERR_LIMIT, ERR_NOT_FOUND or ERR_SYS with a sentence; never half-open.
 * Limits: LIMIT_GGUF_*.  Pure but for the mmap in gguf_open; gguf_parse takes bytes.
 * Tested by: tests/unit/test_gguf.c, tests/fuzz/fuzz_gguf.c
 */
#ifndef OCTAVO_PROTO_GGUF_H
#define OCTAVO_PROTO_GGUF_H

#include "proto/base.h"

enum gguf_value_type {
    GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL,
    GGUF_STRING, GGUF_ARRAY, GGUF_U64, GGUF_I64, GGUF_F64,
    GGUF_VALUE_TYPES
};

/* Tensor types as the format numbers them (kernels/quant.h uses the same numbers). */
struct gguf_type_info {
    const char *name;
    uint32_t block_elems; /* 0: this id cannot stand in a file */
    uint32_t block_bytes;
};
const struct gguf_type_info *gguf_type_info(uint32_t type); /* NULL if unknown or not storable */

struct gguf_str {
    const char *p; /* not terminated */
    uint64_t n;
};

struct gguf_kv {
    struct gguf_str key;
    enum gguf_value_type type;
    enum gguf_value_type elem_type; /* of an array */
    uint64_t count;                 /* elements of an array, else 1 */
    const uint8_t *data;            /* the encoded value or elements */
    uint64_t data_bytes;
};

struct gguf_tensor {
    char name[64];         /* terminated */
    int n_dims;            /* 1..4 */
    uint64_t ne[4];        /* ne[0] contiguous; missing dims are 1 */
    uint32_t type;         /* has a gguf_type_info */
    int part;              /* which file */
    uint64_t offset;       /* bytes from the start of that file */
    uint64_t bytes;        /* of the whole tensor */
    uint64_t row_bytes;    /* ne[0] / block_elems * block_bytes */
    const uint8_t *data;   /* in the mapping */
};

struct gguf; /* opaque */

/* Opens a file or, when `path` is any part of a split model, all its parts (names are rebuilt from
 * the path given, never from metadata). Nothing of the tensor data is read. */
int gguf_open(struct gguf **out, const char *path, struct err_text *err);

/* The same for one file already in memory (must outlive the result); for tests and fuzzing. */
int gguf_parse(struct gguf **out, const uint8_t *bytes, uint64_t n, const char *name,
               struct err_text *err);
void gguf_close(struct gguf *g);

int gguf_parts(const struct gguf *g);
const char *gguf_part_path(const struct gguf *g, int part);
int gguf_part_fd(const struct gguf *g, int part); /* -1 after gguf_parse */
uint64_t gguf_total_bytes(const struct gguf *g);  /* of all tensors */

uint64_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, uint64_t i); /* file order */
const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name); /* or NULL */

uint64_t gguf_n_kv(const struct gguf *g);
const struct gguf_kv *gguf_kv_at(const struct gguf *g, uint64_t i);
const struct gguf_kv *gguf_find(const struct gguf *g, const char *key); /* or NULL */

/* Typed reads: OK; ERR_NOT_FOUND if the key is absent (err untouched); ERR_FORMAT with a sentence
 * if it has the wrong kind or does not fit. Integers are accepted in any width whose value fits,
 * floats as f32 or f64. */
int gguf_get_u64(const struct gguf *g, const char *key, uint64_t *out, struct err_text *err);
int gguf_get_f64(const struct gguf *g, const char *key, double *out, struct err_text *err);
int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct err_text *err);
int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out, struct err_text *err);

/* Element i of an array value. Strings are walked from a cursor: start with {0}, call in order. */
struct gguf_cursor {
    uint64_t index, at;
};
bool gguf_next_str(const struct gguf_kv *kv, struct gguf_cursor *c, struct gguf_str *out);
int gguf_array_i64(const struct gguf_kv *kv, uint64_t i, int64_t *out); /* ints and bools */

#endif
