/* coordinator/api_canary.c: GET /health/canary: is a token really produced now?
 *
 * Owns: the one request to the engine.  Called by: http.c (routes), for `octavo probe canary`.
 * Fails how: 503 with the state, or "late" after LIMIT_CANARY_SECONDS.
 * Tested by: tests/unit/test_api_look.c, tests/faults/test_probe.py, test_health.py
 *
 * The other health routes tell what is known; this one finds out. A prompt of a few tokens goes
 * before everything that waits and costs one row of a step, so it disturbs nobody. Where even that
 * finds no room, because every slot is taken, a token that anybody got after we asked is as good
 * a proof: a service that is full is not a service that is ill.
 */
#include "coordinator/api_job.h"

#include <stdlib.h>
#include <string.h>

struct canary {
    struct api_work work; /* first */
    uint64_t id;
    bool submitted;
    bool got;
    int32_t token;
    uint64_t begun_ms, tokens_before;
};

static struct canary *canary_of(struct api_work *w) {
    return (struct canary *)w;
}

static void cancel(struct api_work *w) {
    struct canary *c = canary_of(w);
    if (c->submitted) engine_cancel(w->api->engine, c->id);
    c->submitted = false;
}

static void free_canary(struct api_work *w) {
    free(w);
}

static void prepare(struct api_work *w) {
    UNUSED(w); /* there is no body */
}

/* status: "ok", or what is the matter. */
static void end(struct canary *c, const char *status, const char *by, const char *message) {
    bool ok = !strcmp(status, "ok");
    struct http_buf b = {0};
    cancel(&c->work);
    http_buf_printf(&b, "{\"status\":\"%s\",\"by\":\"%s\",\"ms\":%llu,\"token\":", status, by,
                    (unsigned long long)(uv_now(c->work.api->loop) - c->begun_ms));
    if (c->got)
        http_buf_printf(&b, "%d", c->token);
    else
        http_buf_puts(&b, "null");
    if (!ok) {
        http_buf_puts(&b, ",\"message\":");
        http_buf_json(&b, message, strlen(message));
    }
    http_buf_puts(&b, "}");
    api_answer_json(c->work.x, ok ? 200 : 503, &b);
    http_buf_deinit(&b);
    api_work_end(&c->work);
}

static void on_event(void *user, const struct engine_event *ev) {
    struct canary *c = user;
    if (!ev->finished) {
        c->got = true;
        c->token = ev->token->token;
        return;
    }
    c->submitted = false;
    if (c->got)
        end(c, "ok", "canary", "");
    else
        end(c, "failed", "canary", ev->error && *ev->error ? ev->error : "The request was ended.");
}

static bool is_ready(struct canary *c) {
    struct engine_status st;
    if (api_state(c->work.api, &st) == ENGINE_READY) return true;
    end(c, engine_state_name(st.state), "state", st.why);
    return false;
}

static void beat(struct api_work *w, uint64_t now_ms) {
    struct canary *c = canary_of(w);
    struct engine_status st;
    engine_status(w->api->engine, &st);
    if (st.output_tokens > c->tokens_before)
        end(c, "ok", "streams", "");
    else if (is_ready(c) && now_ms - c->begun_ms > LIMIT_CANARY_SECONDS * 1000u)
        end(c, "late", "canary", "No token came in time.");
}

static void proceed(struct api_work *w) {
    static const int32_t prompt[] = {1, 2, 3};
    struct canary *c = canary_of(w);
    struct engine_request r = {.tokens = prompt,
                               .n_tokens = ARRAY_LEN(prompt),
                               .max_tokens = 1,
                               .ignore_eos = true,
                               .priority = ENGINE_PRIORITY_FIRST,
                               .sampling = {.top_p = 1, .repetition = 1},
                               .sink = on_event,
                               .user = c};
    if (!is_ready(c)) return;
    if (engine_submit(w->api->engine, &r, &c->id) == OK)
        c->submitted = true; /* else a token of somebody else's will do */
}

void api_canary(struct http_exchange *x, void *user) {
    struct api *a = user;
    struct engine_status st;
    struct canary *c = calloc(1, sizeof *c);
    if (!c) {
        http_answer_error(x, 503, "server_error", NULL, NULL, "", "Out of memory.");
        return;
    }
    engine_status(a->engine, &st);
    c->tokens_before = st.output_tokens;
    c->begun_ms = uv_now(a->loop);
    c->work.prepare = prepare;
    c->work.proceed = proceed;
    c->work.cancel = cancel;
    c->work.free = free_canary;
    c->work.beat = beat;
    api_work_start(&c->work, x);
}
