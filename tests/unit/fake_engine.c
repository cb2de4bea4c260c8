/* tests/unit/fake_engine.c: engine.h without a model: every sequence says what a script says.
 *
 * A tick gives each living sequence its next token, in order of submission; nothing happens between
 * ticks. Included by the test that uses it. */
#include <stdlib.h>
#include <string.h>

#include "coordinator/engine.h"

struct fake_seq {
    struct fake_seq *next;
    uint64_t id;
    engine_sink *sink;
    void *user;
    int32_t n_prompt, max_tokens, at;
    bool ignore_eos, finish_asked, dead;
    uint64_t seed;
};

struct engine {
    struct fake_seq *seqs;
    uint64_t next_id;
    /* the script */
    const int32_t *tokens;
    int n_tokens, error_at; /* error_at -1: none */
    int32_t eog;
    int submit_rc, submit_rc_after; /* refused from the submit_rc_after-th on */
    enum engine_state state;
    uint64_t step_age_us; /* of a step that may take a second; 0: none in flight */
    uint64_t load_quiet_us; /* of a load that may be quiet for five seconds */
    bool streams_talk;      /* somebody gets a token between two looks */
    /* what happened */
    int n_submitted, n_cancelled, n_finished;
    uint32_t restarted; /* bit r: rank r was asked for */
    struct msg_sampling last_sampling;
    int32_t last_prompt[4096], last_n_prompt, last_max_tokens;
};

int engine_submit(struct engine *e, const struct engine_request *r, uint64_t *id) {
    assert(r->n_tokens > 0 && r->max_tokens > 0 && r->sink);
    if (e->submit_rc && e->n_submitted >= e->submit_rc_after) return e->submit_rc;
    struct fake_seq *s = calloc(1, sizeof *s), **at = &e->seqs;
    *s = (struct fake_seq){.id = ++e->next_id,
                           .sink = r->sink,
                           .user = r->user,
                           .n_prompt = r->n_tokens,
                           .max_tokens = r->max_tokens,
                           .ignore_eos = r->ignore_eos,
                           .seed = r->sampling.seed};
    while (*at) at = &(*at)->next;
    *at = s;
    *id = s->id;
    e->n_submitted++;
    e->last_sampling = r->sampling;
    e->last_max_tokens = r->max_tokens;
    e->last_n_prompt = MIN(r->n_tokens, (int32_t)ARRAY_LEN(e->last_prompt));
    memcpy(e->last_prompt, r->tokens, (size_t)e->last_n_prompt * sizeof *r->tokens);
    return OK;
}

static struct fake_seq *fake_find(struct engine *e, uint64_t id) {
    for (struct fake_seq *s = e->seqs; s; s = s->next)
        if (s->id == id && !s->dead) return s;
    return NULL;
}

void engine_finish(struct engine *e, uint64_t id) {
    struct fake_seq *s = fake_find(e, id);
    if (s) s->finish_asked = true;
}

void engine_cancel(struct engine *e, uint64_t id) {
    struct fake_seq *s = fake_find(e, id);
    assert(s);
    s->dead = true;
    e->n_cancelled++;
}

int engine_restart(struct engine *e, int rank) {
    if (e->state != ENGINE_READY) return ERR_STATE;
    e->restarted |= 1u << rank;
    return OK;
}

int engine_retry_after(const struct engine *e) {
    UNUSED(e);
    return 7;
}

static void fake_end(struct engine *e, struct fake_seq *s, enum engine_finish reason,
                     int32_t stop) {
    struct engine_event ev = {.finished = true,
                              .reason = reason,
                              .stop_token = stop,
                              .error = reason == ENGINE_ERROR ? "worker/3 died \"twice\"" : NULL,
                              .n_prompt = s->n_prompt,
                              .n_cached = 1,
                              .n_output = s->at + (stop >= 0)};
    s->dead = true;
    e->n_finished++;
    s->sink(s->user, &ev);
}

static void fake_step(struct engine *e, struct fake_seq *s) {
    if (s->finish_asked) {
        fake_end(e, s, ENGINE_STOP, -1);
    } else if (s->at == e->error_at) {
        fake_end(e, s, ENGINE_ERROR, -1);
    } else if (s->at == s->max_tokens) {
        fake_end(e, s, ENGINE_LENGTH, -1);
    } else if (s->at >= e->n_tokens && !s->ignore_eos) {
        fake_end(e, s, ENGINE_STOP, e->eog);
    } else {
        struct msg_token t = {
            .token = e->tokens[s->at % e->n_tokens], .logprob = -0.5f, .n_top = LIMIT_TOP_LOGPROBS};
        for (int i = 0; i < t.n_top; i++) {
            t.top_token[i] = i ? i + 300 : t.token;
            t.top_logprob[i] = i < 3 ? -0.5f - (float)i : -1.0f / 0.0f;
        }
        s->at++;
        s->sink(s->user, &(struct engine_event){.token = &t});
    }
}

static void fake_tick(struct engine *e) {
    for (struct fake_seq *s = e->seqs; s; s = s->next)
        if (!s->dead) fake_step(e, s);
    for (struct fake_seq **at = &e->seqs; *at;) {
        struct fake_seq *s = *at;
        if (!s->dead) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        free(s);
    }
}

static int fake_living(const struct engine *e) {
    int n = 0;
    for (const struct fake_seq *s = e->seqs; s; s = s->next) n += !s->dead;
    return n;
}

void engine_status(const struct engine *e, struct engine_status *out) {
    *out = (struct engine_status){.state = e->state, .n_workers = 2, .running = fake_living(e)};
    out->pages_total = 3;
    out->phase = out->canary = "ok";
    out->load_quiet_us = e->load_quiet_us, out->load_bound_us = 5000000;
    out->last_step_us = 7000;
    out->prefill = (struct engine_prefill){.n = 1, .done = 300, .total = 1000};
    static uint64_t talked;
    if (e->streams_talk) out->output_tokens = ++talked;
    if (e->step_age_us) {
        out->step = 10, out->step_rows = 512;
        out->step_age_us = e->step_age_us, out->step_bound_us = 1000000;
    }
    snprintf(out->why, sizeof out->why, "rank 1 is \"loading\"");
    for (int i = 0; i < 2; i++) {
        struct engine_worker *w = &out->workers[i];
        *w = (struct engine_worker){.rank = i, .pid = 100 + i, .start_time = 5, .last_step = 9};
        w->state = WORKER_READY;
        w->age_us = i ? 2500 : UINT64_MAX;
        snprintf(w->device, sizeof w->device, "%s",
                 i ? "NVIDIA X GPU-0a1b2c3d-0000-1111-2222-333344445555 0000:c1:00.0" : "cpu AVX-512");
        if (i) snprintf(w->last_error, sizeof w->last_error, "bad \xff byte");
    }
}
