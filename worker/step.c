/* worker/step.c: from a STEP message to device tables and back to a TOKENS message.
 *
 * Owns: host mirrors of the slot tables and the staging of one step.
 * Called by: the step thread (main.c); tests.
 * Fails how: ERR_FORMAT with a sentence for a message that does not fit (a bug of the
 * coordinator's: nothing was touched, the caller answers FAILED and exits 1); ERR_ABORTED.
 * Limits: the model's max_rows, max_outs, slots and pages.
 * Tested by: tests/unit/test_step.c, tests/kernels/test_model.c
 *
 * Two passes: first every index of the message is checked against the mirrors, then the mirrors and
 * the device change. A message is refused whole or obeyed whole. Positions are what a sequence has
 * been fed so far; they advance when a step is queued, since the next may be checked and queued
 * before it is done, and go back when it was in vain, so that an aborted step can be fed again.
 *
 * Everything that the device reads or writes for a step while the host goes on stands in that
 * step's own flight: two of them are in use, and the third keeps the marks of the one before.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "worker/graphs.h"
#include "worker/step.h"

#define FLIGHTS (STEPPER_DEPTH + 1)

/* Marks of a flight: around its operations, and when its results have arrived. */
enum { MARK_BEFORE, MARK_BEHIND, MARK_DONE, MARKS };

static_assert(MARKS * FLIGHTS <= K_MARKS, "each flight has its own");
static_assert(K_PAGE == LIMIT_PAGE_TOKENS && K_TOP_MAX == LIMIT_TOP_LOGPROBS &&
                  K_BIAS_MAX == LIMIT_BIAS,
              "messages and kernels must agree");

struct slot {
    bool admitted;
    bool sampled;     /* has a last token to feed */
    bool last_broken; /* that token is -1: no logit was finite */
    bool fed_any;
    uint32_t generation;
    int32_t fed;     /* positions fed so far; the next entry starts here or below */
    int32_t n_pages; /* known to the device's table */
    int32_t n_prompt;
    bool penalties;   /* somebody looks at the counts */
    uint64_t in_step; /* serial of the last step that names it */
};

/* A slot named by a step, and its mirror before. */
struct changed {
    int32_t slot;
    struct slot before;
};

/* A sample's place in the answer. */
struct sampled {
    int32_t slot, pos, n_top;
    uint32_t slot_generation;
};

/* A step between submit and collect. */
struct flight {
    uint64_t id, start_us;
    uint32_t generation;
    int n_changed, n_out;
    bool tops;  /* somebody asked for alternatives */
    bool ahead; /* another was in flight when it was queued */
    struct changed changed[LIMIT_STEP_ENTRIES];
    struct sampled *outs;            /* [max_outs] */
    void *host;                      /* what the device reads and writes: */
    int32_t *token, *pos, *row_slot; /* [max_rows] */
    int32_t *out_row;                /* [max_outs] */
    int32_t *pages;                  /* [LIMIT_STEP_PAGES] */
    int32_t *got_token, *got_top;    /* [max_outs], [max_outs, K_TOP_MAX] */
    float *got_logprob, *got_top_logprob;
};

struct stepper {
    struct model *m;
    struct slot *slots;
    uint64_t serial;
    struct flight flights[FLIGHTS];
    uint64_t submitted, collected; /* how many; modulo FLIGHTS the flight */
    uint64_t collected_us;
    struct step_times times;
    struct ksampling sampling;
    uint16_t *counts; /* [vocab] of one slot, on their way to and from the device */
    int32_t top_logprobs[LIMIT_SLOTS];
};

static int flight_init(struct flight *f, const struct model *m) {
    size_t T = (size_t)m->max_rows, S = (size_t)m->max_outs;
    f->outs = calloc(S, sizeof *f->outs);
    size_t words = 3 * T + S + LIMIT_STEP_PAGES + 2 * (1 + K_TOP_MAX) * S;
    f->host = m->k->host_alloc(m->ctx, words * sizeof(int32_t));
    if (!f->outs || !f->host) return ERR_NOMEM;
    f->token = f->host;
    f->pos = f->token + T;
    f->row_slot = f->pos + T;
    f->out_row = f->row_slot + T;
    f->pages = f->out_row + S;
    f->got_token = f->pages + LIMIT_STEP_PAGES;
    f->got_top = f->got_token + S;
    f->got_logprob = (float *)(f->got_top + K_TOP_MAX * S);
    f->got_top_logprob = f->got_logprob + S;
    return OK;
}

int stepper_new(struct stepper **out, struct model *m) {
    struct stepper *st = calloc(1, sizeof *st);
    if (!st) return ERR_NOMEM;
    st->m = m;
    st->slots = calloc((size_t)m->seqs.max_slots, sizeof *st->slots);
    st->counts = calloc((size_t)m->seqs.vocab, sizeof *st->counts);
    int rc = st->slots && st->counts ? OK : ERR_NOMEM;
    for (int i = 0; rc == OK && i < FLIGHTS; i++) rc = flight_init(&st->flights[i], m);
    if (rc < 0) {
        stepper_free(st);
        return rc;
    }
    *out = st;
    return OK;
}

void stepper_free(struct stepper *st) {
    if (!st) return;
    for (int i = 0; i < FLIGHTS; i++) {
        if (st->flights[i].host) st->m->k->host_free(st->m->ctx, st->flights[i].host);
        free(st->flights[i].outs);
    }
    free(st->slots);
    free(st->counts);
    free(st);
}

int stepper_in_flight(const struct stepper *st) {
    return (int)(st->submitted - st->collected);
}

static int mark_of(uint64_t number, int which) {
    return MARKS * (int)(number % FLIGHTS) + which;
}

void stepper_forget(struct stepper *st) {
    memset(st->slots, 0, (size_t)st->m->seqs.max_slots * sizeof *st->slots);
}

/* ---- admission --------------------------------------------------------------------------- */

static int check_admit(const struct model *m, const struct msg_admit *a, struct err_text *err) {
    const struct msg_sampling *s = &a->sampling;
    if (a->slot < 0 || a->slot >= m->seqs.max_slots)
        return err_set(err, ERR_FORMAT, "admit: expected a slot below %d, found %d",
                       m->seqs.max_slots, a->slot);
    if (s->n_bias < 0 || s->n_bias > LIMIT_BIAS)
        return err_set(err, ERR_FORMAT, "admit: expected up to %d biases, found %d", LIMIT_BIAS,
                       s->n_bias);
    if (s->top_logprobs < 0 || s->top_logprobs > LIMIT_TOP_LOGPROBS)
        return err_set(err, ERR_FORMAT, "admit: expected up to %d alternatives, found %d",
                       LIMIT_TOP_LOGPROBS, s->top_logprobs);
    for (int i = 0; i < s->n_bias; i++)
        if (s->bias_token[i] < 0 || s->bias_token[i] >= m->hp.vocab)
            return err_set(err, ERR_FORMAT,
                           "admit: expected a bias on a token below %lld, found %d",
                           (long long)m->hp.vocab, s->bias_token[i]);
    return OK;
}

static void sampling_to_device(struct stepper *st, const struct msg_admit *a) {
    struct model *m = st->m;
    const struct msg_sampling *s = &a->sampling;
    struct ksampling *k = &st->sampling;
    *k = (struct ksampling){
        .temperature = s->temperature,
        .top_p = s->top_p,
        .min_p = s->min_p,
        .repetition = s->repetition,
        .presence = s->presence,
        .frequency = s->frequency,
        .top_k = s->top_k,
        .top_logprobs = s->top_logprobs,
        .n_prompt = a->n_prompt,
        .n_bias = s->n_bias,
        .seed = s->seed,
    };
    memcpy(k->bias_token, s->bias_token, (size_t)s->n_bias * sizeof *k->bias_token);
    memcpy(k->bias_value, s->bias_value, (size_t)s->n_bias * sizeof *k->bias_value);
    m->k->put(m->ctx, &m->seqs.sampling[a->slot], k, sizeof *k);
}

int stepper_admit(struct stepper *st, const struct msg_admit *a, struct err_text *err) {
    struct model *m = st->m;
    TRY(check_admit(m, a, err));
    const struct msg_sampling *s = &a->sampling;
    st->slots[a->slot] =
        (struct slot){.admitted = true,
                      .generation = a->slot_generation,
                      .n_prompt = a->n_prompt,
                      .penalties = s->repetition != 1 || s->presence != 0 || s->frequency != 0};
    st->top_logprobs[a->slot] = a->sampling.top_logprobs;
    size_t vocab = (size_t)m->seqs.vocab, at = (size_t)a->slot * vocab;
    m->k->zero(m->ctx, m->seqs.seen_prompt + at, vocab * sizeof *m->seqs.seen_prompt);
    m->k->zero(m->ctx, m->seqs.seen_output + at, vocab * sizeof *m->seqs.seen_output);
    sampling_to_device(st, a);
    return OK;
}

/* ---- checking a step --------------------------------------------------------------------- */

static int check_pages(const struct model *m, const struct msg_step *s, const struct msg_entry *e,
                       const struct slot *slot, struct err_text *err) {
    if (e->n_pages < 0 || e->page_at < 0 || e->n_pages > s->n_pages - e->page_at)
        return err_set(err, ERR_FORMAT,
                       "step %llu slot %d: expected pages within the message's %d, found %d at %d",
                       (unsigned long long)s->id, e->slot, s->n_pages, e->n_pages, e->page_at);
    if (e->n_pages > 0 && (e->page_first < 0 || e->page_first > slot->n_pages ||
                           e->n_pages > m->seqs.max_pages - e->page_first))
        return err_set(
            err, ERR_FORMAT,
            "step %llu slot %d: expected new pages to follow the %d known (of %d), found %d at %d",
            (unsigned long long)s->id, e->slot, slot->n_pages, m->seqs.max_pages, e->n_pages,
            e->page_first);
    for (int i = 0; i < e->n_pages; i++)
        if (s->pages[e->page_at + i] < 0 || s->pages[e->page_at + i] >= m->n_pages)
            return err_set(err, ERR_FORMAT,
                           "step %llu slot %d: expected a page below %lld, found %d",
                           (unsigned long long)s->id, e->slot, (long long)m->n_pages,
                           s->pages[e->page_at + i]);
    int32_t known = e->n_pages > 0 ? MAX(slot->n_pages, e->page_first + e->n_pages) : slot->n_pages;
    if ((int64_t)e->pos + e->count > (int64_t)known * K_PAGE)
        return err_set(err, ERR_FORMAT,
                       "step %llu slot %d: expected pages for %d positions, found %d pages",
                       (unsigned long long)s->id, e->slot, e->pos + e->count, known);
    return OK;
}

static int check_tokens(const struct model *m, const struct msg_step *s, const struct msg_entry *e,
                        const struct slot *slot, struct err_text *err) {
    if (e->token_at == -1 && (e->count != 1 || !slot->sampled))
        return err_set(err, ERR_FORMAT,
                       "step %llu slot %d: expected one token after a sample, found %d and %s",
                       (unsigned long long)s->id, e->slot, e->count,
                       slot->sampled ? "a sample" : "no sample");
    if (e->token_at == -1) return OK;
    if (e->token_at < 0 || e->count > s->n_tokens - e->token_at)
        return err_set(err, ERR_FORMAT,
                       "step %llu slot %d: expected tokens within the message's %d, found %d at %d",
                       (unsigned long long)s->id, e->slot, s->n_tokens, e->count, e->token_at);
    for (int i = 0; i < e->count; i++)
        if (s->tokens[e->token_at + i] < 0 || s->tokens[e->token_at + i] >= m->hp.vocab)
            return err_set(err, ERR_FORMAT,
                           "step %llu slot %d: expected a token below %lld, found %d",
                           (unsigned long long)s->id, e->slot, (long long)m->hp.vocab,
                           s->tokens[e->token_at + i]);
    return OK;
}

/* most: tokens of one entry. */
static int check_entry(struct stepper *st, const struct msg_step *s, const struct msg_entry *e,
                       int most, struct err_text *err) {
    const struct model *m = st->m;
    const unsigned long long id = s->id;
    if (e->slot < 0 || e->slot >= m->seqs.max_slots)
        return err_set(err, ERR_FORMAT, "step %llu: expected a slot below %d, found %d", id,
                       m->seqs.max_slots, e->slot);
    struct slot *slot = &st->slots[e->slot];
    if (!slot->admitted || slot->generation != e->slot_generation)
        return err_set(err, ERR_FORMAT, "step %llu slot %d: expected generation %u, found %s%u", id,
                       e->slot, e->slot_generation, slot->admitted ? "" : "nothing admitted after ",
                       slot->generation);
    if (slot->in_step == st->serial)
        return err_set(err, ERR_FORMAT, "step %llu slot %d: expected one entry, found another", id,
                       e->slot);
    slot->in_step = st->serial;
    if (e->count < 1 || e->count > most || e->samples < 0 || e->samples > e->count)
        return err_set(
            err, ERR_FORMAT,
            "step %llu slot %d: expected 1 to %d tokens and up to as many samples, found %d and %d",
            id, e->slot, most, e->count, e->samples);
    if (e->pos < 0 || (slot->fed_any && e->pos > slot->fed) || e->pos > m->max_context - e->count)
        return err_set(
            err, ERR_FORMAT,
            "step %llu slot %d: expected to go on at position %d of %d, found %d tokens at %d", id,
            e->slot, slot->fed, m->max_context, e->count, e->pos);
    TRY(check_pages(m, s, e, slot, err));
    return check_tokens(m, s, e, slot, err);
}

static int check_counts(const struct msg_step *s, struct err_text *err) {
    if (s->n_entries < 1 || s->n_entries > LIMIT_STEP_ENTRIES || s->n_tokens < 0 ||
        s->n_tokens > LIMIT_STEP_ROWS || s->n_pages < 0 || s->n_pages > LIMIT_STEP_PAGES)
        return err_set(
            err, ERR_FORMAT,
            "step %llu: expected counts within the limits, found %d entries, %d tokens, %d pages",
            (unsigned long long)s->id, s->n_entries, s->n_tokens, s->n_pages);
    return OK;
}

static int check_step(struct stepper *st, const struct msg_step *s, struct err_text *err) {
    const struct model *m = st->m;
    int64_t rows = 0, outs = 0;
    TRY(check_counts(s, err));
    st->serial++;
    for (int i = 0; i < s->n_entries; i++) {
        TRY(check_entry(st, s, &s->entries[i], m->max_rows, err));
        rows += s->entries[i].count;
        outs += s->entries[i].samples;
    }
    if (rows > m->max_rows || outs > m->max_outs)
        return err_set(err, ERR_FORMAT,
                       "step %llu: expected up to %d rows and %d samples, found %lld and %lld",
                       (unsigned long long)s->id, m->max_rows, m->max_outs, (long long)rows,
                       (long long)outs);
    return OK;
}

/* Only known tokens, each right behind what is there: what is fed twice would be counted twice. */
static int check_restore(struct stepper *st, const struct msg_step *s, struct err_text *err) {
    TRY(check_counts(s, err));
    st->serial++;
    for (int i = 0; i < s->n_entries; i++) {
        const struct msg_entry *e = &s->entries[i];
        TRY(check_entry(st, s, e, LIMIT_STEP_ROWS, err));
        if (e->token_at < 0 || e->samples || e->pos != st->slots[e->slot].fed)
            return err_set(err, ERR_FORMAT,
                           "restore %llu slot %d: expected known tokens from position %d on, found "
                           "%s at %d",
                           (unsigned long long)s->id, e->slot, st->slots[e->slot].fed,
                           e->token_at < 0 ? "unknown ones" : "tokens", e->pos);
    }
    return OK;
}

/* ---- running a step ---------------------------------------------------------------------- */

/* pages: the message's, or a copy that outlives it. */
static void pages_to_device(struct stepper *st, const int32_t *pages, const struct msg_entry *e) {
    struct model *m = st->m;
    struct slot *slot = &st->slots[e->slot];
    if (e->n_pages == 0) return;
    int32_t *row = m->seqs.page_table + (size_t)e->slot * (size_t)m->seqs.max_pages;
    m->k->put(m->ctx, row + e->page_first, pages + e->page_at, (size_t)e->n_pages * sizeof *row);
    slot->n_pages = MAX(slot->n_pages, e->page_first + e->n_pages);
}

/* As feed() counts on the device, over tokens that are not fed. */
static void count(struct stepper *st, const struct msg_entry *e, const int32_t *token) {
    struct model *m = st->m;
    size_t bytes = (size_t)m->seqs.vocab * sizeof *st->counts;
    size_t at = (size_t)e->slot * (size_t)m->seqs.vocab;
    int32_t n_prompt = MIN(MAX(st->slots[e->slot].n_prompt - e->pos, 0), e->count);
    if (n_prompt > 0) {
        m->k->get(m->ctx, st->counts, m->seqs.seen_prompt + at, bytes);
        for (int32_t i = 0; i < n_prompt; i++) st->counts[token[i]] = 1;
        m->k->put(m->ctx, m->seqs.seen_prompt + at, st->counts, bytes);
        m->k->sync(m->ctx); /* before the buffer is used again */
    }
    if (n_prompt < e->count) {
        m->k->get(m->ctx, st->counts, m->seqs.seen_output + at, bytes);
        for (int32_t i = n_prompt; i < e->count; i++)
            if (st->counts[token[i]] < UINT16_MAX) st->counts[token[i]]++;
        m->k->put(m->ctx, m->seqs.seen_output + at, st->counts, bytes);
        m->k->sync(m->ctx);
    }
}

int stepper_restore(struct stepper *st, const struct msg_step *s, struct err_text *err) {
    TRY(check_restore(st, s, err));
    for (int i = 0; i < s->n_entries; i++) {
        const struct msg_entry *e = &s->entries[i];
        struct slot *slot = &st->slots[e->slot];
        pages_to_device(st, s->pages, e);
        if (slot->penalties) count(st, e, s->tokens + e->token_at);
        slot->fed = e->pos + e->count;
        slot->fed_any = true;
    }
    return OK;
}

/* A step sent before the coordinator saw a token of -1 feeds token 0: that sequence is dropped
 * anyway, and it must not take the others of the step with it. */
static int32_t last_token(const struct slot *slot) {
    return slot->last_broken ? 0 : K_TOKEN_LAST;
}

static void add_out(struct stepper *st, struct flight *f, const struct msg_entry *e, int row,
                    int32_t pos) {
    struct sampled *o = &f->outs[f->n_out];
    *o = (struct sampled){.slot = e->slot,
                          .pos = pos,
                          .n_top = st->top_logprobs[e->slot],
                          .slot_generation = e->slot_generation};
    f->tops |= o->n_top > 0;
    f->out_row[f->n_out++] = row;
}

/* Lays the entries out as rows, in their order, and their samples as outs. */
static void build_batch(struct stepper *st, struct flight *f, const struct msg_step *s) {
    struct kbatch *b = &st->m->batch;
    b->n_rows = b->max_context = 0;
    f->n_out = 0;
    f->tops = false;
    memcpy(f->pages, s->pages, (size_t)s->n_pages * sizeof *f->pages);
    for (int i = 0; i < s->n_entries; i++) {
        const struct msg_entry *e = &s->entries[i];
        f->changed[i] = (struct changed){e->slot, st->slots[e->slot]};
        pages_to_device(st, f->pages, e);
        for (int j = 0; j < e->count; j++) {
            int row = b->n_rows++;
            f->token[row] =
                e->token_at >= 0 ? s->tokens[e->token_at + j] : last_token(&st->slots[e->slot]);
            f->pos[row] = e->pos + j;
            f->row_slot[row] = e->slot;
            if (j >= e->count - e->samples) add_out(st, f, e, row, e->pos + j + 1);
        }
        b->max_context = MAX(b->max_context, e->pos + e->count);
    }
    f->n_changed = s->n_entries;
    b->n_out = f->n_out;
}

/* Fills the batch up to a bucket with rows of no slot. */
static void pad_batch(struct stepper *st, struct flight *f) {
    struct kbatch *b = &st->m->batch;
    int rows = graphs_padded(st->m, b->n_rows);
    if (!graphs_bucket(b->n_rows) || rows > st->m->max_outs) return;
    for (; b->n_rows < rows; b->n_rows++) {
        f->token[b->n_rows] = f->pos[b->n_rows] = 0;
        f->row_slot[b->n_rows] = -1;
    }
    while (b->n_out < rows) f->out_row[b->n_out++] = -1;
}

static void batch_to_device(struct stepper *st, const struct flight *f) {
    struct model *m = st->m;
    size_t rows = (size_t)m->batch.n_rows * sizeof(int32_t),
           outs = (size_t)m->batch.n_out * sizeof(int32_t);
    m->k->put(m->ctx, m->batch.token, f->token, rows);
    m->k->put(m->ctx, m->batch.pos, f->pos, rows);
    m->k->put(m->ctx, m->batch.slot, f->row_slot, rows);
    if (outs) m->k->put(m->ctx, m->batch.out_row, f->out_row, outs);
}

static void results_from_device(struct stepper *st, struct flight *f) {
    const struct model *m = st->m;
    const struct scratch *d = &m->s;
    size_t S = (size_t)f->n_out, tops = S * K_TOP_MAX;
    if (S == 0) return;
    m->k->get_later(m->ctx, f->got_token, d->token, S * sizeof *f->got_token);
    m->k->get_later(m->ctx, f->got_logprob, d->logprob, S * sizeof *f->got_logprob);
    if (!f->tops) return;
    m->k->get_later(m->ctx, f->got_top, d->top_token, tops * sizeof *f->got_top);
    m->k->get_later(m->ctx, f->got_top_logprob, d->top_logprob, tops * sizeof *f->got_top_logprob);
}

/* What the slots have seen, once the step is done. */
static void advance(struct stepper *st, const struct flight *f, const struct msg_step *s) {
    for (int i = 0; i < s->n_entries; i++) {
        struct slot *slot = &st->slots[s->entries[i].slot];
        slot->fed = s->entries[i].pos + s->entries[i].count;
        slot->fed_any = true;
    }
    for (int i = 0; i < f->n_out; i++) {
        st->slots[f->outs[i].slot].sampled = true;
        st->slots[f->outs[i].slot].last_broken = false; /* collect knows better */
    }
}

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

int stepper_submit(struct stepper *st, struct coll *coll, const struct msg_step *s,
                   const struct dump *dump, struct err_text *err) {
    struct model *m = st->m;
    struct flight *f = &st->flights[st->submitted % FLIGHTS];
    assert(stepper_in_flight(st) < STEPPER_DEPTH);
    f->start_us = now_us();
    TRY(check_step(st, s, err));
    f->id = s->id;
    f->generation = s->generation;
    f->ahead = stepper_in_flight(st) > 0;
    build_batch(st, f, s);
    if (m->pad_rows || forward_in_graphs(m, coll, dump)) pad_batch(st, f);
    batch_to_device(st, f);
    m->k->mark(m->ctx, mark_of(st->submitted, MARK_BEFORE));
    int rc = forward(m, coll, dump);
    m->k->mark(m->ctx, mark_of(st->submitted, MARK_BEHIND));
    results_from_device(st, f);
    m->k->mark(m->ctx, mark_of(st->submitted, MARK_DONE));
    advance(st, f, s);
    st->submitted++;
    if (rc < 0) stepper_drop(st);
    return rc;
}

static void answer(const struct flight *f, struct msg_tokens *out) {
    out->step_id = f->id;
    out->generation = f->generation;
    out->n = f->n_out;
    for (int i = 0; i < f->n_out; i++) {
        const struct sampled *o = &f->outs[i];
        struct msg_token *t = &out->tokens[i];
        *t = (struct msg_token){
            .slot = o->slot,
            .slot_generation = o->slot_generation,
            .pos = o->pos,
            .token = f->got_token[i],
            .logprob = f->got_logprob[i],
            .n_top = o->n_top,
        };
        memcpy(t->top_token, f->got_top + i * K_TOP_MAX, (size_t)t->n_top * sizeof *t->top_token);
        memcpy(t->top_logprob, f->got_top_logprob + i * K_TOP_MAX,
               (size_t)t->n_top * sizeof *t->top_logprob);
    }
}

/* The slot still belongs to whom the step was for. */
static struct slot *slot_of(struct stepper *st, int32_t slot, uint32_t generation) {
    struct slot *s = &st->slots[slot];
    return s->admitted && s->generation == generation ? s : NULL;
}

static void note_times(struct stepper *st) {
    const struct model *m = st->m;
    uint64_t now = st->collected, before = now - 1;
    st->times.ahead = st->flights[now % FLIGHTS].ahead;
    st->times.device_us =
        m->k->span_us(m->ctx, mark_of(now, MARK_BEFORE), mark_of(now, MARK_BEHIND));
    st->times.gap_us =
        now ? m->k->span_us(m->ctx, mark_of(before, MARK_BEHIND), mark_of(now, MARK_BEFORE)) : 0;
}

int stepper_collect(struct stepper *st, struct coll *coll, struct msg_tokens *out) {
    struct flight *f = &st->flights[st->collected % FLIGHTS];
    assert(stepper_in_flight(st) > 0);
    st->m->k->wait(st->m->ctx, mark_of(st->collected, MARK_DONE));
    int rc = coll_check(coll);
    if (rc < 0) {
        stepper_drop(st);
        return rc;
    }
    answer(f, out);
    for (int i = 0; i < f->n_out; i++) {
        struct slot *slot = slot_of(st, f->outs[i].slot, f->outs[i].slot_generation);
        if (slot && f->got_token[i] < 0) slot->last_broken = true;
    }
    note_times(st);
    st->collected++;
    uint64_t now = now_us();
    out->step_us = now - MAX(f->start_us, st->collected_us);
    st->collected_us = now;
    return OK;
}

bool stepper_is_done(const struct stepper *st) {
    return stepper_in_flight(st) > 0 &&
           st->m->k->passed(st->m->ctx, mark_of(st->collected, MARK_DONE));
}

struct step_times stepper_times(const struct stepper *st) {
    return st->times;
}

/* Newest first, so that each finds what it changed. */
void stepper_drop(struct stepper *st) {
    st->m->k->sync(st->m->ctx); /* before its memory is used again */
    for (; st->submitted != st->collected; st->submitted--) {
        const struct flight *f = &st->flights[(st->submitted - 1) % FLIGHTS];
        for (int i = 0; i < f->n_changed; i++) {
            const struct changed *c = &f->changed[i];
            struct slot *slot = slot_of(st, c->slot, c->before.generation);
            int32_t pages = slot ? slot->n_pages : 0; /* the device's table keeps them */
            if (slot) *slot = c->before;
            if (slot) slot->n_pages = pages;
        }
    }
}

int stepper_run(struct stepper *st, struct coll *coll, const struct msg_step *s,
                struct msg_tokens *out, const struct dump *dump, struct err_text *err) {
    assert(stepper_in_flight(st) == 0);
    TRY(stepper_submit(st, coll, s, dump, err));
    return stepper_collect(st, coll, out);
}
