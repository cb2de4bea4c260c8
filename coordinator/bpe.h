/* coordinator/bpe.h: byte-pair encoding of one word.
 *
 * Owns: the merge table.  Called by: tok.c.  Read-only after bpe_load.
 * Fails how: bpe_load: ERR_FORMAT with key, merge, expected, found; bpe_encode: ERR_NOMEM.
 * Limits: O(n log n) in the bytes of a word.  Tested by: tests/unit/test_tok.c,
 * tests/conformance/test_tokenizer.py
 */
#ifndef OCTAVO_COORDINATOR_BPE_H
#define OCTAVO_COORDINATOR_BPE_H

#include "coordinator/tok.h"
#include "coordinator/vocab.h"

struct bpe_merge {
    int32_t left, right, result; /* ids; the rank is the index */
};

struct bpe {
    const struct vocab *vocab; /* borrowed */
    struct bpe_merge *merges;  /* [n_merges] */
    uint32_t n_merges;
    uint32_t *slots; /* [mask + 1] rank + 1, 0: free */
    uint32_t mask;
    int32_t byte_id[256]; /* the piece of one byte */
};

/* Scratch of one encoder; {0} is empty; grows to the longest word met. */
struct bpe_work {
    struct bpe_symbol *symbols;
    size_t symbols_cap;
    uint64_t *heap; /* rank << 32 | index of the left symbol */
    size_t heap_n, heap_cap;
};

int bpe_load(struct bpe *b, const struct vocab *v, const struct gguf *g, struct err_text *err);
void bpe_deinit(struct bpe *b);

/* Appends the ids of the word p[0..n). */
int bpe_encode(const struct bpe *b, struct bpe_work *w, const char *p, size_t n,
               struct tok_ids *out);
void bpe_work_deinit(struct bpe_work *w);

#endif
