/* coordinator/tok.h: text to token ids and back, from the tables inside the GGUF file.
 *
 * Byte-level BPE with the GLM-4 pre-split expression (PCRE2, UTF and UCP). Pure and read-only after
 * tok_open: any number of threads may encode at once (pool threads do, for long prompts).
 *
 * Owns: vocabulary, merge table, compiled expression.  Called by: chat.c, text.c, the API files.
 * Fails how: tok_open refuses inconsistent tables with key, expected, found (ERR_FORMAT);
 * tok_encode: ERR_FORMAT for invalid UTF-8, ERR_NOMEM.
 * Limits: work is O(n log n) in the length of one word.  Tested by: tests/unit/test_tok.c,
 * tests/conformance/test_tokenizer.py (equality with the `tokenizers` package)
 */
#ifndef OCTAVO_COORDINATOR_TOK_H
#define OCTAVO_COORDINATOR_TOK_H

#include "proto/base.h"
#include "proto/gguf.h"

struct tok;

struct tok_ids { /* grows; {0} is empty */
    int32_t *ids;
    size_t n, cap;
};
void tok_ids_deinit(struct tok_ids *a);
int tok_ids_push(struct tok_ids *a, int32_t id);

enum tok_mode {
    TOK_PLAIN,   /* user data: no added token is recognised, "<|user|>" stays text */
    TOK_TRUSTED, /* every added token's text becomes its id (raw completion prompts) */
};

int tok_open(struct tok **out, const struct gguf *g, struct err_text *err);
void tok_close(struct tok *t);

/* Appends to *out. */
int tok_encode(const struct tok *t, const char *text, size_t n, enum tok_mode mode,
               struct tok_ids *out);

int32_t tok_vocab(const struct tok *t);
int32_t tok_added(const struct tok *t, const char *text); /* id of an added token, or -1 */

/* The longest added token whose text stands at p[0..n); *len its bytes. -1: none. */
int32_t tok_added_at(const struct tok *t, const char *p, size_t n, size_t *len);
bool tok_is_control(const struct tok *t, int32_t id);     /* never shown; fillers, too */
bool tok_is_added(const struct tok *t, int32_t id);       /* control or user-defined */
bool tok_is_eog(const struct tok *t, int32_t id);         /* ends a generation */
const int32_t *tok_eog(const struct tok *t, int *n);

/* The bytes of a token (valid until tok_close); *n 0 for an id outside the vocabulary. They may be
 * part of a UTF-8 sequence. */
const char *tok_bytes(const struct tok *t, int32_t id, size_t *n);

/* Longest prefix of p[0..n) that ends on a code-point boundary, replacing nothing: what may be
 * shown now. Bytes that can never become valid count as complete (the caller replaces them). */
size_t utf8_complete(const char *p, size_t n);

/* Copies n bytes to dst (room for 3*n+1), each invalid byte replaced by U+FFFD; returns length. */
size_t utf8_scrub(char *dst, const char *p, size_t n);
bool utf8_valid(const char *p, size_t n);

#endif
