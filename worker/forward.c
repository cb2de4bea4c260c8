/* worker/forward.c: the forward pass of one step, over the kernel table.
 *
 * Owns: nothing; works in the model's scratch.  Called by: step.c.
 * Fails how: ERR_ABORTED when the generation is aborted under it.
 * Limits: batch.n_rows <= max_rows, batch.n_out <= max_outs (step.c checks).
 * Tested by: tests/kernels/test_model.c
 *
 * One function, in the order of the paper: multi-head latent attention in its absorbed form, the
 * sparse indexer, mixture of experts. Shapes use the names at the top of kernels.h. Every rank runs
 * the same rows; heads and widths are its share, and two sums per layer put the shares together.
 * Absorbed attention costs more arithmetic than the expanded form on long prompts, but it reads the
 * cache once for keys and values, and there is one path to be right.
 *
 * The choice between "all positions" and "the selected ones" is made from the longest context of
 * the step. It must not change a bit of a row that has fewer than K positions; kernels.h promises
 * that attending to everything spelled out equals attending to everything.
 */
#include "worker/graphs.h"

static void dump_rows(const struct dump *d, const char *name, int layer, const float *x, int rows,
                      int width) {
    if (d && d->tensor) d->tensor(d->user, name, layer, x, rows, width);
}

static void dump_ids(const struct dump *d, const char *name, int layer, const int32_t *x, int rows,
                     int width) {
    if (d && d->ids) d->ids(d->user, name, layer, x, rows, width);
}

/* clang-format off: operations read better as one sentence than as a column of fields */

/* y = FFN(x), this rank's share: SwiGLU over the dense width, or the chosen experts and the shared
 * one. */
static void feed_forward(const struct model *m, const struct layer *b) {
    const struct kernels *k = m->k;
    const struct scratch *s = &m->s;
    const int T = m->batch.n_rows, F = (int)b->gate.rows;
    const int64_t D = m->hp.dims.d_model, E = m->hp.dims.n_experts;
    const struct kop_matmul in[] = {
        {&b->gate, s->x, s->gate, D, F, T},         /* [T, F] */
        {&b->up, s->x, s->up, D, F, T},             /* [T, F] */
        {&b->router, s->x, s->logits_r, D, E, T},   /* [T, E] */
    };
    k->matmul(m->ctx, in, b->dense ? 2 : 3);
    k->swiglu(m->ctx, &(struct kop_swiglu){T, F, s->gate, s->up, s->gate});
    if (b->dense) {
        k->matmul(m->ctx, &(struct kop_matmul){&b->down, s->gate, s->y, F, D, T}, 1);
        return;
    }
    k->experts_up(m->ctx, &(struct kop_experts_up){
        .batch = &m->batch, .dims = &m->hp.dims, .logits = s->logits_r, .bias = b->router_bias,
        .gate = &b->gate_exps, .up = &b->up_exps, .x = s->x,
        .ids = s->ids, .weights = s->weights, .act = s->act, .scratch = s->op,
        .first = b->first});
    k->experts_down(m->ctx, &(struct kop_experts_down){
        .batch = &m->batch, .dims = &m->hp.dims, .ids = s->ids, .weights = s->weights,
        .down = &b->down_exps, .act = s->act, .shared_down = &b->down, .shared_act = s->gate,
        .y = s->y, .scratch = s->op, .first = b->first});
}

static int operations(struct model *m, struct coll *coll, const struct dump *dump) {
    /* token path 8/9: one pass over all rows of the step, from token ids to sampled tokens. */
    const struct kernels *k = m->k;
    const struct kdims *d = &m->hp.dims;
    const struct scratch *s = &m->s;
    struct kctx *c = m->ctx;
    const struct kbatch *batch = &m->batch;
    const struct kseqs *seqs = &m->seqs;
    const int T = batch->n_rows, S = batch->n_out, H = d->n_heads;
    const int64_t D = d->d_model, Q = d->r_q, N = d->d_nope, P = d->d_rope, R = d->r_kv, V = d->d_v;
    const int64_t I = d->ix_heads, J = d->ix_dim, W = m->output.rows;
    const bool sparse = batch->max_context > d->ix_topk;

    k->feed(c, &(struct kop_feed){batch, seqs});
    k->angles(c, &(struct kop_angles){batch, m->rope_freq, s->angles, (int)P / 2}); /* [T, P/2, 2] */
    k->embed(c, &(struct kop_embed){batch, &m->token_embd, s->h}); /* h: [T, D] */
    dump_rows(dump, "residual", 0, s->h, T, (int)D);

    for (int l = 0; l < m->hp.n_layers; l++) {
        const struct layer *b = &m->layers[l];
        const float *add = l > 0 ? s->y : NULL;

        /* x = RMS(h); latent queries and keys, and the indexer's key and head weights */
        k->norm(c, &(struct kop_norm){T, (int)D, s->h, add, b->attn_norm, d->rms_eps, s->x});
        if (l > 0) dump_rows(dump, "residual", l, s->h, T, (int)D);
        const struct kop_matmul down[] = {
            {&b->q_a, s->x, s->q_a, D, Q, T},     /* [T, Q] */
            {&b->kv_a, s->x, s->kv, D, R + P, T}, /* [T, R+P] */
            {&b->ik, s->x, s->ik, D, J, T},       /* [T, J] */
            {&b->iw, s->x, s->iw, D, I, T},       /* [T, I] */
        };
        k->matmul(c, down, b->has_index ? 4 : 2);
        k->attn_prep(c, &(struct kop_attn_prep){
            .batch = batch, .seqs = seqs, .dims = d, .cache = &b->cache, .angles = s->angles,
            .q_a = s->q_a, .q_norm = b->q_a_norm, .kv = s->kv, .kv_norm = b->kv_a_norm,
            .index_key = b->has_index ? s->ik : NULL, .ik_gain = b->ik_gain, .ik_bias = b->ik_bias});

        /* queries, their no-rope part taken into the latent space: qk = [k_b q_n ; rope q_r] */
        const bool selects = sparse && b->has_index;
        const struct kop_matmul up[] = {
            {&b->q_b, s->q_a, s->q, Q, H * (N + P), T}, /* [T, H, N+P] */
            {&b->iq_b, s->q_a, s->iq, Q, I * J, T},     /* [T, I, J] */
        };
        k->matmul(c, up, selects ? 2 : 1);
        k->head_matmul(c, &(struct kop_head_matmul){
            .w = &b->k_b, .x = s->q, .x_row = H * (N + P), .x_head = N + P,
            .y = s->qk, .y_row = H * (R + P), .y_head = R + P, .n_rows = T}); /* [T, H, R+P] */
        k->rope(c, &(struct kop_rope){batch, d, s->angles, s->q, s->qk, selects ? s->iq : NULL});

        /* which positions to look at: chosen here, or by the last layer below that chose */
        if (selects) {
            k->select(c, &(struct kop_select){
                .batch = batch, .seqs = seqs, .dims = d, .cache = &b->cache, .iq = s->iq, .w = s->iw,
                .selected = s->selected, .n_selected = s->n_selected, .scratch = s->op});
            dump_ids(dump, "n_selected", l, s->n_selected, T, 1);
            dump_ids(dump, "selected", l, s->selected, T, d->ix_topk);
        }
        k->attend(c, &(struct kop_attend){
            .batch = batch, .seqs = seqs, .dims = d, .cache = &b->cache, .qk = s->qk,
            .selected = sparse ? s->selected : NULL, .n_selected = s->n_selected,
            .out = s->ol, .scratch = s->op}); /* [T, H, R] */
        k->head_matmul(c, &(struct kop_head_matmul){
            .w = &b->v_b, .x = s->ol, .x_row = H * R, .x_head = R,
            .y = s->ov, .y_row = H * V, .y_head = V, .n_rows = T}); /* [T, H, V] */
        k->matmul(c, &(struct kop_matmul){&b->o, s->ov, s->y, H * V, D, T}, 1);
        TRY(coll_all_reduce(coll, s->y, T * D));
        dump_rows(dump, "attention", l, s->y, T, (int)D);

        /* h += attention; x = RMS(h); y = FFN(x) */
        k->norm(c, &(struct kop_norm){T, (int)D, s->h, s->y, b->ffn_norm, d->rms_eps, s->x});
        feed_forward(m, b);
        TRY(coll_all_reduce(coll, s->y, T * D));
        dump_rows(dump, "ffn", l, s->y, T, (int)D);
    }

    /* the head, over the sampled rows only */
    k->norm(c, &(struct kop_norm){T, (int)D, s->h, s->y, m->output_norm, d->rms_eps, s->x});
    dump_rows(dump, "residual", m->hp.n_layers, s->h, T, (int)D);
    dump_rows(dump, "final", m->hp.n_layers, s->x, T, (int)D);
    if (S > 0) {
        k->gather(c, &(struct kop_gather){batch, (int)D, s->x, s->out_h});
        k->matmul(c, &(struct kop_matmul){&m->output, s->out_h, s->logits_local, D, W, S}, 1);
        TRY(coll_all_gather(coll, s->logits_local, s->logits, S * W * (int64_t)sizeof *s->logits));
        dump_rows(dump, "logits", m->hp.n_layers, s->logits, m->world * S, (int)W);
        k->sample(c, &(struct kop_sample){
            .batch = batch, .seqs = seqs, .logits = s->logits, /* [world, S, W] */
            .parts = m->world, .part_cols = (int)W, .vocab = (int)m->hp.vocab_used,
            .token = s->token, .logprob = s->logprob,
            .top_token = s->top_token, .top_logprob = s->top_logprob, .scratch = s->op});
    }
    return OK;
}

/* clang-format on */

/* ---- as graphs --------------------------------------------------------------------------- */

static uint64_t graph_key(const struct kbatch *b) {
    return (uint64_t)b->n_rows | (uint64_t)b->n_out << 16 | (uint64_t)b->max_context << 32;
}

bool forward_in_graphs(const struct model *m, const struct coll *coll, const struct dump *dump) {
    return m->k->graph_begin && coll->ops->in_graphs && !dump;
}

int forward(struct model *m, struct coll *coll, const struct dump *dump) {
    const bool graphs = forward_in_graphs(m, coll, dump);
    if (graphs) m->batch.max_context = graphs_tier(m, m->batch.max_context);
    const uint64_t key = graph_key(&m->batch);
    if (graphs && m->k->graph_begin(m->ctx, key)) return OK;
    TRY(operations(m, coll, dump));
    if (graphs) m->k->graph_end(m->ctx, key);
    return OK;
}

static void set_shape(struct model *m, int rows, int outs, int context) {
    m->batch.n_rows = rows;
    m->batch.n_out = outs;
    m->batch.max_context = context;
}

int forward_prepare(struct model *m, struct coll *coll, int rows, int context, bool *kept) {
    set_shape(m, rows, rows, context);
    const uint64_t key = graph_key(&m->batch);
    *kept = m->k->graph_prepare(m->ctx, key);
    if (!*kept) return OK;
    TRY(operations(m, coll, NULL));
    m->k->graph_end(m->ctx, key);
    return OK;
}

int forward_measure(struct model *m, struct coll *coll, int rows, int outs, int context,
                    struct kneeds *out) {
    set_shape(m, rows, outs, context);
    m->k->measure_begin(m->ctx);
    TRY(operations(m, coll, NULL));
    m->k->measure_end(m->ctx, out);
    return OK;
}
