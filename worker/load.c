/* worker/load.c: the memory of one rank: count, print, allocate once, point; weights.c fills it.
 *
 * Owns: the model's three arenas (weights, scratch, caches) and its layer table.
 * Called by: main.c, tests.
 * Fails how: ERR_FORMAT, ERR_SETUP or ERR_NOMEM with a sentence; the caller then calls
 * model_unload, which takes a half-made model too.  Limits: LIMIT_STEP_*, LIMIT_SLOTS.
 * Tested by: tests/unit/test_load.c, tests/unit/test_worker.c, tests/kernels/test_model.c
 *
 * The same layout function counts scratch (no base) and points into it (base given), so that the
 * two cannot disagree; the weights' plan is made once, printed, allocated, and then filled. What
 * the steps ask of the device beside that, workspace and graphs, is measured on a model whose
 * pointers lead nowhere, before the plan is printed.
 */
#include <stdlib.h>
#include <string.h>

#include "proto/log.h"
#include "worker/cut.h"
#include "worker/graphs.h"
#include "worker/shard.h"

struct loader {
    struct model *m;
    struct plan plan;
};

static const char *const group_names[PLAN_GROUPS] = {
    "embedding", "head",    "attention",     "indexer",
    "dense",     "experts", "shared expert", "norms, router",
};

static uint64_t align_up(uint64_t n) {
    return (n + ARENA_ALIGN - 1) & ~(uint64_t)(ARENA_ALIGN - 1);
}

int model_open(struct model *m, int device, struct err_text *err) {
    char why[256] = "";
    m->k = kernels_table();
    m->ctx = m->k->open(device, why, sizeof why);
    if (!m->ctx)
        return err_set(err, ERR_SETUP, "device %d: expected a usable %s device, found: %s", device,
                       m->k->name, why);
    return OK;
}

/* ---- the plan ---------------------------------------------------------------------------- */

/* The share of a number that every rank must get the same of. */
static int share(int64_t whole, int world, const char *tensor, const char *what, int64_t *out,
                 struct err_text *err) {
    if (whole % world)
        return err_set(err, ERR_SETUP, "%s: expected %s to divide by %d ranks, found %lld", tensor,
                       what, world, (long long)whole);
    *out = whole / world;
    return OK;
}

static int check_backend(const struct kernels *k, const struct tensor_need *n,
                         struct err_text *err) {
    int type = (int)n->tensor->type;
    if (n->vector || k->takes_type(type)) return OK;
    return err_set(err, ERR_SETUP, "%s: expected a type that the %s backend multiplies, found %s",
                   n->tensor->name, k->name, ktype_name(type));
}

/* The rows of gate and up are the widths that scratch is for: of the widest layer. */
static void widen(struct model *m, const struct tensor_need *n, int64_t rows) {
    if (n->cut != CUT_ROWS) return;
    if (n->group == PLAN_EXPERTS) m->f_expert = MAX(m->f_expert, rows);
    if (n->group == PLAN_DENSE || n->group == PLAN_SHARED) m->f_wide = MAX(m->f_wide, rows);
}

/* Number in the whole stack of the first matrix of a share. */
static int64_t first_matrix(const struct plan_item *it) {
    return it->need.cut == CUT_STACK ? it->first : 0;
}

static int plan_visit(void *user, const struct tensor_need *n, struct err_text *err) {
    struct loader *l = user;
    struct model *m = l->m;
    struct plan *p = &l->plan;
    if (p->n_items == p->cap_items) {
        int cap = MAX(256, p->cap_items * 2);
        struct plan_item *grown = realloc(p->items, (size_t)cap * sizeof *grown);
        if (!grown)
            return err_set(err, ERR_NOMEM, "plan: expected memory for %d tensors, found none", cap);
        p->items = grown;
        p->cap_items = cap;
    }
    struct plan_item *it = &p->items[p->n_items];
    *it = (struct plan_item){.need = *n};
    TRY(check_backend(m->k, n, err));
    TRY(cut_share(it, m->rank, m->world, m->k->takes_uneven, err));
    if (n->scale && n->cols > 1) it->first = first_matrix(&p->items[p->n_items - 1]);
    widen(m, n, it->rows);
    int type = (int)n->tensor->type;
    it->bytes = n->vector ? (uint64_t)it->cols * sizeof(float)
                          : m->k->mat_bytes(type, it->count, it->rows, it->cols);
    it->offset = m->weight_bytes;
    m->weight_bytes += align_up(it->bytes);
    m->group_bytes[n->group] += align_up(it->bytes);
    m->group_tensors[n->group]++;
    p->n_items++;
    return OK;
}

/* ---- scratch ----------------------------------------------------------------------------- */

struct taker {
    char *base; /* NULL: only count */
    uint64_t bytes;
};

static void *take(struct taker *t, int64_t elements, size_t element_bytes) {
    void *p = t->base ? t->base + t->bytes : NULL;
    t->bytes += align_up((uint64_t)elements * element_bytes);
    return p;
}

#define TAKE(field, elements) ((field) = take(t, (elements), sizeof *(field)))

/* Everything the steps work on, in the shapes of struct scratch, kbatch and kseqs. */
static void layout_scratch(struct model *m, struct taker *t) {
    const struct hparams *hp = &m->hp;
    const struct kdims *d = &hp->dims;
    struct scratch *s = &m->s;
    int64_t T = m->max_rows, S = m->max_outs, H = d->n_heads, P = d->d_rope, R = d->r_kv;
    int64_t width = m->f_wide, W = hp->vocab / m->world;
    TAKE(s->h, T * d->d_model), TAKE(s->x, T * d->d_model), TAKE(s->y, T * d->d_model);
    TAKE(s->q_a, T * d->r_q), TAKE(s->kv, T * (R + P));
    TAKE(s->ik, T * d->ix_dim), TAKE(s->iw, T * d->ix_heads),
        TAKE(s->iq, T * d->ix_heads * d->ix_dim);
    TAKE(s->q, T * H * (d->d_nope + P)), TAKE(s->qk, T * H * (R + P));
    TAKE(s->ol, T * H * R), TAKE(s->ov, T * H * d->d_v);
    TAKE(s->selected, T * d->ix_topk), TAKE(s->n_selected, T);
    TAKE(s->logits_r, T * d->n_experts), TAKE(s->ids, T * d->n_used),
        TAKE(s->weights, T * d->n_used);
    TAKE(s->act, T * d->n_used * m->f_expert), TAKE(s->gate, T * width),
        TAKE(s->up, T * width);
    TAKE(s->angles, T * P);
    TAKE(s->out_h, S * d->d_model), TAKE(s->logits_local, S * W);
    s->logits = s->logits_local;
    if (m->world > 1) TAKE(s->logits, S * W * m->world);
    TAKE(s->token, S), TAKE(s->logprob, S);
    TAKE(s->top_token, S * K_TOP_MAX), TAKE(s->top_logprob, S * K_TOP_MAX);
    const struct kbounds bounds = {m->max_rows, m->max_outs, m->max_context, (int)hp->vocab};
    s->op = take(t, (int64_t)m->k->scratch_bytes(d, &bounds), 1);
    TAKE(m->batch.token, T), TAKE(m->batch.pos, T), TAKE(m->batch.slot, T),
        TAKE(m->batch.out_row, S);
    TAKE(m->rope_freq, P / 2);
    int64_t slots = m->seqs.max_slots;
    TAKE(m->seqs.page_table, slots * m->seqs.max_pages), TAKE(m->seqs.last_token, slots);
    TAKE(m->seqs.seen_prompt, slots * m->seqs.vocab),
        TAKE(m->seqs.seen_output, slots * m->seqs.vocab);
    TAKE(m->seqs.sampling, slots);
}

static int plan_sizes(struct model *m, const struct model_options *o, struct err_text *err) {
    if (o->context > m->hp.context)
        return err_set(err, ERR_SETUP, "--context: expected at most the model's %lld, found %lld",
                       (long long)m->hp.context, (long long)o->context);
    assert(o->max_rows > 0 && o->max_rows <= LIMIT_STEP_ROWS && o->max_slots > 0 &&
           o->max_slots <= LIMIT_SLOTS);
    assert(o->max_outs > 0 && o->max_outs <= LIMIT_STEP_SAMPLES);
    m->max_rows = o->max_rows;
    m->max_outs = o->max_outs;
    m->max_context = (int)(o->context > 0 ? o->context : m->hp.context);
    m->seqs.max_slots = o->max_slots;
    m->seqs.max_pages = (m->max_context + K_PAGE - 1) / K_PAGE;
    m->seqs.vocab = (int)m->hp.vocab;
    for (int i = 0; i < m->hp.n_layers; i++)
        m->page_bytes +=
            align_up(K_PAGE * m->k->latent_bytes(&m->hp.dims)) +
            (m->hp.index_full[i] ? align_up(K_PAGE * m->k->index_bytes(&m->hp.dims)) : 0);
    struct taker count = {0};
    layout_scratch(m, &count);
    m->scratch_bytes = count.bytes;
    return OK;
}

void model_print_plan(FILE *f, const struct model *m) {
    const double mib = 1 << 20;
    fprintf(f, "memory plan of rank %d of %d (%s, %s, %d layers)\n", m->rank, m->world, m->k->name,
            m->hp.arch, m->hp.n_layers);
    fprintf(f, "  %-16s %8s %12s\n", "weights", "tensors", "MiB");
    for (int i = 0; i < PLAN_GROUPS; i++)
        if (m->group_tensors[i])
            fprintf(f, "  %-16s %8d %12.2f\n", group_names[i], m->group_tensors[i],
                    (double)m->group_bytes[i] / mib);
    fprintf(f, "  %-16s %8s %12.2f\n", "all weights", "", (double)m->weight_bytes / mib);
    fprintf(f, "  %-16s %8s %12.2f  %d rows, %d samples, %d slots, context %d\n", "scratch", "",
            (double)m->scratch_bytes / mib, m->max_rows, m->max_outs, m->seqs.max_slots,
            m->max_context);
    if (m->work_bytes || m->graph_bytes) {
        fprintf(f, "  %-16s %8s %12.2f\n", "workspace", "", (double)m->work_bytes / mib);
        fprintf(f, "  %-16s %8d %12.2f  set aside; captured when the ranks join, some later\n",
                "step graphs", m->n_graphs, (double)m->graph_bytes / mib);
    }
    fprintf(f, "  %-16s %8s %12.2f  %d positions; allocated when the ranks join\n",
            "one cache page", "", (double)m->page_bytes / mib, K_PAGE);
}

/* ---- loading ----------------------------------------------------------------------------- */

/* Points the model's field at the item's memory. */
static void point_item(struct model *m, struct plan_item *it) {
    const struct tensor_need *n = &it->need;
    char *owner = n->block < 0 ? (char *)m : (char *)&m->layers[n->block];
    void *memory = (char *)m->arena[ARENA_WEIGHTS] + it->offset;
    if (n->scale) {
        struct kmat *of = (struct kmat *)(void *)(owner + n->offset);
        it->vector = memory;
        of->scales = n->cols == 1 ? 1 : (int)of->count;
        of->scale = it->vector + it->first;
        return;
    }
    if (n->vector) {
        *(float **)(void *)(owner + n->offset) = it->vector = memory;
        return;
    }
    it->mat = (struct kmat *)(void *)(owner + n->offset);
    *it->mat = (struct kmat){.type = (int)n->tensor->type,
                             .count = it->count,
                             .rows = it->rows,
                             .cols = it->cols,
                             .data = memory};
    if (n->group == PLAN_EXPERTS && n->cut == CUT_STACK) m->layers[n->block].first = (int)it->first;
}

static int allocate(struct model *m, enum model_arena which, uint64_t bytes, const char *what,
                    struct err_text *err) {
    m->arena[which] = m->k->alloc(m->ctx, bytes);
    if (m->arena[which]) return OK;
    struct kdevice_info info;
    m->k->info(m->ctx, &info);
    return err_set(err, ERR_NOMEM, "%s: expected %llu bytes of device memory, found %llu free",
                   what, (unsigned long long)bytes, (unsigned long long)info.free_bytes);
}

/* Everything at its place in the arenas. */
static void point_planned(struct loader *l) {
    struct model *m = l->m;
    struct taker point = {.base = m->arena[ARENA_SCRATCH]};
    layout_scratch(m, &point);
    assert(point.bytes == m->scratch_bytes);
    for (int i = 0; i < l->plan.n_items; i++) point_item(m, &l->plan.items[i]);
}

static int make_layers(struct model *m, struct err_text *err) {
    m->layers = calloc((size_t)m->hp.n_layers, sizeof *m->layers);
    if (!m->layers)
        return err_set(err, ERR_NOMEM, "plan: expected memory for the layers' table, found none");
    for (int i = 0; i < m->hp.n_layers; i++) {
        m->layers[i].has_index = m->hp.index_full[i];
        m->layers[i].dense = i < m->hp.n_dense;
    }
    return OK;
}

/* With arenas at addresses that nobody will read, so far apart that none overlaps another. */
static void measure_steps(struct loader *l) {
    struct model *m = l->m;
    for (int i = 0; i < MODEL_ARENAS; i++) m->arena[i] = (void *)((uintptr_t)(i + 1) << 44);
    point_planned(l);
    for (int i = 0; i < m->hp.n_layers; i++)
        m->layers[i].cache = (struct kcache){m->arena[ARENA_CACHES], m->arena[ARENA_CACHES]};
    graphs_measure(m);
    for (int i = 0; i < MODEL_ARENAS; i++) m->arena[i] = NULL;
    for (int i = 0; i < m->hp.n_layers; i++) m->layers[i].cache = (struct kcache){NULL, NULL};
}

static int allocate_planned(struct loader *l, struct err_text *err) {
    struct model *m = l->m;
    TRY(allocate(m, ARENA_WEIGHTS, m->weight_bytes, "weights", err));
    TRY(allocate(m, ARENA_SCRATCH, m->scratch_bytes, "scratch", err));
    if (m->work_bytes && !m->k->work_reserve(m->ctx, m->work_bytes))
        return err_set(err, ERR_NOMEM, "workspace: expected %llu bytes of device memory, found less",
                       (unsigned long long)m->work_bytes);
    m->k->zero(m->ctx, m->arena[ARENA_SCRATCH], m->scratch_bytes);
    point_planned(l);
    m->k->put(m->ctx, m->rope_freq, m->hp.rope_freq,
              (size_t)m->hp.dims.d_rope / 2 * sizeof *m->rope_freq);
    return OK;
}

/* From the shard cache if there is one and it fits, else from the file. */
static int fill_weights(struct loader *l, const struct gguf *g, const struct model_options *o,
                        struct load_progress progress, struct err_text *err) {
    struct model *m = l->m;
    struct shard shard;
    struct err_text why = {0};
    weights_sort(&l->plan);
    if (o->shard_dir) {
        shard_init(&shard, m, g, &l->plan, o->shard_dir);
        int rc = shard_read(&shard, progress, m, &why);
        m->from_shard = rc == OK;
        if (m->from_shard) weights_skip(m, o);
        if (m->from_shard) return OK;
        if (rc != ERR_NOT_FOUND) log_warn("shard_refused", "error=\"%s\"", why.text);
    }
    TRY(weights_read(m, g, &l->plan, o, progress, &m->asked_bytes, err));
    if (!o->shard_dir) return OK;
    if (shard_write(&shard, &why) < 0)
        log_warn("shard_not_written", "error=\"%s\"", why.text);
    else
        log_info("shard_written", "path=%s", shard.path);
    return OK;
}

int model_load(struct model *m, const struct gguf *g, const struct model_options *o,
               struct load_progress progress, struct err_text *err) {
    assert(o->world >= 1 && o->world <= LIMIT_RANKS && o->rank >= 0 && o->rank < o->world);
    struct loader l = {.m = m};
    int64_t heads = 0, unused;
    if (!m->ctx) TRY(model_open(m, o->device, err));
    m->rank = o->rank;
    m->world = o->world;
    TRY(model_read_hparams(&m->hp, g, err));
    TRY(share(m->hp.n_heads, o->world, m->hp.arch, "attention heads", &heads, err));
    TRY(share(m->hp.vocab, o->world, m->hp.arch, "vocabulary rows", &unused, err));
    int rc = tensors_each(&m->hp, g, plan_visit, &l, err);
    m->hp.dims.n_heads = (int)heads;
    if (rc == OK) rc = plan_sizes(m, o, err);
    if (rc == OK) rc = make_layers(m, err);
    if (rc == OK && m->k->measure_begin) measure_steps(&l);
    if (rc == OK && o->print_plan) model_print_plan(stderr, m);
    if (rc == OK) rc = allocate_planned(&l, err);
    if (rc == OK) rc = fill_weights(&l, g, o, progress, err);
    if (rc == OK && m->k->pack_end) m->k->pack_end(m->ctx);
    free(l.plan.items);
    return rc;
}

int model_alloc_caches(struct model *m, int64_t n_pages, struct err_text *err) {
    assert(!m->arena[ARENA_CACHES]);
    if (n_pages < 1 || n_pages > INT32_MAX || (uint64_t)n_pages > UINT64_MAX / 2 / m->page_bytes)
        return err_set(err, ERR_RANGE, "caches: expected 1 or more pages, found %lld",
                       (long long)n_pages);
    TRY(allocate(m, ARENA_CACHES, (uint64_t)n_pages * m->page_bytes, "caches", err));
    char *at = m->arena[ARENA_CACHES];
    for (int i = 0; i < m->hp.n_layers; i++) {
        struct kcache *c = &m->layers[i].cache;
        c->latent = at;
        at += align_up(K_PAGE * m->k->latent_bytes(&m->hp.dims)) * (uint64_t)n_pages;
        if (!m->layers[i].has_index) continue;
        c->index = at;
        at += align_up(K_PAGE * m->k->index_bytes(&m->hp.dims)) * (uint64_t)n_pages;
    }
    m->n_pages = n_pages;
    return OK;
}

void model_unload(struct model *m) {
    for (size_t i = 0; i < ARRAY_LEN(m->arena); i++)
        if (m->arena[i]) m->k->free(m->ctx, m->arena[i]);
    free(m->layers);
    if (m->ctx) m->k->close(m->ctx);
    *m = (struct model){0};
}
