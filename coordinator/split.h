/* coordinator/split.h: the pre-split of byte-level BPE: text to words that no merge may cross.
 *
 * Owns: the compiled expression.  Called by: tok.c.  Read-only after split_new.
 * Fails how: split_new: ERR_FORMAT for a splitter it does not know; split_next: ERR_NOMEM.
 * Limits: linear in the text.  Tested by: tests/unit/test_tok.c, tests/conformance/test_tokenizer.py
 */
#ifndef OCTAVO_COORDINATOR_SPLIT_H
#define OCTAVO_COORDINATOR_SPLIT_H

#include "proto/base.h"
#include "proto/gguf.h"

struct split;
struct split_walk; /* one walk over one text; not shared between threads */

/* name: the value of tokenizer.ggml.pre */
int split_new(struct split **out, struct gguf_str name, struct err_text *err);
void split_free(struct split *s);

struct split_walk *split_walk_new(const struct split *s); /* NULL: no memory */
void split_walk_free(struct split_walk *w);

/* The end of the word that begins at `at` (at < n); text[0..n) is valid UTF-8 and `at` stands on a
 * code point. */
int split_next(struct split_walk *w, const char *text, size_t n, size_t at, size_t *end);

#endif
