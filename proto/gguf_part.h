/* proto/gguf_part.h: one GGUF file as the three halves of the reader share it.
 *
 * Private to proto/gguf*.c: gguf_part.c parses a file, gguf_split.c opens files and puts parts
 * together, gguf.c answers questions.
 *
 * Owns: path, fd, mapping, header copy and tables of one file; gguf_part_deinit frees them.
 * Tested by: tests/unit/test_gguf.c
 */
#ifndef OCTAVO_PROTO_GGUF_PART_H
#define OCTAVO_PROTO_GGUF_PART_H

#include "proto/gguf.h"
#include "proto/limits.h"

struct gguf_part {
    char *path;
    int fd;               /* -1: bytes are the caller's */
    const uint8_t *bytes; /* [size] the mapping, or the caller's */
    uint64_t size;
    uint8_t *header;      /* private copy of the file's start, NULL if bytes are the caller's */

    struct gguf_kv *kv; /* [n_kv] file order */
    uint32_t *kv_order; /* [n_kv] sorted by key */
    uint64_t n_kv;
    struct gguf_tensor *tensors; /* [n_tensors] file order; .part is left 0 */
    uint64_t n_tensors;
};

struct gguf {
    struct gguf_part *parts; /* [n_parts]; keys are those of part 0 */
    int n_parts;
    struct gguf_tensor *tensors; /* [n_tensors] of all parts */
    uint32_t *tensor_order;      /* [n_tensors] sorted by name */
    uint64_t n_tensors;
    uint64_t total_bytes;
};

/* Parses p->bytes whose first `have` bytes stand at `head`. Fills the tables; they point into
 * `head` (keys, values) and p->bytes (tensor data). ERR_AGAIN: nothing is kept, call again with
 * at least *need bytes. */
int gguf_part_parse(struct gguf_part *p, const uint8_t *head, uint64_t have, uint64_t *need,
                    struct err_text *err);
void gguf_part_deinit(struct gguf_part *p);
const struct gguf_kv *gguf_part_find(const struct gguf_part *p, const char *key);

/* Turns parsed parts into g: takes over the parts, joins the tensor tables, refuses a tensor that
 * stands twice. On failure the parts stay the caller's. */
int gguf_join(struct gguf *g, struct gguf_part *parts, int n_parts, struct err_text *err);

/* "bool", "array" …, "unknown" */
const char *gguf_value_type_name(uint32_t type);
/* Why this tensor type cannot stand in a file: "a type of the runtime, never stored" … */
const char *gguf_type_refusal(uint32_t type);
/* The value of an integer of any width if it is not negative. */
bool gguf_kv_u64(const struct gguf_kv *kv, uint64_t *out);

/* Prints n bytes of a stranger so that a sentence can hold them: cut, control bytes as '?'. */
struct gguf_shown {
    char text[100];
};
struct gguf_shown gguf_show(const char *p, uint64_t n);
/* The same for a path, of which the end matters. */
struct gguf_shown gguf_show_path(const char *path);

#endif
