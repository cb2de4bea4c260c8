/* coordinator/tok.c: the tokenizer: vocabulary, splitter, merges and added tokens in one.
 *
 * Owns: those four.  Called by: chat.c, text.c, the API files.  Pure.
 * Fails how: see tok.h.  Limits: O(n log n) in the longest word.
 * Tested by: tests/unit/test_tok.c, tests/conformance/test_tokenizer.py
 *
 * There are two modes because there are two kinds of text. What a person wrote is encoded plain: no
 * spelling of a control token becomes one, so that content cannot forge a turn. Only a prompt that
 * is trusted as a whole is scanned for added tokens, the longest at each place first. Nothing is
 * ever prepended: the marks at the front of a prompt are the chat format's business.
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/bpe.h"
#include "coordinator/split.h"
#include "coordinator/tok.h"
#include "coordinator/vocab.h"

#define EOG_MAX 16

struct tok {
    struct vocab vocab;
    struct bpe bpe;
    struct split *split;
    int32_t *added;          /* ids of added tokens by first byte, longer before shorter */
    int32_t added_from[257]; /* added[added_from[c] .. added_from[c + 1]) begin with byte c */
    int32_t eog[EOG_MAX];
    int n_eog;
};

void tok_ids_deinit(struct tok_ids *a) {
    free(a->ids);
    *a = (struct tok_ids){0};
}

int tok_ids_push(struct tok_ids *a, int32_t id) {
    if (a->n == a->cap) {
        size_t cap = MAX(a->cap * 2, (size_t)64);
        int32_t *p = realloc(a->ids, cap * sizeof *p);
        if (!p) return ERR_NOMEM;
        a->ids = p;
        a->cap = cap;
    }
    a->ids[a->n++] = id;
    return OK;
}

/* ---- opening ---- */

static int by_first_byte(const void *a, const void *b, void *vocab) {
    size_t n, m;
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    const char *p = vocab_bytes(vocab, x, &n), *q = vocab_bytes(vocab, y, &m);
    int c = (unsigned char)p[0], d = (unsigned char)q[0];
    if (c != d) return c - d;
    if (n != m) return n > m ? -1 : 1;
    return x < y ? -1 : 1;
}

static int index_added(struct tok *t) {
    int32_t n = 0;
    for (int32_t id = 0; id < t->vocab.n; id++) n += tok_is_added(t, id);
    t->added = malloc(sizeof *t->added * (size_t)MAX(n, 1));
    if (!t->added) return ERR_NOMEM;
    n = 0;
    for (int32_t id = 0; id < t->vocab.n; id++)
        if (tok_is_added(t, id)) t->added[n++] = id;
    qsort_r(t->added, (size_t)n, sizeof *t->added, by_first_byte, &t->vocab);
    int32_t i = 0;
    for (int c = 0; c < 256; c++) {
        t->added_from[c] = i;
        for (size_t len; i < n; i++)
            if ((unsigned char)*vocab_bytes(&t->vocab, t->added[i], &len) != c) break;
    }
    t->added_from[256] = n;
    return OK;
}

static void add_eog(struct tok *t, int32_t id) {
    if (!tok_is_eog(t, id) && t->n_eog < EOG_MAX) t->eog[t->n_eog++] = id;
}

/* The special ids of the file are checked; the end tokens among them are kept, together with the
 * marks that end a turn of this format whatever the keys say. */
static int read_special_ids(struct tok *t, const struct gguf *g, struct err_text *err) {
    static const struct {
        const char *key;
        bool ends;
    } keys[] = {
        {"tokenizer.ggml.eos_token_id", true},      {"tokenizer.ggml.eot_token_id", true},
        {"tokenizer.ggml.eom_token_id", true},      {"tokenizer.ggml.bos_token_id", false},
        {"tokenizer.ggml.padding_token_id", false}, {"tokenizer.ggml.unknown_token_id", false}};
    static const char *const marks[] = {"<|endoftext|>", "<|user|>", "<|observation|>"};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        uint64_t id;
        int rc = gguf_get_u64(g, keys[i].key, &id, err);
        if (rc == ERR_NOT_FOUND) continue;
        TRY(rc);
        if (id >= (uint64_t)t->vocab.n)
            return err_set(err, ERR_FORMAT, "%s: expected an id below %d, found %llu", keys[i].key,
                           t->vocab.n, (unsigned long long)id);
        if (keys[i].ends) add_eog(t, (int32_t)id);
    }
    for (size_t i = 0; i < ARRAY_LEN(marks); i++) {
        int32_t id = tok_added(t, marks[i]);
        if (id >= 0 && t->vocab.type[id] == VOCAB_CONTROL) add_eog(t, id);
    }
    return OK;
}

static int check_model(const struct gguf *g, struct err_text *err) {
    static const char key[] = "tokenizer.ggml.model";
    struct gguf_str model;
    int rc = gguf_get_str(g, key, &model, err);
    if (rc == ERR_NOT_FOUND)
        return err_set(err, ERR_FORMAT, "%s: expected gpt2 (byte-level BPE), found no such key",
                       key);
    TRY(rc);
    if (model.n != 4 || memcmp(model.p, "gpt2", 4) != 0)
        return err_set(err, ERR_FORMAT, "%s: expected gpt2 (byte-level BPE), found \"%.*s\"", key,
                       (int)MIN(model.n, (uint64_t)64), model.p);
    return OK;
}

int tok_open(struct tok **out, const struct gguf *g, struct err_text *err) {
    TRY(check_model(g, err));
    struct gguf_str pre;
    int rc = gguf_get_str(g, "tokenizer.ggml.pre", &pre, err);
    if (rc == ERR_NOT_FOUND)
        return err_set(err, ERR_FORMAT,
                       "tokenizer.ggml.pre: expected glm4 or chatglm-bpe, found no such key");
    TRY(rc);
    struct tok *t = calloc(1, sizeof *t);
    if (!t) return err_set(err, ERR_NOMEM, "tokenizer: no memory");
    if ((rc = split_new(&t->split, pre, err)) < 0) goto fail;
    if ((rc = vocab_load(&t->vocab, g, err)) < 0) goto fail;
    if ((rc = bpe_load(&t->bpe, &t->vocab, g, err)) < 0) goto fail;
    if ((rc = index_added(t)) < 0) {
        err_set(err, rc, "tokenizer: no memory for the added tokens");
        goto fail;
    }
    if ((rc = read_special_ids(t, g, err)) < 0) goto fail;
    *out = t;
    return OK;
fail:
    tok_close(t);
    return rc;
}

void tok_close(struct tok *t) {
    if (!t) return;
    split_free(t->split);
    bpe_deinit(&t->bpe);
    vocab_deinit(&t->vocab);
    free(t->added);
    free(t);
}

/* ---- encoding ---- */

struct encoder {
    const struct tok *tok;
    struct split_walk *walk;
    struct bpe_work work;
    struct tok_ids *out;
};

static int encode_stretch(struct encoder *e, const char *p, size_t n) {
    for (size_t at = 0, end; at < n; at = end) {
        TRY(split_next(e->walk, p, n, at, &end));
        TRY(bpe_encode(&e->tok->bpe, &e->work, p + at, end - at, e->out));
    }
    return OK;
}

/* Stretches between added tokens are encoded each for itself. */
static int encode_trusted(struct encoder *e, const char *p, size_t n) {
    size_t from = 0;
    for (size_t at = 0; at < n;) {
        size_t len;
        int32_t id = tok_added_at(e->tok, p + at, n - at, &len);
        if (id < 0) {
            at++;
            continue;
        }
        TRY(encode_stretch(e, p + from, at - from));
        TRY(tok_ids_push(e->out, id));
        from = at += len;
    }
    return encode_stretch(e, p + from, n - from);
}

/* token path 3/9: a prompt's text becomes the ids that the scheduler and every worker speak of. */
int tok_encode(const struct tok *t, const char *text, size_t n, enum tok_mode mode,
               struct tok_ids *out) {
    if (!utf8_valid(text, n)) return ERR_FORMAT; /* once; the splitter is told not to look again */
    if (n == 0) return OK;
    struct encoder e = {.tok = t, .walk = split_walk_new(t->split), .out = out};
    if (!e.walk) return ERR_NOMEM;
    int rc = mode == TOK_TRUSTED ? encode_trusted(&e, text, n) : encode_stretch(&e, text, n);
    split_walk_free(e.walk);
    bpe_work_deinit(&e.work);
    return rc;
}

/* ---- questions ---- */

int32_t tok_vocab(const struct tok *t) {
    return t->vocab.n;
}

static bool known(const struct tok *t, int32_t id) {
    return id >= 0 && id < t->vocab.n;
}

int32_t tok_added_at(const struct tok *t, const char *p, size_t n, size_t *len) {
    if (n == 0) return -1;
    int c = (unsigned char)p[0];
    for (int32_t i = t->added_from[c]; i < t->added_from[c + 1]; i++) {
        const char *q = vocab_bytes(&t->vocab, t->added[i], len);
        if (*len <= n && memcmp(p, q, *len) == 0) return t->added[i];
    }
    return -1;
}

int32_t tok_added(const struct tok *t, const char *text) {
    size_t n = strlen(text), len;
    int32_t id = tok_added_at(t, text, n, &len);
    return id >= 0 && len == n ? id : -1;
}

bool tok_is_control(const struct tok *t, int32_t id) {
    return known(t, id) && t->vocab.type[id] != VOCAB_NORMAL &&
           t->vocab.type[id] != VOCAB_USER_DEFINED;
}

bool tok_is_added(const struct tok *t, int32_t id) {
    return known(t, id) &&
           (t->vocab.type[id] == VOCAB_CONTROL || t->vocab.type[id] == VOCAB_USER_DEFINED);
}

bool tok_is_eog(const struct tok *t, int32_t id) {
    for (int i = 0; i < t->n_eog; i++)
        if (t->eog[i] == id) return true;
    return false;
}

const int32_t *tok_eog(const struct tok *t, int *n) {
    *n = t->n_eog;
    return t->eog;
}

const char *tok_bytes(const struct tok *t, int32_t id, size_t *n) {
    if (known(t, id)) return vocab_bytes(&t->vocab, id, n);
    *n = 0;
    return "";
}
