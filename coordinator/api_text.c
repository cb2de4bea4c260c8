/* coordinator/api_text.c: POST /v1/completions: prompts in, text out, in the older shape.
 *
 * Owns: nothing, jobs are api_job.c's.  Called by: http.c (route), api_job.c (shape).
 * Fails how: struct openai_error.  Limits: see openai.h.  Tested by: tests/unit/test_api.c
 *
 * A prompt given as text is trusted: control tokens spelled in it are control tokens, as whoever
 * sends a raw prompt expects. The prefix that the model was trained with, [gMASK]<sop>, is put
 * before it unless it stands there already or add_special_tokens is false; token ids are taken as
 * they are.
 */
#include "coordinator/api_job.h"

#include <stdlib.h>
#include <string.h>

static const char *const prefix_tokens[] = {"[gMASK]", "<sop>"};

int api_push_prefix(const struct tok *t, struct tok_ids *ids) {
    for (size_t i = 0; i < ARRAY_LEN(prefix_tokens); i++) {
        int32_t id = tok_added(t, prefix_tokens[i]);
        if (id >= 0) TRY(tok_ids_push(ids, id));
    }
    return OK;
}

int api_encode_text(const struct tok *t, const char *text, size_t n, bool prefix,
                    struct tok_ids *ids) {
    size_t at = strlen(prefix_tokens[0]);
    bool there = n >= at && !memcmp(text, prefix_tokens[0], at);
    if (prefix && !there) TRY(api_push_prefix(t, ids));
    return tok_encode(t, text, n, TOK_TRUSTED, ids);
}

static int text_prompts(struct api_job *j, struct openai_error *e) {
    const struct openai_request *r = &j->req;
    j->prompts = calloc((size_t)r->n_prompts, sizeof *j->prompts);
    if (!j->prompts) return openai_fail(e, ERR_NOMEM, 503, NULL, NULL, "Out of memory.");
    j->n_prompts = r->n_prompts;
    for (int i = 0; i < r->n_prompts; i++) {
        const struct openai_prompt *p = &r->prompts[i];
        int rc = OK;
        if (p->text)
            rc = api_encode_text(j->work.api->tok, p->text, p->n, r->add_special, &j->prompts[i]);
        else
            for (size_t k = 0; k < p->n_ids && rc >= 0; k++)
                rc = tok_ids_push(&j->prompts[i], p->ids[k]);
        if (rc == ERR_NOMEM) return openai_fail(e, rc, 503, NULL, NULL, "Out of memory.");
        if (rc < 0) return openai_fail(e, rc, 400, NULL, "prompt", "prompt: cannot be tokenised.");
        if (!j->prompts[i].n)
            return openai_fail(e, ERR_FORMAT, 400, NULL, "prompt",
                               "prompt: expected at least one token.");
    }
    return OK;
}

/* ---- log-probabilities, as four parallel lists -------------------------------------------------
 */

enum { LP_TOKENS, LP_VALUES, LP_TOP, LP_OFFSETS };

/* A token as a JSON string; bytes that are not UTF-8 are spelled "bytes:\xNN". */
static void put_piece(struct http_buf *b, const char *p, size_t n) {
    if (utf8_valid(p, n)) {
        http_buf_json(b, p, n);
        return;
    }
    http_buf_puts(b, "\"bytes:");
    for (size_t i = 0; i < n; i++) http_buf_printf(b, "\\\\x%02x", (unsigned char)p[i]);
    http_buf_puts(b, "\"");
}

static int64_t count_points(const char *p, size_t n) {
    int64_t points = 0;
    for (size_t i = 0; i < n; i++) points += ((unsigned char)p[i] & 0xc0) != 0x80;
    return points;
}

static void text_logprob(struct api_choice *c, const struct msg_token *t) {
    const struct tok *tok = c->job->work.api->tok;
    size_t n;
    const char *p = tok_bytes(tok, t->token, &n);
    if (c->lp[LP_TOKENS].n)
        for (int k = LP_TOKENS; k <= LP_OFFSETS; k++) http_buf_puts(&c->lp[k], ",");
    put_piece(&c->lp[LP_TOKENS], p, n);
    http_buf_number(&c->lp[LP_VALUES], t->logprob);
    http_buf_printf(&c->lp[LP_OFFSETS], "%lld", (long long)c->offset);
    c->offset += count_points(p, n);

    struct http_buf *top = &c->lp[LP_TOP];
    int n_top = MIN(t->n_top, c->job->req.sampling.top_logprobs);
    http_buf_puts(top, "{");
    bool has_token = false;
    for (int i = 0; i < n_top; i++) {
        has_token |= t->top_token[i] == t->token;
        p = tok_bytes(tok, t->top_token[i], &n);
        if (i) http_buf_puts(top, ",");
        put_piece(top, p, n);
        http_buf_puts(top, ":");
        http_buf_number(top, t->top_logprob[i]);
    }
    if (!has_token && n_top) { /* the sampled token is always among them */
        http_buf_puts(top, ",");
        p = tok_bytes(tok, t->token, &n);
        put_piece(top, p, n);
        http_buf_puts(top, ":");
        http_buf_number(top, t->logprob);
    }
    http_buf_puts(top, "}");
}

static void put_logprobs(struct api_choice *c) {
    static const char *const names[] = {"{\"tokens\":[", "],\"token_logprobs\":[",
                                        "],\"top_logprobs\":[", "],\"text_offset\":["};
    struct http_buf *b = &c->job->out;
    if (!c->job->req.logprobs || !c->lp[LP_TOKENS].n) {
        http_buf_puts(b, "null");
        return;
    }
    for (int k = LP_TOKENS; k <= LP_OFFSETS; k++) {
        http_buf_puts(b, names[k]);
        http_buf_put(b, c->lp[k].p, c->lp[k].n);
        http_buf_clear(&c->lp[k]);
    }
    http_buf_puts(b, "]}");
}

/* ---- answers ----------------------------------------------------------------------------------
 */

static void put_choice(struct api_choice *c, const char *p, size_t n) {
    struct http_buf *b = &c->job->out;
    http_buf_printf(b, "{\"index\":%d,\"text\":", c->index);
    http_buf_json(b, p, n);
    http_buf_puts(b, ",\"logprobs\":");
    put_logprobs(c);
    http_buf_puts(b, ",\"finish_reason\":");
    c->finish_reason ? http_buf_printf(b, "\"%s\"}", c->finish_reason) : http_buf_puts(b, "null}");
}

static void put_chunk(struct api_choice *c, const char *p, size_t n) {
    api_event_begin(c->job);
    put_choice(c, p, n);
    api_event_end(c->job);
}

/* The prompt's own text where it was text, else what its tokens show. */
static void put_echo(struct api_choice *c) {
    struct api_job *j = c->job;
    const struct openai_prompt *p = &j->req.prompts[c->index / j->req.n];
    if (p->text) {
        http_buf_put(&c->content, p->text, p->n);
        return;
    }
    struct http_buf raw = {0};
    for (size_t i = 0; i < p->n_ids; i++) {
        size_t n;
        const char *s = tok_bytes(j->work.api->tok, p->ids[i], &n);
        if (!tok_is_control(j->work.api->tok, p->ids[i])) http_buf_put(&raw, s, n);
    }
    char *clean = malloc(3 * raw.n + 1);
    if (clean && raw.n) http_buf_put(&c->content, clean, utf8_scrub(clean, raw.p, raw.n));
    free(clean);
    http_buf_deinit(&raw);
}

static void text_start(struct api_choice *c) {
    if (!c->job->req.echo) return;
    put_echo(c);
    if (!c->job->req.stream) return;
    put_chunk(c, c->content.p ? c->content.p : "", c->content.n);
    http_buf_clear(&c->content);
}

static void text_delta(struct api_choice *c, const struct text_delta *d) {
    if (c->job->req.stream)
        put_chunk(c, d->s, d->n);
    else
        http_buf_put(&c->content, d->s, d->n);
}

static void text_last(struct api_choice *c) {
    put_chunk(c, "", 0);
}

static void text_whole(struct api_choice *c) {
    put_choice(c, c->content.p ? c->content.p : "", c->content.n);
}

static const struct api_shape text_shape = {
    .id_prefix = "cmpl-",
    .object = "text_completion",
    .chunk_object = "text_completion",
    .prompts = text_prompts,
    .delta = text_delta,
    .start = text_start,
    .logprob = text_logprob,
    .end = text_last,
    .whole = text_whole,
};

void api_text(struct http_exchange *x, void *user) {
    UNUSED(user);
    api_generate(x, OPENAI_TEXT, &text_shape);
}
