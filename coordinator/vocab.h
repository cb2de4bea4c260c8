/* coordinator/vocab.h: the vocabulary of a GGUF file: bytes and kind of every token.
 *
 * Owns: copies of all texts, and a hash table from bytes to piece.  Called by: bpe.c, tok.c.
 * Read-only after vocab_load.
 * Fails how: vocab_load: ERR_FORMAT with key, token, expected, found; ERR_NOMEM.
 * Limits: VOCAB_PIECE_BYTES_MAX.  Tested by: tests/unit/test_tok.c
 */
#ifndef OCTAVO_COORDINATOR_VOCAB_H
#define OCTAVO_COORDINATOR_VOCAB_H

#include "proto/base.h"
#include "proto/gguf.h"

#define VOCAB_PIECE_BYTES_MAX 2048 /* the longest pieces in use are about 1 KiB */

enum vocab_type { /* tokenizer.ggml.token_type */
    VOCAB_NORMAL = 1,
    VOCAB_UNKNOWN,
    VOCAB_CONTROL,
    VOCAB_USER_DEFINED,
    VOCAB_UNUSED,
    VOCAB_BYTE,
};

struct vocab {
    int32_t n;
    char *bytes;     /* all tokens, one after another */
    uint32_t *at;    /* [n + 1] where each begins */
    uint8_t *type;   /* [n] enum vocab_type */
    uint32_t *slots; /* [mask + 1] id + 1, 0: free */
    uint32_t mask;
    uint32_t longest; /* bytes of the longest normal piece */
};

int vocab_load(struct vocab *v, const struct gguf *g, struct err_text *err);
void vocab_deinit(struct vocab *v);

static inline const char *vocab_bytes(const struct vocab *v, int32_t id, size_t *n) {
    *n = v->at[id + 1] - v->at[id];
    return v->bytes + v->at[id];
}

/* The normal piece with exactly these bytes, or -1. */
int32_t vocab_piece(const struct vocab *v, const char *p, size_t n);

/* A byte-mapped text back to its bytes: dst has room for n. Returns the length, or -1 where a
 * character stands for no byte. */
int64_t vocab_unmap(char *dst, const char *p, uint64_t n);

#endif
