/* coordinator/plan_shape.c: a model's dimensions, and the bytes of weights that each rank holds.
 *
 * Owns: the table of tensors.  Called by: plan.c.
 * Fails how: ERR_FORMAT or ERR_SETUP with a sentence; what cannot be cut becomes a note.
 * Limits: PLAN_NOTES kinds of notes; the worker says the rest.  Tested by: tests/unit/test_plan.c
 *
 * Tensors are known by the end of their names and counted by their shapes in the file, so that a
 * relative of the family is planned as far as its names are the family's.
 */
#include <inttypes.h>
#include <string.h>

#include "coordinator/plan.h"

#define WIDTH_MAX (1 << 20)
#define HEADS_MAX 4096 /* and what a head is wide in places */
#define VOCAB_MAX (1 << 24)

const char *const plan_part_names[PLAN_PARTS] = {
    "embedding", "head",    "attention",     "indexer",
    "dense",     "experts", "shared expert", "norms, router",
};

/* ---- dimensions -------------------------------------------------------------------------- */

struct keys {
    const struct gguf *g;
    const char *arch;
    struct err_text *err;
};

/* A number from min to max; absent is 0 where 0 will do. */
static int number(const struct keys *k, const char *name, int64_t min, int64_t max, int64_t *out) {
    char key[128], found[32] = "no such key";
    uint64_t v = 0;
    snprintf(key, sizeof key, "%s.%s", k->arch, name);
    int rc = gguf_get_u64(k->g, key, &v, k->err);
    if (rc < 0 && rc != ERR_NOT_FOUND) return rc;
    *out = (int64_t)MIN(v, (uint64_t)INT64_MAX);
    if (*out >= min && *out <= max) return OK;
    if (rc == OK) snprintf(found, sizeof found, "%" PRIu64, v);
    return err_set(k->err, ERR_FORMAT,
                   "%s: expected a number from %" PRId64 " to %" PRId64 ", found %s", key, min, max,
                   found);
}

/* Layers with an indexer: as the file says; if it does not, the pattern of its first publication.
 */
static void read_full(struct plan_dims *d, const struct keys *k) {
    char key[128];
    bool all = true;
    snprintf(key, sizeof key, "%s.attention.indexer.types", k->arch);
    const struct gguf_kv *kv = gguf_find(k->g, key);
    if (kv && kv->type == GGUF_BOOL) gguf_get_bool(k->g, key, &all, NULL);
    for (int64_t i = 0; i < d->layers; i++) {
        int64_t full = all;
        if (kv && kv->type == GGUF_ARRAY) gguf_array_i64(kv, (uint64_t)i, &full);
        if (!kv && d->context >= 1 << 20) full = MAX(i - 2, 0) % 4 == 0;
        d->full[i] = d->ix_heads > 0 && full;
        d->full_layers += d->full[i];
    }
}

/* Numbers that only make sense together. */
static int check_dims(const struct plan_dims *d, const struct keys *k, int64_t blocks,
                      int64_t key_length) {
    if (d->mtp >= blocks)
        return err_set(k->err, ERR_FORMAT,
                       "%s.nextn_predict_layers: expected fewer than the %" PRId64
                       " blocks, found %" PRId64,
                       k->arch, blocks, d->mtp);
    if (key_length <= d->d_rope)
        return err_set(k->err, ERR_FORMAT,
                       "%s.attention.key_length_mla: expected more than the %" PRId64
                       " that rotate, found %" PRId64,
                       k->arch, d->d_rope, key_length);
    if (d->used > d->experts)
        return err_set(k->err, ERR_FORMAT,
                       "%s.expert_used_count: expected at most the %" PRId64
                       " experts, found %" PRId64,
                       k->arch, d->experts, d->used);
    return OK;
}

int plan_read_dims(struct plan_dims *d, const struct gguf *g, struct err_text *err) {
    struct gguf_str arch;
    int64_t blocks = 0, key_length = 0;
    *d = (struct plan_dims){0};
    TRY(gguf_get_str(g, "general.architecture", &arch, err) == OK
            ? OK
            : err_set(err, ERR_FORMAT, "general.architecture: expected a string, found none"));
    snprintf(d->arch, sizeof d->arch, "%.*s", (int)MIN(arch.n, sizeof d->arch - 1), arch.p);
    const struct keys k = {g, d->arch, err};
    const struct {
        const char *name;
        int64_t min, max, *out;
    } rows[] = {
        {"block_count", 1, LIMIT_LAYERS, &blocks},
        {"nextn_predict_layers", 0, LIMIT_LAYERS, &d->mtp},
        {"leading_dense_block_count", 0, LIMIT_LAYERS, &d->dense},
        {"context_length", 1, INT32_MAX, &d->context},
        {"embedding_length", 1, WIDTH_MAX, &d->d_model},
        {"attention.head_count", 1, HEADS_MAX, &d->heads},
        {"attention.q_lora_rank", 0, WIDTH_MAX, &d->r_q},
        {"attention.kv_lora_rank", 1, WIDTH_MAX, &d->r_kv},
        {"rope.dimension_count", 1, HEADS_MAX, &d->d_rope},
        {"attention.key_length_mla", 1, WIDTH_MAX, &key_length},
        {"attention.value_length_mla", 1, WIDTH_MAX, &d->d_v},
        {"attention.indexer.head_count", 0, HEADS_MAX, &d->ix_heads},
        {"attention.indexer.key_length", 0, HEADS_MAX, &d->ix_dim},
        {"attention.indexer.top_k", 0, WIDTH_MAX, &d->ix_topk},
        {"expert_count", 0, LIMIT_EXPERTS, &d->experts},
        {"expert_used_count", 0, LIMIT_EXPERTS, &d->used},
    };
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        if (rows[i].out == &d->experts && blocks - d->mtp <= d->dense) break; /* nobody asks */
        TRY(number(&k, rows[i].name, rows[i].min, rows[i].max, rows[i].out));
    }
    TRY(check_dims(d, &k, blocks, key_length));
    const struct gguf_tensor *embd = gguf_tensor_find(g, "token_embd.weight");
    if (!embd || embd->ne[1] > VOCAB_MAX)
        return err_set(err, ERR_FORMAT, "token_embd.weight: expected up to %d rows, found %s",
                       VOCAB_MAX, embd ? "more" : "no such tensor");
    d->layers = blocks - d->mtp;
    d->vocab = (int64_t)embd->ne[1];
    d->d_nope = key_length - d->d_rope;
    d->context = MIN(d->context, LIMIT_CONTEXT_TOKENS);
    read_full(d, &k);
    return OK;
}

/* ---- the table of tensors ---------------------------------------------------------------- */

enum cut { WHOLE, ROWS, COLUMNS, HEADS };

struct rule {
    const char *name; /* after "blk.N.", or the whole of it */
    enum plan_part part;
    enum cut cut;
};

static const struct rule rules[] = {
    {"token_embd.weight", PART_EMBEDDING, WHOLE},
    {"output.weight", PART_HEAD, ROWS},
    {"attn_q.weight", PART_ATTENTION, ROWS},
    {"attn_q_a.weight", PART_ATTENTION, WHOLE},
    {"attn_q_b.weight", PART_ATTENTION, ROWS},
    {"attn_kv_a_mqa.weight", PART_ATTENTION, WHOLE},
    {"attn_kv_b.weight", PART_ATTENTION, ROWS},
    {"attn_k_b.weight", PART_ATTENTION, HEADS},
    {"attn_v_b.weight", PART_ATTENTION, HEADS},
    {"attn_output.weight", PART_ATTENTION, COLUMNS},
    {"indexer.attn_q_b.weight", PART_INDEXER, WHOLE},
    {"indexer.attn_k.weight", PART_INDEXER, WHOLE},
    {"indexer.proj.weight", PART_INDEXER, WHOLE},
    {"ffn_gate.weight", PART_DENSE, ROWS},
    {"ffn_up.weight", PART_DENSE, ROWS},
    {"ffn_down.weight", PART_DENSE, COLUMNS},
    {"ffn_gate_inp.weight", PART_SMALL, WHOLE},
    {"ffn_gate_shexp.weight", PART_SHARED, ROWS},
    {"ffn_up_shexp.weight", PART_SHARED, ROWS},
    {"ffn_down_shexp.weight", PART_SHARED, COLUMNS},
    {"ffn_gate_exps.weight", PART_EXPERTS, ROWS},
    {"ffn_up_exps.weight", PART_EXPERTS, ROWS},
    {"ffn_down_exps.weight", PART_EXPERTS, COLUMNS},
};

static const struct rule vector_rule = {"a vector", PART_SMALL, WHOLE};

/* The block of "blk.N.rest", or -1; *rest: what follows. */
static int64_t block_of(const char *name, const char **rest) {
    int64_t block = 0;
    *rest = name;
    if (strncmp(name, "blk.", 4) != 0) return -1;
    const char *p = name + 4;
    for (; *p >= '0' && *p <= '9' && block < 100000; p++) block = block * 10 + (*p - '0');
    if (*p != '.') return -1;
    *rest = p + 1;
    return block;
}

/* NULL: no rank loads it. */
static const struct rule *rule_of(const struct plan_dims *d, const struct gguf_tensor *t) {
    const char *rest;
    int64_t block = block_of(t->name, &rest);
    if (block >= d->layers) return NULL;
    if (strncmp(rest, "indexer.", 8) == 0 && (block < 0 || !d->full[block])) return NULL;
    for (size_t i = 0; i < ARRAY_LEN(rules); i++)
        if (strcmp(rest, rules[i].name) == 0) return &rules[i];
    bool vector = t->ne[1] * t->ne[2] * t->ne[3] == 1;
    const char *end = strrchr(rest, '.');
    bool known = strstr(rest, "_norm.") || strcmp(rest, "exp_probs_b.bias") == 0 ||
                 (end && strcmp(end, ".scale") == 0);
    return vector && known ? &vector_rule : NULL;
}

static bool is_width(enum plan_part part) {
    return part == PART_DENSE || part == PART_SHARED || part == PART_EXPERTS;
}

/* Columns of down that stay together; rows of gate and up follow them. */
static int64_t grain_of(const struct gguf *g, const struct gguf_tensor *t, const struct rule *r) {
    static const char *const down[PLAN_PARTS] = {[PART_DENSE] = "ffn_down",
                                                 [PART_SHARED] = "ffn_down_shexp",
                                                 [PART_EXPERTS] = "ffn_down_exps"};
    const char *rest;
    char name[LIMIT_GGUF_NAME_BYTES];
    if (is_width(r->part)) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", (int)block_of(t->name, &rest),
                 down[r->part]);
        const struct gguf_tensor *other = gguf_tensor_find(g, name);
        if (other) t = other;
    } else if (r->cut != COLUMNS) {
        return 1;
    }
    return gguf_type_info(t->type)->block_elems;
}

/* ---- shares ------------------------------------------------------------------------------ */

struct share {
    int64_t cols, rows, count;
    bool refused, dealt, uneven;
};

static int64_t run_of(int64_t n, int rank, int ranks) {
    return n * (rank + 1) / ranks - n * rank / ranks;
}

static struct share share_of(const struct plan *p, const struct gguf *g,
                             const struct gguf_tensor *t, const struct rule *r, int rank) {
    const int n = p->ask.ranks;
    struct share s = {
        (int64_t)t->ne[0], (int64_t)t->ne[1], (int64_t)(t->ne[2] * t->ne[3]), false, false, false};
    int64_t *part = r->cut == COLUMNS ? &s.cols : r->cut == ROWS ? &s.rows : &s.count;
    int64_t grain = grain_of(g, t, r);
    if (r->cut == WHOLE) return s;
    if (*part % (grain * n) == 0) {
        *part /= n;
    } else if (!is_width(r->part) || *part % grain) {
        s.refused = true;
        *part = (*part + n - 1) / n;
    } else if (r->part == PART_EXPERTS) {
        s.dealt = true;
        s.count = run_of(s.count, rank, n);
    } else {
        s.uneven = true;
        *part = run_of(*part / grain, rank, n) * grain;
    }
    return s;
}

/* On CUDA most quantised matrices lie in tiles of sixteen rows, and each begins at a multiple of
 * 256 bytes. */
static bool is_tiled(uint32_t type) {
    static const uint8_t ids[] = {2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23};
    return memchr(ids, (int)type, sizeof ids) != NULL;
}

static uint64_t share_bytes(const struct plan *p, const struct gguf_tensor *t, const struct rule *r,
                            const struct share *s) {
    const struct gguf_type_info *type = gguf_type_info(t->type);
    if (r == &vector_rule) return (uint64_t)s->cols * sizeof(float);
    int64_t rows = p->ask.cuda && is_tiled(t->type) ? (s->rows + 15) / 16 * 16 : s->rows;
    uint64_t matrix = (uint64_t)rows * ((uint64_t)s->cols / type->block_elems * type->block_bytes);
    return (uint64_t)s->count * (p->ask.cuda ? plan_align(matrix) : matrix);
}

/* ---- notes ------------------------------------------------------------------------------- */

static struct plan_note *note(struct plan *p, const struct gguf_tensor *t, const char *why,
                              bool refused) {
    const char *rest, *other;
    block_of(t->name, &rest);
    for (int i = 0; i < p->n_notes; i++) {
        block_of(p->notes[i].tensor, &other);
        if (strcmp(rest, other) != 0 || strcmp(why, p->notes[i].why) != 0) continue;
        p->notes[i].tensors++;
        return &p->notes[i];
    }
    if (p->n_notes == PLAN_NOTES) return NULL;
    struct plan_note *n = &p->notes[p->n_notes++];
    *n = (struct plan_note){.tensors = 1, .refused = refused};
    snprintf(n->tensor, sizeof n->tensor, "%s", t->name);
    snprintf(n->why, sizeof n->why, "%s", why);
    return n;
}

/* Types that products are written for: kernels/ knows; here only to say it early. */
static bool is_multiplied(uint32_t type) {
    static const uint8_t ids[] = {0,  1,  2,  3,  6,  7,  8,  10, 11, 12, 13, 14,
                                  16, 17, 18, 19, 20, 21, 22, 23, 29, 30, 39, 40};
    return memchr(ids, (int)type, sizeof ids) != NULL;
}

static void note_share(struct plan *p, const struct gguf *g, const struct gguf_tensor *t,
                       const struct rule *r, const struct share *s) {
    const char *type = gguf_type_info(t->type)->name;
    int64_t whole = (int64_t)(r->cut == COLUMNS ? t->ne[0] : r->cut == ROWS ? t->ne[1] : t->ne[2]);
    char why[160];
    if (!is_multiplied(t->type)) {
        snprintf(why, sizeof why, "there is no product with type %s", type);
        note(p, t, why, true);
    }
    const char *what = r->cut == COLUMNS ? "columns" : r->cut == ROWS ? "rows" : "heads";
    snprintf(why, sizeof why, "%" PRId64 " %s in blocks of %" PRId64 " do not divide by %d ranks%s",
             whole, what, grain_of(g, t, r), p->ask.ranks,
             s->dealt    ? ": experts are dealt out whole"
             : s->uneven ? ": ranks get different widths"
                         : "");
    if (s->refused || s->dealt || s->uneven) note(p, t, why, s->refused);
    p->dealt |= s->dealt;
}

/* ---- counting ---------------------------------------------------------------------------- */

static void count_tensor(struct plan *p, const struct gguf *g, const struct gguf_tensor *t,
                         const struct rule *r, int rank, uint64_t *parts, uint64_t *query) {
    struct share s = share_of(p, g, t, r, rank);
    uint64_t bytes = plan_align(share_bytes(p, t, r, &s));
    const char *rest;
    parts[r->part] += bytes;
    block_of(t->name, &rest);
    if (strcmp(rest, "indexer.attn_q_b.weight") == 0) *query += bytes;
    if (rank == 0) note_share(p, g, t, r, &s);
}

static uint64_t sum_of(const uint64_t *parts) {
    uint64_t sum = 0;
    for (int i = 0; i < PLAN_PARTS; i++) sum += parts[i];
    return sum;
}

void plan_count_weights(struct plan *p, const struct gguf *g) {
    const struct gguf_tensor *head = gguf_tensor_find(g, "output.weight");
    for (int rank = 0; rank < p->ask.ranks; rank++) {
        uint64_t parts[PLAN_PARTS] = {0}, query = 0;
        for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
            const struct gguf_tensor *t = gguf_tensor_at(g, i);
            const struct rule *r = rule_of(&p->dims, t);
            if (r) count_tensor(p, g, t, r, rank, parts, &query);
            if (r || rank > 0) continue;
            p->unread_bytes += t->bytes;
            p->unread_tensors++;
        }
        if (!head) /* tied: the embedding's rows once more */
            count_tensor(p, g, gguf_tensor_find(g, "token_embd.weight"), &rules[1], rank, parts,
                         &query);
        if (sum_of(parts) <= p->weight_bytes) continue;
        memcpy(p->part_bytes, parts, sizeof parts);
        p->weight_bytes = sum_of(parts);
        p->index_query_bytes = query;
    }
}

void plan_widths(const struct plan *p, const struct gguf *g, int64_t *wide, int64_t *expert) {
    *wide = *expert = 0;
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        const struct rule *r = rule_of(&p->dims, t);
        if (!r || r->cut != ROWS || !is_width(r->part)) continue;
        int64_t *most = r->part == PART_EXPERTS ? expert : wide;
        for (int rank = 0; rank < p->ask.ranks; rank++)
            *most = MAX(*most, share_of(p, g, t, r, rank).rows);
    }
}
