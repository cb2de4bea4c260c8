/* worker/tensors.c: the table of tensors, and the walk over it.
 *
 * Owns: the table.  Called by: hparams.c, load.c.
 * Fails how: ERR_FORMAT with tensor, expected, found; the first problem ends the walk.
 * Limits: none of its own.  Tested by: tests/unit/test_worker.c
 *
 * Checking, counting, pointing and loading all walk the same table, so a tensor cannot be loaded
 * that was not checked, nor counted that is not loaded. Shapes are in the file's order: columns
 * (contiguous), rows, matrices.
 */
#include <string.h>

#include "worker/tensors.h"

enum dim {
    ONE,
    D_MODEL,
    D_Q,
    D_KV_A,
    D_LATENT,
    D_NOPE,
    D_VALUE,
    D_HEADS,
    D_Q_B,
    D_HEAD_VALUES,
    D_IQ,
    D_INDEX,
    D_INDEX_HEADS,
    D_DENSE,
    D_EXPERTS,
    D_EXPERT,
    D_SHARED,
    D_VOCAB,
};

enum when { ALWAYS, FULL_INDEX, DENSE, MOE };

struct row {
    const char *name; /* after "blk.N." in the blocks' table */
    enum when when;
    bool vector, optional;
    enum dim cols, rows, count;
    enum cut cut;
    enum plan_group group;
    size_t offset;
};

#define AT(member)     offsetof(struct layer, member)
#define VEC(d)         true, false, d, ONE, ONE, CUT_NONE, PLAN_SMALL
#define MAT(c, r)      false, false, c, r, ONE
#define STACK(c, r, n) false, false, c, r, n

static const struct row block_rows[] = {
    {"attn_norm.weight", ALWAYS, VEC(D_MODEL), AT(attn_norm)},
    {"attn_q_a.weight", ALWAYS, MAT(D_MODEL, D_Q), CUT_NONE, PLAN_ATTENTION, AT(q_a)},
    {"attn_q_a_norm.weight", ALWAYS, VEC(D_Q), AT(q_a_norm)},
    {"attn_q_b.weight", ALWAYS, MAT(D_Q, D_Q_B), CUT_ROWS, PLAN_ATTENTION, AT(q_b)},
    {"attn_kv_a_mqa.weight", ALWAYS, MAT(D_MODEL, D_KV_A), CUT_NONE, PLAN_ATTENTION, AT(kv_a)},
    {"attn_kv_a_norm.weight", ALWAYS, VEC(D_LATENT), AT(kv_a_norm)},
    {"attn_k_b.weight", ALWAYS, STACK(D_NOPE, D_LATENT, D_HEADS), CUT_STACK, PLAN_ATTENTION,
     AT(k_b)},
    {"attn_v_b.weight", ALWAYS, STACK(D_LATENT, D_VALUE, D_HEADS), CUT_STACK, PLAN_ATTENTION,
     AT(v_b)},
    {"attn_output.weight", ALWAYS, MAT(D_HEAD_VALUES, D_MODEL), CUT_COLS, PLAN_ATTENTION, AT(o)},
    {"indexer.attn_q_b.weight", FULL_INDEX, MAT(D_Q, D_IQ), CUT_NONE, PLAN_INDEXER, AT(iq_b)},
    {"indexer.attn_k.weight", FULL_INDEX, MAT(D_MODEL, D_INDEX), CUT_NONE, PLAN_INDEXER, AT(ik)},
    {"indexer.proj.weight", FULL_INDEX, MAT(D_MODEL, D_INDEX_HEADS), CUT_NONE, PLAN_INDEXER,
     AT(iw)},
    {"indexer.k_norm.weight", FULL_INDEX, VEC(D_INDEX), AT(ik_gain)},
    {"indexer.k_norm.bias", FULL_INDEX, VEC(D_INDEX), AT(ik_bias)},
    {"ffn_norm.weight", ALWAYS, VEC(D_MODEL), AT(ffn_norm)},
    {"ffn_gate.weight", DENSE, MAT(D_MODEL, D_DENSE), CUT_ROWS, PLAN_DENSE, AT(gate)},
    {"ffn_up.weight", DENSE, MAT(D_MODEL, D_DENSE), CUT_ROWS, PLAN_DENSE, AT(up)},
    {"ffn_down.weight", DENSE, MAT(D_DENSE, D_MODEL), CUT_COLS, PLAN_DENSE, AT(down)},
    {"ffn_gate_inp.weight", MOE, MAT(D_MODEL, D_EXPERTS), CUT_NONE, PLAN_SMALL, AT(router)},
    {"exp_probs_b.bias", MOE, true, true, D_EXPERTS, ONE, ONE, CUT_NONE, PLAN_SMALL,
     AT(router_bias)},
    {"ffn_gate_shexp.weight", MOE, MAT(D_MODEL, D_SHARED), CUT_ROWS, PLAN_SHARED, AT(gate)},
    {"ffn_up_shexp.weight", MOE, MAT(D_MODEL, D_SHARED), CUT_ROWS, PLAN_SHARED, AT(up)},
    {"ffn_down_shexp.weight", MOE, MAT(D_SHARED, D_MODEL), CUT_COLS, PLAN_SHARED, AT(down)},
    {"ffn_gate_exps.weight", MOE, STACK(D_MODEL, D_EXPERT, D_EXPERTS), CUT_ROWS, PLAN_EXPERTS,
     AT(gate_exps)},
    {"ffn_up_exps.weight", MOE, STACK(D_MODEL, D_EXPERT, D_EXPERTS), CUT_ROWS, PLAN_EXPERTS,
     AT(up_exps)},
    {"ffn_down_exps.weight", MOE, STACK(D_EXPERT, D_MODEL, D_EXPERTS), CUT_COLS, PLAN_EXPERTS,
     AT(down_exps)},
};

static const struct row embd_row = {"token_embd.weight",   ALWAYS,
                                    MAT(D_MODEL, D_VOCAB), CUT_NONE,
                                    PLAN_EMBEDDING,        offsetof(struct model, token_embd)};
static const struct row norm_row = {"output_norm.weight", ALWAYS, VEC(D_MODEL),
                                    offsetof(struct model, output_norm)};
static const struct row head_row = {"output.weight", ALWAYS,    MAT(D_MODEL, D_VOCAB),
                                    CUT_ROWS,        PLAN_HEAD, offsetof(struct model, output)};
/* The head of a file with tied embeddings. */
static const struct row tied_row = {
    "token_embd.weight",           ALWAYS, MAT(D_MODEL, D_VOCAB), CUT_ROWS, PLAN_HEAD,
    offsetof(struct model, output)};

static int64_t dim_of(const struct hparams *hp, enum dim d) {
    const struct kdims *k = &hp->dims;
    switch (d) {
    case ONE:
        return 1;
    case D_MODEL:
        return k->d_model;
    case D_Q:
        return k->r_q;
    case D_KV_A:
        return k->r_kv + k->d_rope;
    case D_LATENT:
        return k->r_kv;
    case D_NOPE:
        return k->d_nope;
    case D_VALUE:
        return k->d_v;
    case D_HEADS:
        return hp->n_heads;
    case D_Q_B:
        return (int64_t)hp->n_heads * (k->d_nope + k->d_rope);
    case D_HEAD_VALUES:
        return (int64_t)hp->n_heads * k->d_v;
    case D_IQ:
        return (int64_t)k->ix_heads * k->ix_dim;
    case D_INDEX:
        return k->ix_dim;
    case D_INDEX_HEADS:
        return k->ix_heads;
    case D_DENSE:
        return hp->f_dense;
    case D_EXPERTS:
        return k->n_experts;
    case D_EXPERT:
        return hp->f_expert;
    case D_SHARED:
        return hp->f_shared;
    case D_VOCAB:
        return hp->vocab;
    }
    assert(!"no such dimension");
    return 0;
}

static bool is_wanted(const struct hparams *hp, int block, enum when when) {
    switch (when) {
    case ALWAYS:
        return true;
    case FULL_INDEX:
        return hp->index_full[block];
    case DENSE:
        return block < hp->n_dense;
    case MOE:
        return block >= hp->n_dense;
    }
    return false;
}

static const char *type_name(uint32_t type) {
    const struct gguf_type_info *info = gguf_type_info(type);
    return info ? info->name : "?";
}

static int check_shape(const struct tensor_need *n, struct err_text *err) {
    const struct gguf_tensor *t = n->tensor;
    const int64_t want[4] = {n->cols, n->rows, n->count, 1};
    for (int i = 0; i < 4; i++)
        if (t->ne[i] != (uint64_t)want[i])
            return err_set(err, ERR_FORMAT,
                           "%s: expected shape [%lld, %lld, %lld], found [%llu, %llu, %llu]",
                           t->name, (long long)want[0], (long long)want[1], (long long)want[2],
                           (unsigned long long)t->ne[0], (unsigned long long)t->ne[1],
                           (unsigned long long)(t->ne[2] * t->ne[3]));
    return OK;
}

static int check_type(const struct tensor_need *n, struct err_text *err) {
    const struct gguf_tensor *t = n->tensor;
    bool plain = t->type == KT_F32 || t->type == KT_F16 || t->type == KT_BF16;
    if (n->vector && !plain)
        return err_set(err, ERR_FORMAT, "%s: expected type F32, F16 or BF16, found %s", t->name,
                       type_name(t->type));
    if (!ktype_supported((int)t->type))
        return err_set(err, ERR_FORMAT, "%s: expected a type this build decodes, found %s", t->name,
                       type_name(t->type));
    return OK;
}

/* What the rows of gate and up are columns of. */
static const char *down_name(enum plan_group group) {
    switch (group) {
    case PLAN_DENSE:
        return "ffn_down.weight";
    case PLAN_SHARED:
        return "ffn_down_shexp.weight";
    case PLAN_EXPERTS:
        return "ffn_down_exps.weight";
    default:
        return NULL;
    }
}

/* Cuts by columns fall between quantised blocks, and rows that meet such columns follow them. */
static int64_t grain_of(const struct tensor_need *n, const struct gguf *g) {
    const char *down = down_name(n->group);
    const struct gguf_tensor *t = n->tensor;
    char name[LIMIT_GGUF_NAME_BYTES];
    if (n->cut != CUT_COLS && (n->cut != CUT_ROWS || !down)) return 1;
    if (down) {
        snprintf(name, sizeof name, "blk.%d.%s", n->block, down);
        t = gguf_tensor_find(g, name);
    }
    int elems = t ? ktype_block_elems((int)t->type) : 0;
    return MAX(elems, 1);
}

/* NVFP4 weights may have numbers beside them that the products are to be multiplied by: one, or one
 * for each matrix of a stack. Visited right after the matrix; NULL: there are none. */
static const struct gguf_tensor *scale_of(const struct gguf *g, const struct gguf_tensor *t) {
    char name[LIMIT_GGUF_NAME_BYTES];
    const char *end = strstr(t->name, ".weight");
    if (t->type != KT_NVFP4 || !end) return NULL;
    snprintf(name, sizeof name, "%.*s.scale", (int)(end - t->name), t->name);
    return gguf_tensor_find(g, name);
}

static int visit_scale(const struct tensor_need *of, const struct gguf *g,
                       int (*visit)(void *, const struct tensor_need *, struct err_text *),
                       void *user, struct err_text *err) {
    struct tensor_need n = {.tensor = scale_of(g, of->tensor),
                            .block = of->block,
                            .cut = CUT_NONE,
                            .group = PLAN_SMALL,
                            .vector = true,
                            .scale = true,
                            .rows = 1,
                            .count = 1,
                            .grain = 1,
                            .offset = of->offset};
    if (!n.tensor) return OK;
    n.cols = n.tensor->ne[0] == 1 ? 1 : of->count;
    TRY(check_shape(&n, err));
    TRY(check_type(&n, err));
    return visit(user, &n, err);
}

static int visit_row(const struct hparams *hp, const struct gguf *g, const struct row *row,
                     int block, int (*visit)(void *, const struct tensor_need *, struct err_text *),
                     void *user, struct err_text *err) {
    char name[LIMIT_GGUF_NAME_BYTES];
    if (block < 0)
        snprintf(name, sizeof name, "%s", row->name);
    else
        snprintf(name, sizeof name, "blk.%d.%s", block, row->name);
    struct tensor_need n = {
        .tensor = gguf_tensor_find(g, name),
        .block = block,
        .cut = row->cut,
        .group = row->group,
        .vector = row->vector,
        .cols = dim_of(hp, row->cols),
        .rows = dim_of(hp, row->rows),
        .count = dim_of(hp, row->count),
        .offset = row->offset,
    };
    if (!n.tensor && row->optional) return OK;
    if (!n.tensor)
        return err_set(err, ERR_FORMAT, "%s: expected a tensor [%lld, %lld, %lld], found none",
                       name, (long long)n.cols, (long long)n.rows, (long long)n.count);
    TRY(check_shape(&n, err));
    TRY(check_type(&n, err));
    n.grain = grain_of(&n, g);
    TRY(visit(user, &n, err));
    return visit_scale(&n, g, visit, user, err);
}

int tensors_each(const struct hparams *hp, const struct gguf *g,
                 int (*visit)(void *, const struct tensor_need *, struct err_text *), void *user,
                 struct err_text *err) {
    const struct row *head = gguf_tensor_find(g, head_row.name) ? &head_row : &tied_row;
    TRY(visit_row(hp, g, &embd_row, -1, visit, user, err));
    for (int block = 0; block < hp->n_layers; block++)
        for (size_t i = 0; i < ARRAY_LEN(block_rows); i++)
            if (is_wanted(hp, block, block_rows[i].when))
                TRY(visit_row(hp, g, &block_rows[i], block, visit, user, err));
    TRY(visit_row(hp, g, &norm_row, -1, visit, user, err));
    return visit_row(hp, g, head, -1, visit, user, err);
}
