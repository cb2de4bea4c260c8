/* tests/unit/vocab_fixture.h: builds the bytes of a small GGUF file with a tokenizer in it.
 *
 * Owns: the bytes.  Called by: test_tok.c, test_text.c, fuzz_text.c.  Fails how: asserts.
 *
 * The default vocabulary: ids 0 to 255 are the bytes, then a few merged pieces, then the added
 * tokens of the GLM-5 format, then one filler. A test changes one field and opens the result.
 */
#ifndef OCTAVO_TESTS_VOCAB_FIXTURE_H
#define OCTAVO_TESTS_VOCAB_FIXTURE_H

#include <string.h>

#include "coordinator/buf.h"
#include "coordinator/tok.h"
#include "proto/gguf.h"

#define FIXTURE_TOKENS_MAX 400

struct fixture {
    const char *model, *pre;
    char *tokens[FIXTURE_TOKENS_MAX];
    int types[FIXTURE_TOKENS_MAX];
    int n_tokens, n_types;
    const char *merges[64];
    int n_merges;
    int64_t eos, eot, bos; /* -1: no such key */
    struct buf file;
    uint64_t n_kv;
};

static inline void fixture_token(struct fixture *f, const char *text, int type) {
    assert(f->n_tokens < FIXTURE_TOKENS_MAX);
    f->tokens[f->n_tokens] = strdup(text);
    f->types[f->n_tokens++] = type;
    f->n_types = f->n_tokens;
}

static inline void fixture_byte_token(struct fixture *f, int b, int *next) {
    bool itself = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    int c = itself ? b : (*next)++;
    char text[3] = {(char)c, 0, 0};
    if (c >= 0x80) {
        text[0] = (char)(0xC0 | c >> 6);
        text[1] = (char)(0x80 | (c & 63));
    }
    fixture_token(f, text, 1);
}

static inline void fixture_init(struct fixture *f) {
    static const char *const pieces[] = {"ab", "abc",  "aa",    "aaaa", "he",
                                         "ll", "hell", "hello", "Ġh",   "ĠĠ"};
    static const char *const merges[] = {"a b", "ab c",  "a a",    "aa aa", "h e",
                                         "l l", "he ll", "hell o", "Ġ h",   "Ġ Ġ"};
    static const char *const control[] = {"<|endoftext|>", "[MASK]",         "[gMASK]",
                                          "<sop>",         "<|system|>",     "<|user|>",
                                          "<|assistant|>", "<|observation|>"};
    static const char *const shown[] = {
        "<think>",          "</think>",  "<tool_call>", "</tool_call>", "<tool_response>",
        "</tool_response>", "<arg_key>", "</arg_key>",  "<arg_value>",  "</arg_value>"};
    *f = (struct fixture){.model = "gpt2", .pre = "glm4", .eos = 266, .eot = 271, .bos = 268};
    int next = 0x100;
    for (int b = 0; b < 256; b++) fixture_byte_token(f, b, &next);
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++) fixture_token(f, pieces[i], 1);
    for (size_t i = 0; i < ARRAY_LEN(control); i++) fixture_token(f, control[i], 3);
    for (size_t i = 0; i < ARRAY_LEN(shown); i++) fixture_token(f, shown[i], 4);
    fixture_token(f, "[PAD]", 5);
    for (size_t i = 0; i < ARRAY_LEN(merges); i++) f->merges[f->n_merges++] = merges[i];
}

static inline void fixture_deinit(struct fixture *f) {
    for (int i = 0; i < f->n_tokens; i++) free(f->tokens[i]);
    buf_deinit(&f->file);
}

static inline void put_u32(struct fixture *f, uint32_t v) {
    buf_add(&f->file, (char *)&v, 4);
}
static inline void put_u64(struct fixture *f, uint64_t v) {
    buf_add(&f->file, (char *)&v, 8);
}
static inline void put_str(struct fixture *f, const char *s) {
    put_u64(f, strlen(s));
    buf_add_str(&f->file, s);
}
static inline void put_key(struct fixture *f, const char *key, uint32_t type) {
    put_str(f, key);
    put_u32(f, type);
    f->n_kv++;
}
static inline void put_text(struct fixture *f, const char *key, const char *value) {
    if (!value) return;
    put_key(f, key, GGUF_STRING);
    put_str(f, value);
}
static inline void put_id(struct fixture *f, const char *key, int64_t value) {
    if (value < 0) return;
    put_key(f, key, GGUF_U32);
    put_u32(f, (uint32_t)value);
}
static inline void put_array(struct fixture *f, const char *key, uint32_t elem, int n) {
    put_key(f, key, GGUF_ARRAY);
    put_u32(f, elem);
    put_u64(f, (uint64_t)n);
}

/* The tokenizer of the fixture, or the refusal. */
static inline int fixture_open(struct fixture *f, struct tok **out, struct err_text *err) {
    buf_clear(&f->file);
    f->n_kv = 0;
    buf_add(&f->file, "GGUF", 4);
    put_u32(f, 3);
    put_u64(f, 0);
    put_u64(f, 0); /* number of keys, below */
    put_text(f, "general.architecture", "glm-dsa");
    put_text(f, "tokenizer.ggml.model", f->model);
    put_text(f, "tokenizer.ggml.pre", f->pre);
    put_array(f, "tokenizer.ggml.tokens", GGUF_STRING, f->n_tokens);
    for (int i = 0; i < f->n_tokens; i++) put_str(f, f->tokens[i]);
    put_array(f, "tokenizer.ggml.token_type", GGUF_I32, f->n_types);
    for (int i = 0; i < f->n_types; i++) put_u32(f, (uint32_t)f->types[i]);
    put_array(f, "tokenizer.ggml.merges", GGUF_STRING, f->n_merges);
    for (int i = 0; i < f->n_merges; i++) put_str(f, f->merges[i]);
    put_id(f, "tokenizer.ggml.eos_token_id", f->eos);
    put_id(f, "tokenizer.ggml.eot_token_id", f->eot);
    put_id(f, "tokenizer.ggml.bos_token_id", f->bos);
    memcpy(f->file.p + 16, &f->n_kv, 8);
    struct gguf *g;
    int rc = gguf_parse(&g, (uint8_t *)f->file.p, f->file.n, "fixture.gguf", err);
    if (rc < 0) return rc;
    rc = tok_open(out, g, err);
    gguf_close(g);
    return rc;
}

#endif
