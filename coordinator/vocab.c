/* coordinator/vocab.c: reads tokenizer.ggml.tokens and token_type.
 *
 * Owns, called by, fails how, limits, tested by: see vocab.h.
 *
 * Pieces are kept as the bytes they stand for, not in the file's spelling (which maps each byte to
 * a printable character): then encoding compares bytes of the text directly, and decoding is a
 * copy. Texts are copied out of the file so that its mapping may go. Normal pieces and literal
 * tokens (control, user-defined, …) share one hash table but never meet: the kind is part of the
 * key, because a control token must not be found by encoding user text.
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/vocab.h"

/* The byte that a character of the file's spelling stands for, or -1. Printable Latin-1 stands for
 * itself; the other 68 bytes, in order, are U+0100 to U+0143. */
static int char_to_byte(uint32_t c) {
    if ((c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF))
        return (int)c;
    if (c >= 0x100 && c <= 0x120) return (int)c - 0x100;        /* 00 to 20 */
    if (c >= 0x121 && c <= 0x142) return (int)c - 0x121 + 0x7F; /* 7F to A0 */
    return c == 0x143 ? 0xAD : -1;
}

int64_t vocab_unmap(char *dst, const char *p, uint64_t n) {
    const unsigned char *q = (const unsigned char *)p;
    int64_t len = 0;
    for (uint64_t i = 0; i < n;) {
        uint32_t c = q[i++];
        if (c >= 0x80) { /* all characters in use have one or two bytes */
            if (c < 0xC2 || c > 0xDF || i == n || (q[i] & 0xC0) != 0x80) return -1;
            c = (c & 31) << 6 | (q[i++] & 63);
        }
        int byte = char_to_byte(c);
        if (byte < 0) return -1;
        dst[len++] = (char)byte;
    }
    return len;
}

static uint64_t hash_bytes(const char *p, size_t n, bool literal) {
    uint64_t h = literal ? 0x9E3779B97F4A7C15ull : 1469598103934665603ull;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)p[i]) * 1099511628211ull;
    return h ^ h >> 29;
}

static bool is_literal(const struct vocab *v, int32_t id) {
    return v->type[id] != VOCAB_NORMAL;
}

/* The slot of these bytes: taken by an equal token, or free. */
static uint32_t *find_slot(const struct vocab *v, const char *p, size_t n, bool literal) {
    for (uint64_t i = hash_bytes(p, n, literal);; i++) {
        uint32_t *slot = &v->slots[i & v->mask];
        if (*slot == 0) return slot;
        int32_t id = (int32_t)*slot - 1;
        size_t have;
        const char *q = vocab_bytes(v, id, &have);
        if (have == n && is_literal(v, id) == literal && memcmp(p, q, n) == 0) return slot;
    }
}

int32_t vocab_piece(const struct vocab *v, const char *p, size_t n) {
    if (n > v->longest) return -1;
    return (int32_t)*find_slot(v, p, n, false) - 1;
}

void vocab_deinit(struct vocab *v) {
    free(v->bytes);
    free(v->at);
    free(v->type);
    free(v->slots);
    *v = (struct vocab){0};
}

/* The array `key` of the stated kind, or a sentence. */
static int array_of(const struct gguf *g, const char *key, bool strings, const struct gguf_kv **out,
                    struct err_text *err) {
    const struct gguf_kv *kv = gguf_find(g, key);
    const char *want = strings ? "an array of strings" : "an array of integers";
    if (!kv) return err_set(err, ERR_FORMAT, "%s: expected %s, found no such key", key, want);
    bool integers =
        kv->elem_type <= GGUF_I32 || kv->elem_type == GGUF_U64 || kv->elem_type == GGUF_I64;
    if (kv->type != GGUF_ARRAY || (strings ? kv->elem_type != GGUF_STRING : !integers))
        return err_set(err, ERR_FORMAT, "%s: expected %s, found another type", key, want);
    *out = kv;
    return OK;
}

static int read_types(struct vocab *v, const struct gguf *g, struct err_text *err) {
    static const char key[] = "tokenizer.ggml.token_type";
    const struct gguf_kv *kv = NULL;
    TRY(array_of(g, key, false, &kv, err));
    if (kv->count != (uint64_t)v->n)
        return err_set(err, ERR_FORMAT, "%s: expected %d entries (as many as tokens), found %llu",
                       key, v->n, (unsigned long long)kv->count);
    for (int32_t id = 0; id < v->n; id++) {
        int64_t type = 0;
        TRY(gguf_array_i64(kv, (uint64_t)id, &type));
        if (type < VOCAB_NORMAL || type > VOCAB_BYTE)
            return err_set(err, ERR_FORMAT, "%s: token %d: expected 1 to 6, found %lld", key, id,
                           (long long)type);
        v->type[id] = (uint8_t)type;
    }
    return OK;
}

/* Adds the next token, whose id is `id`. */
static int add_token(struct vocab *v, int32_t id, struct gguf_str s, struct err_text *err) {
    static const char key[] = "tokenizer.ggml.tokens";
    char *dst = v->bytes + v->at[id];
    int64_t n = (int64_t)s.n;
    if (s.n == 0)
        return err_set(err, ERR_FORMAT, "%s: token %d: expected a text, found none", key, id);
    if (is_literal(v, id)) {
        memcpy(dst, s.p, s.n);
    } else {
        n = vocab_unmap(dst, s.p, s.n);
        if (n < 0)
            return err_set(err, ERR_FORMAT,
                           "%s: token %d: expected byte-mapped characters, found \"%.*s\"", key, id,
                           (int)MIN(s.n, (uint64_t)64), s.p);
        v->longest = MAX(v->longest, (uint32_t)n);
    }
    if (n > VOCAB_PIECE_BYTES_MAX)
        return err_set(err, ERR_FORMAT, "%s: token %d: expected at most %d bytes, found %lld", key,
                       id, VOCAB_PIECE_BYTES_MAX, (long long)n);
    v->at[id + 1] = v->at[id] + (uint32_t)n;
    uint32_t *slot = find_slot(v, dst, (size_t)n, is_literal(v, id));
    if (*slot)
        return err_set(err, ERR_FORMAT,
                       "%s: token %d: expected a text of its own, found that of token %u", key, id,
                       *slot - 1);
    *slot = (uint32_t)id + 1;
    return OK;
}

/* A literal token spelled in the file exactly as a normal piece is spelled. */
static int check_twins(const struct vocab *v, struct err_text *err) {
    char raw[VOCAB_PIECE_BYTES_MAX];
    for (int32_t id = 0; id < v->n; id++) {
        if (!is_literal(v, id)) continue;
        size_t n;
        const char *p = vocab_bytes(v, id, &n);
        int64_t len = vocab_unmap(raw, p, n);
        int32_t twin = len > 0 ? vocab_piece(v, raw, (size_t)len) : -1;
        if (twin >= 0)
            return err_set(err, ERR_FORMAT,
                           "tokenizer.ggml.tokens: token %d: expected a text of its own, found "
                           "that of token %d",
                           id, twin);
    }
    return OK;
}

int vocab_load(struct vocab *v, const struct gguf *g, struct err_text *err) {
    static const char key[] = "tokenizer.ggml.tokens";
    const struct gguf_kv *kv = NULL;
    *v = (struct vocab){0};
    TRY(array_of(g, key, true, &kv, err));
    if (kv->count == 0 || kv->count > INT32_MAX / 4 || kv->data_bytes > UINT32_MAX)
        return err_set(err, ERR_FORMAT, "%s: expected 1 to %d tokens, found %llu", key,
                       INT32_MAX / 4, (unsigned long long)kv->count);
    const struct gguf_tensor *embd = gguf_tensor_find(g, "token_embd.weight");
    if (embd && embd->ne[1] != kv->count)
        return err_set(err, ERR_FORMAT,
                       "%s: expected %llu tokens (rows of token_embd.weight), found %llu", key,
                       (unsigned long long)embd->ne[1], (unsigned long long)kv->count);
    v->n = (int32_t)kv->count;
    uint32_t room = 16;
    while (room < 2 * (uint32_t)v->n) room *= 2;
    v->mask = room - 1;
    v->bytes = malloc(kv->data_bytes + 1);
    v->at = calloc((size_t)v->n + 1, sizeof *v->at);
    v->type = calloc((size_t)v->n, 1);
    v->slots = calloc(room, sizeof *v->slots);
    int rc = ERR_NOMEM;
    if (!v->bytes || !v->at || !v->type || !v->slots) {
        err_set(err, ERR_NOMEM, "%s: no memory for %d tokens", key, v->n);
        goto fail;
    }
    if ((rc = read_types(v, g, err)) < 0) goto fail;
    struct gguf_cursor cursor = {0};
    for (int32_t id = 0; id < v->n; id++) {
        struct gguf_str s;
        if (!gguf_next_str(kv, &cursor, &s)) {
            rc = err_set(err, ERR_FORMAT, "%s: expected %d tokens, found %d", key, v->n, id);
            goto fail;
        }
        if ((rc = add_token(v, id, s, err)) < 0) goto fail;
    }
    if ((rc = check_twins(v, err)) < 0) goto fail;
    return OK;
fail:
    vocab_deinit(v);
    return rc;
}
