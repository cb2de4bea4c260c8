/* coordinator/api_chat.c: POST /v1/chat/completions: messages in, chunks or one message out.
 *
 * Owns: nothing, jobs are api_job.c's.  Called by: http.c (route), api_job.c (shape).
 * Fails how: struct openai_error.  Limits: see openai.h.  Tested by: tests/unit/test_api.c
 *
 * Reasoning is in reasoning_content, beside content. A choice's first chunk has the role, its last
 * the finish_reason and nothing else; log-probabilities ride on the first chunk written after their
 * token, which is later than the token when text was held back.
 */
#include "coordinator/api_job.h"

#include <string.h>

/* token path 2/9: the request is parsed, its messages are rendered and become token ids (tok.c). */
static int chat_prompts(struct api_job *j, struct openai_error *e) {
    const struct api *a = j->work.api;
    struct err_text err = {{0}};
    const char *param = NULL;
    struct chat_prompt p = {0};
    int rc = chat_render(a->family, a->tok, j->req.messages, j->req.tools, &j->req.chat, &p, &param,
                         &err);
    if (rc < 0) {
        chat_prompt_deinit(&p);
        if (rc == ERR_NOMEM) return openai_fail(e, rc, 503, NULL, NULL, "Out of memory.");
        return openai_fail(e, rc, 400, NULL, param ? param : "messages", "%s", err.text);
    }
    j->prompts = calloc(1, sizeof *j->prompts);
    if (!j->prompts) {
        chat_prompt_deinit(&p);
        return openai_fail(e, ERR_NOMEM, 503, NULL, NULL, "Out of memory.");
    }
    j->n_prompts = 1;
    j->prompts[0] = p.ids;
    p.ids = (struct tok_ids){0};
    j->in_reasoning = p.in_reasoning;
    chat_prompt_deinit(&p);
    return OK;
}

/* ---- log-probabilities ------------------------------------------------------------------------
 */

static void put_token(struct http_buf *b, const struct tok *t, int32_t token, double logprob) {
    size_t n;
    const char *p = tok_bytes(t, token, &n);
    char scrubbed[3 * 1024 + 1];
    size_t n_scrubbed = utf8_scrub(scrubbed, p, MIN(n, (size_t)1024));
    http_buf_puts(b, "{\"token\":");
    http_buf_json(b, scrubbed, n_scrubbed);
    http_buf_puts(b, ",\"logprob\":");
    http_buf_number(b, logprob);
    http_buf_puts(b, ",\"bytes\":[");
    for (size_t i = 0; i < n; i++) http_buf_printf(b, i ? ",%u" : "%u", (unsigned char)p[i]);
    http_buf_puts(b, "]");
}

static void chat_logprob(struct api_choice *c, const struct msg_token *t) {
    struct http_buf *b = &c->lp[0];
    const struct tok *tok = c->job->work.api->tok;
    if (b->n) http_buf_puts(b, ",");
    put_token(b, tok, t->token, t->logprob);
    http_buf_puts(b, ",\"top_logprobs\":[");
    int n = MIN(t->n_top, c->job->req.sampling.top_logprobs);
    for (int i = 0; i < n; i++) {
        if (i) http_buf_puts(b, ",");
        put_token(b, tok, t->top_token[i], t->top_logprob[i]);
        http_buf_puts(b, "}");
    }
    http_buf_puts(b, "]}");
}

/* Writes what has gathered and forgets it. */
static void put_logprobs(struct api_choice *c, struct http_buf *b) {
    if (!c->job->req.logprobs || !c->lp[0].n) {
        http_buf_puts(b, "null");
        return;
    }
    http_buf_puts(b, "{\"content\":[");
    http_buf_put(b, c->lp[0].p, c->lp[0].n);
    http_buf_puts(b, "],\"refusal\":null}");
    http_buf_clear(&c->lp[0]);
}

/* ---- a stream ---------------------------------------------------------------------------------
 */

static void chunk_begin(struct api_choice *c) {
    api_event_begin(c->job);
    http_buf_printf(&c->job->out, "{\"index\":%d,\"delta\":{", c->index);
}

static void chunk_end(struct api_choice *c, bool with_logprobs) {
    struct http_buf *b = &c->job->out;
    http_buf_puts(b, "},\"logprobs\":");
    with_logprobs ? put_logprobs(c, b) : http_buf_puts(b, "null");
    http_buf_puts(b, ",\"finish_reason\":");
    c->finish_reason ? http_buf_printf(b, "\"%s\"}", c->finish_reason) : http_buf_puts(b, "null}");
    api_event_end(c->job);
}

static void chat_start(struct api_choice *c) {
    if (!c->job->req.stream) return;
    chunk_begin(c);
    http_buf_puts(&c->job->out, "\"role\":\"assistant\",\"content\":\"\"");
    chunk_end(c, false);
}

static void chat_end(struct api_choice *c) {
    chunk_begin(c);
    chunk_end(c, true);
}

static void put_call_head(struct http_buf *b, const char *name, size_t n) {
    uint64_t r[2];
    api_random(r, sizeof r);
    http_buf_printf(b,
                    "\"id\":\"call_%016llx%08llx\",\"type\":\"function\",\"function\":{\"name\":",
                    (unsigned long long)r[0], (unsigned long long)(r[1] >> 32));
    http_buf_json(b, name, n);
    http_buf_puts(b, ",\"arguments\":");
}

static void stream_delta(struct api_choice *c, const struct text_delta *d) {
    struct http_buf *b = &c->job->out;
    chunk_begin(c);
    switch (d->kind) {
    case TEXT_REASONING:
        http_buf_puts(b, "\"reasoning_content\":");
        http_buf_json(b, d->s, d->n);
        break;
    case TEXT_CONTENT:
        http_buf_puts(b, "\"content\":");
        http_buf_json(b, d->s, d->n);
        break;
    case TEXT_TOOL_NAME:
        http_buf_printf(b, "\"tool_calls\":[{\"index\":%d,", d->call);
        put_call_head(b, d->s, d->n);
        http_buf_puts(b, "\"\"}}]");
        break;
    case TEXT_TOOL_ARGS:
        http_buf_printf(b, "\"tool_calls\":[{\"index\":%d,\"function\":{\"arguments\":", d->call);
        http_buf_json(b, d->s, d->n);
        http_buf_puts(b, "}}]");
        break;
    }
    chunk_end(c, true);
}

/* ---- one answer -------------------------------------------------------------------------------
 */

/* The call whose arguments are being gathered (in `content` order they follow its name) is closed
 * before the next begins. */
static void close_call(struct api_choice *c, struct http_buf *args) {
    if (c->open_call < 0) return;
    http_buf_json(&c->calls, args->p ? args->p : "", args->n);
    http_buf_puts(&c->calls, "}}");
    http_buf_clear(args);
    c->open_call = -1;
}

static void gather_delta(struct api_choice *c, const struct text_delta *d) {
    struct http_buf *args = &c->lp[1];
    switch (d->kind) {
    case TEXT_REASONING:
        http_buf_put(&c->reasoning, d->s, d->n);
        break;
    case TEXT_CONTENT:
        http_buf_put(&c->content, d->s, d->n);
        break;
    case TEXT_TOOL_NAME:
        close_call(c, args);
        http_buf_puts(&c->calls, c->n_calls++ ? ",{" : "{");
        put_call_head(&c->calls, d->s, d->n);
        c->open_call = d->call;
        break;
    case TEXT_TOOL_ARGS:
        assert(d->call == c->open_call);
        http_buf_put(args, d->s, d->n);
        break;
    }
}

static void chat_delta(struct api_choice *c, const struct text_delta *d) {
    c->job->req.stream ? stream_delta(c, d) : gather_delta(c, d);
}

static void chat_whole(struct api_choice *c) {
    struct http_buf *b = &c->job->out;
    close_call(c, &c->lp[1]);
    http_buf_printf(b, "{\"index\":%d,\"message\":{\"role\":\"assistant\",\"content\":", c->index);
    if (c->n_calls && !c->content.n)
        http_buf_puts(b, "null");
    else
        http_buf_json(b, c->content.p ? c->content.p : "", c->content.n);
    http_buf_puts(b, ",\"refusal\":null");
    if (c->reasoning.n) {
        http_buf_puts(b, ",\"reasoning_content\":");
        http_buf_json(b, c->reasoning.p, c->reasoning.n);
    }
    if (c->n_calls) {
        http_buf_puts(b, ",\"tool_calls\":[");
        http_buf_put(b, c->calls.p, c->calls.n);
        http_buf_puts(b, "]");
    }
    http_buf_puts(b, "},\"logprobs\":");
    put_logprobs(c, b);
    http_buf_printf(b, ",\"finish_reason\":\"%s\"}", c->finish_reason);
}

static const struct api_shape chat_shape = {
    .id_prefix = "chatcmpl-",
    .object = "chat.completion",
    .chunk_object = "chat.completion.chunk",
    .prompts = chat_prompts,
    .delta = chat_delta,
    .start = chat_start,
    .logprob = chat_logprob,
    .end = chat_end,
    .whole = chat_whole,
};

void api_chat(struct http_exchange *x, void *user) {
    UNUSED(user);
    api_generate(x, OPENAI_CHAT, &chat_shape);
}
