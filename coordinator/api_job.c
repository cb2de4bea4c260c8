/* coordinator/api_job.c: from prompts to engine requests, from engine events to an answer.
 *
 * Owns: jobs: prompts, choices, their text machines.
 * Called by: api_chat.c, api_text.c through api_generate; the engine, through on_event.
 * Fails how: before the first byte of the answer an error is a status; after it, an event
 * `data: {"error":{…}}` is the last of the stream.
 * Limits: LIMIT_SEQUENCES choices, LIMIT_ANSWER_BYTES of an answer that is not streamed.  Tested
 * by: tests/unit/test_api.c
 *
 * The head of a stream is written with the first token or, while that is long in coming, with a
 * comment after LIMIT_QUIET_SECONDS, not at admission: a request that dies soon can still be
 * answered with a status that a client understands. Whatever ends a choice, its last chunk waits
 * for the engine's ENGINE_FINISHED, so that usage is what was really computed.
 */
#include "coordinator/api_job.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct api_job *job_of(struct api_work *w) {
    return (struct api_job *)w;
}

/* ---- life -------------------------------------------------------------------------------------
 */

static void job_prepare(struct api_work *w) {
    struct api_job *j = job_of(w);
    struct openai_defaults d;
    api_defaults(w->api, &d);
    if (openai_parse(&j->req, j->kind, w->body, w->n_body, &d, &w->err) < 0) return;
    if (j->shape->prompts(j, &w->err) < 0) return;
    assert(j->n_prompts > 0);
    for (int i = 0; i < j->n_prompts; i++)
        if ((int64_t)j->prompts[i].n >= w->api->o.context) {
            openai_fail(
                &w->err, ERR_LIMIT, 400, "context_length_exceeded",
                j->kind == OPENAI_CHAT ? "messages" : "prompt",
                "This model's maximum context length is %lld tokens, but the prompt has %zu "
                "tokens. Please shorten it.",
                (long long)w->api->o.context, j->prompts[i].n);
            return;
        }
}

static void job_cancel(struct api_work *w) {
    struct api_job *j = job_of(w);
    for (int i = 0; i < j->n_choices; i++) {
        struct api_choice *c = &j->choices[i];
        if (c->submitted && !c->finished) engine_cancel(w->api->engine, c->id);
        c->finished = true;
    }
}

static void job_free(struct api_work *w) {
    struct api_job *j = job_of(w);
    for (int i = 0; j->choices && i < j->n_choices; i++) {
        struct api_choice *c = &j->choices[i];
        assert(!c->submitted || c->finished);
        if (c->text) text_free(c->text);
        http_buf_deinit(&c->content);
        http_buf_deinit(&c->reasoning);
        http_buf_deinit(&c->calls);
        for (size_t k = 0; k < ARRAY_LEN(c->lp); k++) http_buf_deinit(&c->lp[k]);
    }
    for (int i = 0; j->prompts && i < j->n_prompts; i++) tok_ids_deinit(&j->prompts[i]);
    free(j->choices);
    free(j->prompts);
    openai_request_deinit(&j->req);
    api_key_release(j->key, j->n_held);
    http_buf_deinit(&j->out);
    free(j);
}

/* Ends everything with an error, in whichever way the client can still be told. */
static void job_fail(struct api_job *j, const struct openai_error *e) {
    struct http_exchange *x = j->work.x;
    job_cancel(&j->work);
    if (!j->streaming) {
        api_answer_error(x, j->work.api, e);
    } else {
        http_buf_clear(&j->out);
        http_buf_puts(&j->out, "data: ");
        api_put_error(&j->out, e);
        http_buf_puts(&j->out, "\n\n");
        http_stream_write(x, j->out.p, j->out.n);
        http_stream_end(x);
    }
    api_work_end(&j->work);
}

/* ---- writing ----------------------------------------------------------------------------------
 */

static void put_opening(struct api_job *j, const char *object) {
    http_buf_printf(&j->out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", j->id,
                    object, (long long)j->created);
    http_buf_json(&j->out, j->work.api->model_name, strlen(j->work.api->model_name));
    http_buf_puts(&j->out, ",\"choices\":[");
}

static void put_usage(struct api_job *j) {
    int64_t prompt = 0, cached = 0, output = 0, reasoning = 0;
    for (int i = 0; i < j->n_choices; i++) {
        const struct api_choice *c = &j->choices[i];
        if (i % j->req.n == 0) {
            prompt += (int64_t)j->prompts[i / j->req.n].n;
            cached += c->n_cached;
        }
        output += c->n_output;
        reasoning += c->n_reasoning;
    }
    http_buf_printf(&j->out,
                    "{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,\"total_tokens\":%lld,"
                    "\"prompt_tokens_details\":{\"cached_tokens\":%lld},"
                    "\"completion_tokens_details\":{\"reasoning_tokens\":%lld}}",
                    (long long)prompt, (long long)output, (long long)(prompt + output),
                    (long long)cached, (long long)reasoning);
}

static void stream_begin(struct api_job *j) {
    if (j->streaming) return;
    j->streaming = true;
    http_stream_begin(j->work.x, 200, "text/event-stream; charset=utf-8");
}

/* A stream that waits long (a model that loads, a long prompt, a rank that restarts) sends
 * comments, which clients skip, so that nothing on the way takes it for dead. */
static void job_beat(struct api_work *w, uint64_t now_ms) {
    struct api_job *j = job_of(w);
    if (!j->req.stream || now_ms - j->written_ms < LIMIT_QUIET_SECONDS * 1000) return;
    j->written_ms = now_ms;
    stream_begin(j);
    http_stream_write(w->x, ": waiting\n\n", 11);
}

void api_event_begin(struct api_job *j) {
    stream_begin(j);
    http_buf_clear(&j->out);
    http_buf_puts(&j->out, "data: ");
    put_opening(j, j->shape->chunk_object);
}

/* A refused write is not acted on: the client's end comes as on_gone, from the loop. */
void api_event_end(struct api_job *j) {
    http_buf_puts(&j->out, j->req.include_usage ? "],\"usage\":null}\n\n" : "]}\n\n");
    j->written_ms = uv_now(j->work.api->loop);
    http_stream_write(j->work.x, j->out.p, j->out.n);
}

static void job_answer(struct api_job *j) {
    struct http_exchange *x = j->work.x;
    if (j->req.stream) {
        if (j->req.include_usage) {
            api_event_begin(j);
            http_buf_puts(&j->out, "],\"usage\":");
            put_usage(j);
            http_buf_puts(&j->out, "}\n\n");
            http_stream_write(x, j->out.p, j->out.n);
        }
        http_stream_write(x, "data: [DONE]\n\n", 14);
        http_stream_end(x);
    } else {
        http_buf_clear(&j->out);
        put_opening(j, j->shape->object);
        for (int i = 0; i < j->n_choices; i++) {
            if (i) http_buf_puts(&j->out, ",");
            j->shape->whole(&j->choices[i]);
        }
        http_buf_puts(&j->out, "],\"usage\":");
        put_usage(j);
        http_buf_puts(&j->out, "}");
        api_answer_json(x, 200, &j->out);
    }
    api_work_end(&j->work);
}

/* ---- events -----------------------------------------------------------------------------------
 */

static void choice_start(struct api_choice *c) {
    if (c->started) return;
    c->started = true;
    c->job->shape->start(c);
}

static size_t gathered(const struct api_choice *c) {
    size_t n = c->content.n + c->reasoning.n + c->calls.n;
    for (size_t k = 0; k < ARRAY_LEN(c->lp); k++) n += c->lp[k].n;
    return n;
}

static void on_token(struct api_choice *c, const struct msg_token *t) {
    if (c->stopped) return; /* sampled before the engine heard of the stop string */
    c->n_output++;
    choice_start(c);
    if (c->job->req.logprobs) c->job->shape->logprob(c, t);
    if (text_feed(c->text, t->token)) {
        c->stopped = true;
        engine_finish(c->job->work.api->engine, c->id);
    } else if (gathered(c) > LIMIT_ANSWER_BYTES / (size_t)c->job->n_choices) {
        struct openai_error e;
        openai_fail(&e, ERR_LIMIT, 400, "answer_too_large", NULL,
                    "The answer is too large to be sent whole; ask for a stream.");
        job_fail(c->job, &e);
    }
}

static void on_failed(struct api_choice *c, const struct engine_event *ev) {
    struct openai_error e;
    struct engine_status st;
    if (ev->reason == ENGINE_TIMEOUT) {
        openai_fail(&e, ERR_TIMEOUT, 504, "timeout", NULL,
                    "The request was not done in the time that it was given.");
        job_fail(c->job, &e);
        return;
    }
    engine_status(c->job->work.api->engine, &st);
    bool later =
        ev->reason == ENGINE_CANCELLED || st.state == ENGINE_DRAINING || st.state == ENGINE_FAILED;
    openai_fail(&e, ERR_STATE, later ? 503 : 500, NULL, NULL, "%s",
                ev->error && *ev->error ? ev->error : "The request was ended by the server.");
    job_fail(c->job, &e);
}

static void on_finished(struct api_choice *c, const struct engine_event *ev) {
    struct api_job *j = c->job;
    c->finished = true;
    if (!c->stopped && ev->reason != ENGINE_STOP && ev->reason != ENGINE_LENGTH) {
        on_failed(c, ev);
        return;
    }
    choice_start(c);
    bool truncated = !c->stopped && ev->reason == ENGINE_LENGTH;
    if (!c->stopped && ev->stop_token >= 0) {
        c->n_output++;
        if (j->req.include_stop && !tok_is_eog(j->work.api->tok, ev->stop_token))
            text_feed(c->text, ev->stop_token);
    }
    text_end(c->text, truncated);
    c->n_prompt = ev->n_prompt;
    c->n_cached = ev->n_cached;
    c->n_reasoning = text_reasoning_tokens(c->text);
    c->finish_reason = truncated ? "length" : text_calls(c->text) > 0 ? "tool_calls" : "stop";
    if (j->req.stream) j->shape->end(c);
    if (--j->n_open == 0) job_answer(j);
}

static void on_event(void *user, const struct engine_event *ev) {
    struct api_choice *c = user;
    assert(!c->finished);
    if (ev->finished)
        on_finished(c, ev);
    else
        on_token(c, ev->token);
}

static void on_delta(void *user, const struct text_delta *d) {
    struct api_choice *c = user;
    c->job->shape->delta(c, d);
}

/* ---- submission -------------------------------------------------------------------------------
 */

/* The context was looked at before: what is smaller is the cache. */
static int fail_no_room(const struct api_job *j, size_t n_prompt, struct openai_error *e) {
    struct engine_status st;
    engine_status(j->work.api->engine, &st);
    int64_t cache = st.pages_total * LIMIT_PAGE_TOKENS;
    return openai_fail(e, ERR_LIMIT, 400, "context_length_exceeded",
                       j->kind == OPENAI_CHAT ? "messages" : "prompt",
                       "This server's cache holds %lld tokens, and the prompt's %zu tokens leave "
                       "no room in it. Please shorten it.",
                       (long long)cache, n_prompt);
}

/* The shorter of what the request and what the server allows, less what has passed. */
static uint64_t timeout_us(const struct api_job *j) {
    double s = j->work.api->o.request_timeout_s;
    if (j->req.timeout_s > 0 && (s <= 0 || j->req.timeout_s < s)) s = j->req.timeout_s;
    if (s <= 0) return 0;
    double passed = (double)(uv_now(j->work.api->loop) - j->begun_ms) / 1e3;
    return s > passed ? (uint64_t)((s - passed) * 1e6) + 1 : 1;
}

static int choice_submit(struct api_choice *c, struct openai_error *e) {
    struct api_job *j = c->job;
    struct api *a = j->work.api;
    const struct openai_request *r = &j->req;
    const struct tok_ids *p = &j->prompts[c->index / r->n];
    struct text_options to = {
        .chat = j->kind == OPENAI_CHAT,
        .in_reasoning = j->in_reasoning,
        .parse_tools = j->kind == OPENAI_CHAT && r->tools,
        .tools = r->tools,
        .stops = r->stops,
        .n_stops = r->n_stops,
        .include_stop = r->include_stop,
    };
    if (text_new(&c->text, a->tok, &to, on_delta, c) < 0)
        return openai_fail(e, ERR_NOMEM, 503, NULL, NULL, "Out of memory.");
    int64_t room = a->o.context - (int64_t)p->n;
    struct engine_request q = {
        .tokens = p->ids,
        .n_tokens = (int32_t)p->n,
        .max_tokens = (int32_t)(r->max_tokens ? MIN(r->max_tokens, room) : room),
        .ignore_eos = r->ignore_eos,
        .stop_ids = r->stop_ids,
        .n_stop_ids = r->n_stop_ids,
        .priority = (int)r->priority,
        .timeout_us = timeout_us(j),
        .cache_salt = r->cache_salt,
        .n_cache_salt = r->cache_salt ? strlen(r->cache_salt) : 0,
        .sampling = r->sampling,
        .sink = on_event,
        .user = c,
    };
    q.sampling.seed += (uint64_t)(c->index % r->n);
    switch (engine_submit(a->engine, &q, &c->id)) {
    case OK:
        c->submitted = true;
        return OK;
    case ERR_LIMIT:
        return fail_no_room(j, p->n, e);
    case ERR_FULL:
        return openai_fail(e, ERR_FULL, 503, "queue_full", NULL,
                           "The queue is full; try again later.");
    default:
        return openai_fail(e, ERR_STATE, 503, "unavailable", NULL,
                           "The server takes no new requests now.");
    }
}

static void job_proceed(struct api_work *w) {
    struct api_job *j = job_of(w);
    json_object_del(j->req.root, "messages"); /* they are tokens now */
    j->req.messages = NULL;
    j->n_choices = j->n_prompts * j->req.n;
    j->choices = calloc((size_t)j->n_choices, sizeof *j->choices);
    struct openai_error e;
    if (!j->choices) {
        j->n_choices = 0;
        openai_fail(&e, ERR_NOMEM, 503, NULL, NULL, "Out of memory.");
        job_fail(j, &e);
        return;
    }
    if (api_key_hold(w->api, j->key, j->n_choices, &e) < 0) {
        job_fail(j, &e);
        return;
    }
    j->n_held = j->n_open = j->n_choices;
    for (int i = 0; i < j->n_choices; i++) {
        struct api_choice *c = &j->choices[i];
        c->job = j;
        c->index = i;
        c->open_call = -1;
        if (choice_submit(c, &e) < 0) {
            job_fail(j, &e);
            return;
        }
    }
}

void api_generate(struct http_exchange *x, enum openai_kind kind, const struct api_shape *shape) {
    struct api *a = api_of(x);
    struct openai_error e;
    struct api_job *j = a->draining ? NULL : calloc(1, sizeof *j);
    if (!j) {
        openai_fail(&e, ERR_STATE, 503, a->draining ? "draining" : NULL, NULL,
                    a->draining ? "The server is draining; try another or try again later."
                                : "Out of memory.");
        api_answer_error(x, a, &e);
        return;
    }
    a->n_requests++;
    j->key = api_key_of(x);
    if (api_key_begin(a, j->key, &e) < 0) {
        free(j);
        api_answer_error(x, a, &e);
        return;
    }
    j->kind = kind;
    j->shape = shape;
    j->created = (int64_t)time(NULL);
    j->begun_ms = j->written_ms = uv_now(a->loop);
    uint64_t r[2];
    api_random(r, sizeof r);
    snprintf(j->id, sizeof j->id, "%s%016llx%08llx", shape->id_prefix, (unsigned long long)r[0],
             (unsigned long long)(r[1] >> 32));
    j->work.prepare = job_prepare;
    j->work.proceed = job_proceed;
    j->work.cancel = job_cancel;
    j->work.free = job_free;
    j->work.beat = job_beat;
    api_work_start(&j->work, x);
}
