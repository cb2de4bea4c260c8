/* coordinator/bpe.c: merges by rank, from a hash table and a heap.
 *
 * Owns, called by, fails how, limits, tested by: see bpe.h.
 *
 * The definition is: while any two neighbours have a merge, apply the one of lowest rank, leftmost
 * first. Searching all neighbours each time is quadratic, and a word may be a whole prompt (200,000
 * letters without a space), so candidates wait in a heap ordered by (rank, position). An entry is
 * not removed when a neighbour changes; it is checked when it comes up: a rank names its pair, so
 * the entry holds exactly if the symbols now there are that pair.
 *
 * A word that is itself a piece is that piece (the reference sets ignore_merges): the common case,
 * one look-up and no merging.
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/bpe.h"

struct bpe_symbol {
    int32_t id;          /* -1: merged into the one before */
    uint32_t prev, next; /* indices; NONE at the ends */
};

#define NONE UINT32_MAX

static uint32_t *find_slot(const struct bpe *b, int32_t left, int32_t right) {
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15ull;
    for (uint64_t i = h >> 32;; i++) {
        uint32_t *slot = &b->slots[i & b->mask];
        if (*slot == 0) return slot;
        const struct bpe_merge *m = &b->merges[*slot - 1];
        if (m->left == left && m->right == right) return slot;
    }
}

/* ---- loading ---- */

static int bad_merge(struct err_text *err, uint32_t rank, struct gguf_str s, const char *expected) {
    return err_set(err, ERR_FORMAT, "tokenizer.ggml.merges: merge %u: expected %s, found \"%.*s\"",
                   rank, expected, (int)MIN(s.n, (uint64_t)64), s.p);
}

/* "left right": one space, found from index 1 on; both sides and their joint are pieces. */
static int add_merge(struct bpe *b, uint32_t rank, struct gguf_str s, struct err_text *err) {
    const char *gap = s.n > 1 ? memchr(s.p + 1, ' ', s.n - 1) : NULL;
    uint64_t n_left = gap ? (uint64_t)(gap - s.p) : 0;
    uint64_t n_right = gap ? s.n - n_left - 1 : 0;
    if (!gap || n_right == 0 || memchr(gap + 1, ' ', n_right) || s.p[0] == ' ')
        return bad_merge(err, rank, s, "two pieces with one space between");
    char raw[2 * VOCAB_PIECE_BYTES_MAX];
    if (s.n > sizeof raw) return bad_merge(err, rank, s, "pieces of the vocabulary");
    int64_t l = vocab_unmap(raw, s.p, n_left);
    int64_t r = l < 0 ? -1 : vocab_unmap(raw + l, gap + 1, n_right);
    if (r < 0) return bad_merge(err, rank, s, "byte-mapped characters");
    struct bpe_merge m = {vocab_piece(b->vocab, raw, (size_t)l),
                          vocab_piece(b->vocab, raw + l, (size_t)r),
                          vocab_piece(b->vocab, raw, (size_t)(l + r))};
    if (m.left < 0 || m.right < 0) return bad_merge(err, rank, s, "two pieces of the vocabulary");
    if (m.result < 0) return bad_merge(err, rank, s, "a joint that is in the vocabulary");
    b->merges[rank] = m;
    uint32_t *slot = find_slot(b, m.left, m.right);
    if (*slot == 0) *slot = rank + 1; /* a pair given twice keeps its lower rank */
    return OK;
}

static int load_merges(struct bpe *b, const struct gguf *g, struct err_text *err) {
    static const char key[] = "tokenizer.ggml.merges";
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv || kv->type != GGUF_ARRAY || kv->elem_type != GGUF_STRING)
        return err_set(err, ERR_FORMAT, "%s: expected an array of strings, found %s", key,
                       kv ? "another type" : "no such key");
    if (kv->count > INT32_MAX / 4)
        return err_set(err, ERR_FORMAT, "%s: expected at most %d merges, found %llu", key,
                       INT32_MAX / 4, (unsigned long long)kv->count);
    b->n_merges = (uint32_t)kv->count;
    uint32_t room = 16;
    while (room < 2 * b->n_merges) room *= 2;
    b->mask = room - 1;
    b->merges = calloc(MAX(b->n_merges, 1u), sizeof *b->merges);
    b->slots = calloc(room, sizeof *b->slots);
    if (!b->merges || !b->slots)
        return err_set(err, ERR_NOMEM, "%s: no memory for %u merges", key, b->n_merges);
    struct gguf_cursor cursor = {0};
    for (uint32_t rank = 0; rank < b->n_merges; rank++) {
        struct gguf_str s;
        if (!gguf_next_str(kv, &cursor, &s))
            return err_set(err, ERR_FORMAT, "%s: expected %u merges, found %u", key, b->n_merges,
                           rank);
        TRY(add_merge(b, rank, s, err));
    }
    return OK;
}

int bpe_load(struct bpe *b, const struct vocab *v, const struct gguf *g, struct err_text *err) {
    *b = (struct bpe){.vocab = v};
    for (int c = 0; c < 256; c++) {
        char byte = (char)c;
        b->byte_id[c] = vocab_piece(v, &byte, 1);
        if (b->byte_id[c] < 0)
            return err_set(err, ERR_FORMAT,
                           "tokenizer.ggml.tokens: expected a piece for every byte, found none "
                           "for byte 0x%02X",
                           c);
    }
    int rc = load_merges(b, g, err);
    if (rc < 0) bpe_deinit(b);
    return rc;
}

void bpe_deinit(struct bpe *b) {
    free(b->merges);
    free(b->slots);
    *b = (struct bpe){0};
}

/* ---- encoding ---- */

static int heap_push(struct bpe_work *w, uint64_t entry) {
    if (w->heap_n == w->heap_cap) {
        size_t cap = MAX(w->heap_cap * 2, (size_t)256);
        uint64_t *p = realloc(w->heap, cap * sizeof *p);
        if (!p) return ERR_NOMEM;
        w->heap = p;
        w->heap_cap = cap;
    }
    size_t i = w->heap_n++;
    for (; i > 0 && w->heap[(i - 1) / 2] > entry; i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = entry;
    return OK;
}

static uint64_t heap_pop(struct bpe_work *w) {
    uint64_t top = w->heap[0], last = w->heap[--w->heap_n];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < w->heap_n; i = child) {
        if (child + 1 < w->heap_n && w->heap[child + 1] < w->heap[child]) child++;
        if (w->heap[child] >= last) break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = last;
    return top;
}

/* Offers the pair that begins at symbol `at`, if there is a merge for it. */
static int offer(const struct bpe *b, struct bpe_work *w, uint32_t at) {
    if (at == NONE || w->symbols[at].next == NONE) return OK;
    uint32_t rank = *find_slot(b, w->symbols[at].id, w->symbols[w->symbols[at].next].id);
    return rank ? heap_push(w, (uint64_t)(rank - 1) << 32 | at) : OK;
}

static int start_symbols(const struct bpe *b, struct bpe_work *w, const char *p, uint32_t n) {
    if (n > w->symbols_cap) {
        size_t cap = MAX((size_t)n, w->symbols_cap * 2);
        struct bpe_symbol *s = realloc(w->symbols, cap * sizeof *s);
        if (!s) return ERR_NOMEM;
        w->symbols = s;
        w->symbols_cap = cap;
    }
    for (uint32_t i = 0; i < n; i++)
        w->symbols[i] = (struct bpe_symbol){.id = b->byte_id[(unsigned char)p[i]],
                                            .prev = i ? i - 1 : NONE,
                                            .next = i + 1 < n ? i + 1 : NONE};
    w->heap_n = 0;
    for (uint32_t i = 0; i + 1 < n; i++) TRY(offer(b, w, i));
    return OK;
}

static int merge_all(const struct bpe *b, struct bpe_work *w) {
    while (w->heap_n > 0) {
        uint64_t entry = heap_pop(w);
        const struct bpe_merge *m = &b->merges[entry >> 32];
        uint32_t at = (uint32_t)entry;
        struct bpe_symbol *left = &w->symbols[at];
        if (left->id != m->left || left->next == NONE) continue;
        struct bpe_symbol *right = &w->symbols[left->next];
        if (right->id != m->right) continue;
        left->id = m->result;
        left->next = right->next;
        if (left->next != NONE) w->symbols[left->next].prev = at;
        right->id = -1;
        TRY(offer(b, w, left->prev));
        TRY(offer(b, w, at));
    }
    return OK;
}

int bpe_encode(const struct bpe *b, struct bpe_work *w, const char *p, size_t n,
               struct tok_ids *out) {
    if (n == 0) return OK;
    if (n >= NONE) return ERR_LIMIT;
    int32_t whole = vocab_piece(b->vocab, p, n);
    if (whole >= 0) return tok_ids_push(out, whole);
    TRY(start_symbols(b, w, p, (uint32_t)n));
    TRY(merge_all(b, w));
    for (uint32_t i = 0; i != NONE; i = w->symbols[i].next)
        TRY(tok_ids_push(out, w->symbols[i].id));
    return OK;
}

void bpe_work_deinit(struct bpe_work *w) {
    free(w->symbols);
    free(w->heap);
    *w = (struct bpe_work){0};
}
