/* kernels/cpu/rows.c: the operations that work on one row at a time, without weights.
 *
 * Owns: nothing.  Called by: the table.  Fails how: cannot.  Limits: none.
 * Tested by: tests/kernels/test_ops.c
 *
 * Formulas are kernels.h's. Padding rows (slot < 0) are computed on whatever stands there, except
 * where a token or a table would be looked up for them.
 */
#include <assert.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/dot.h"

void cpu_feed(struct kctx *c, const struct kop_feed *o) {
    (void)c;
    const struct kseqs *q = o->seqs;
    for (int t = 0; t < o->batch->n_rows; t++) {
        int32_t slot = o->batch->slot[t];
        if (slot < 0) continue;
        assert(slot < q->max_slots);
        int32_t *token = &o->batch->token[t];
        if (*token == K_TOKEN_LAST) *token = q->last_token[slot];
        /* A row without a finite logit sampled -1; its sequence is failed, its step must not be. */
        if (*token < 0 || *token >= q->vocab) *token = 0;
        int64_t at = (int64_t)slot * q->vocab + *token;
        if (o->batch->pos[t] < q->sampling[slot].n_prompt)
            q->seen_prompt[at] = 1;
        else if (q->seen_output[at] < UINT16_MAX)
            q->seen_output[at]++;
    }
}

void cpu_angles(struct kctx *c, const struct kop_angles *o) {
    (void)c;
    for (int t = 0; t < o->batch->n_rows; t++) {
        bool padding = o->batch->slot[t] < 0;
        float *a = o->angles + (int64_t)t * o->n_pairs * 2;
        for (int i = 0; i < o->n_pairs; i++) {
            double angle = padding ? 0 : (double)o->batch->pos[t] * o->freq[i];
            a[2 * i] = (float)cos(angle);
            a[2 * i + 1] = (float)sin(angle);
        }
    }
}

void cpu_embed(struct kctx *c, const struct kop_embed *o) {
    int64_t width = o->table->cols;
    for (int t = 0; t < o->batch->n_rows; t++) {
        float *h = o->h + t * width;
        if (o->batch->slot[t] < 0) {
            memset(h, 0, (size_t)width * sizeof *h);
            continue;
        }
        c->isa->decode[o->table->type](cpu_mat_row(o->table, 0, o->batch->token[t]), h, width);
        if (o->table->scales) c->isa->scale(h, h, o->table->scale[0], width);
    }
}

void cpu_norm(struct kctx *c, const struct kop_norm *o) {
    for (int t = 0; t < o->n_rows; t++) {
        float *h = o->h + (int64_t)t * o->width;
        if (o->add) c->isa->add_scaled(h, o->add + (int64_t)t * o->width, 1.0f, o->width);
        float mean = c->isa->dot(h, h, o->width) / (float)o->width;
        c->isa->gain(o->y + (int64_t)t * o->width, h, 1.0f / sqrtf(mean + o->eps), o->gain,
                     o->width);
    }
}

void cpu_swiglu(struct kctx *c, const struct kop_swiglu *o) {
    c->isa->swiglu(o->act, o->gate, o->up, (int64_t)o->n_rows * o->width);
}

void cpu_gather(struct kctx *c, const struct kop_gather *o) {
    (void)c;
    for (int s = 0; s < o->batch->n_out; s++) {
        float *y = o->y + (int64_t)s * o->width;
        int32_t row = o->batch->out_row[s];
        assert(row < o->batch->n_rows);
        if (row < 0)
            memset(y, 0, (size_t)o->width * sizeof *y);
        else
            memcpy(y, o->x + (int64_t)row * o->width, (size_t)o->width * sizeof *y);
    }
}
