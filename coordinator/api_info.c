/* coordinator/api_info.c: the routes that only look: models, health, workers, version, metrics.
 *
 * Owns: nothing.  Called by: http.c (routes).  Fails how: cannot; 404 for a model of another name.
 * Tested by: tests/unit/test_api_look.c
 *
 * All of them read one engine_status, so that no two tell different stories. /health/live says that
 * this process works, /health and /health/ready that an answer can be expected now.
 */
#include "coordinator/api_job.h"

#include <string.h>

static void answer(struct http_exchange *x, int status, struct http_buf *b) {
    api_answer_json(x, status, b);
    http_buf_deinit(b);
}

static void put_string(struct http_buf *b, const char *s) { /* s comes from outside: any bytes */
    char clean[3 * 512 + 1];
    http_buf_json(b, clean, utf8_scrub(clean, s, strnlen(s, 512)));
}

/* ---- models -----------------------------------------------------------------------------------
 */

static void put_model(struct http_buf *b, const struct api *a) {
    http_buf_puts(b, "{\"id\":");
    http_buf_json(b, a->model_name, strlen(a->model_name));
    http_buf_printf(b,
                    ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"octavo\","
                    "\"max_model_len\":%lld}",
                    (long long)a->started, (long long)a->o.context);
}

void api_models(struct http_exchange *x, void *user) {
    struct http_buf b = {0};
    http_buf_puts(&b, "{\"object\":\"list\",\"data\":[");
    put_model(&b, user);
    http_buf_puts(&b, "]}");
    answer(x, 200, &b);
}

void api_model(struct http_exchange *x, void *user) {
    struct api *a = user;
    if (strcmp(http_tail(x), a->model_name)) {
        char clean[3 * 512 + 1], message[2048];
        clean[utf8_scrub(clean, http_tail(x), strnlen(http_tail(x), 512))] = 0;
        snprintf(message, sizeof message, "The model `%s` does not exist here.", clean);
        http_answer_error(x, 404, "invalid_request_error", "model", "model_not_found", "", message);
        return;
    }
    struct http_buf b = {0};
    put_model(&b, a);
    answer(x, 200, &b);
}

/* ---- health -----------------------------------------------------------------------------------
 */

static void answer_health(struct http_exchange *x, bool ok, const char *state, const char *why) {
    struct http_buf b = {0};
    http_buf_printf(&b, "{\"status\":\"%s\",\"state\":\"%s\"", ok ? "ok" : state, state);
    if (!ok && *why) {
        http_buf_puts(&b, ",\"message\":");
        put_string(&b, why);
    }
    http_buf_puts(&b, "}");
    answer(x, ok ? 200 : 503, &b);
}

void api_live(struct http_exchange *x, void *user) {
    struct api *a = user;
    struct engine_status st;
    engine_status(a->engine, &st);
    answer_health(x, st.state != ENGINE_FAILED, engine_state_name(st.state), st.why);
}

void api_ready(struct http_exchange *x, void *user) {
    struct api *a = user;
    struct engine_status st;
    engine_status(a->engine, &st);
    enum engine_state s = a->draining && st.state != ENGINE_FAILED ? ENGINE_DRAINING : st.state;
    answer_health(x, s == ENGINE_READY, engine_state_name(s), st.why);
}

/* Is what was asked for being worked on? Yes while nothing is asked, and while the step in flight is
 * within its bound, which follows its size: a long prompt is not a stall. */
void api_progress(struct http_exchange *x, void *user) {
    struct api *a = user;
    struct engine_status st;
    engine_status(a->engine, &st);
    const char *state = engine_state_name(st.state);
    bool works = st.state == ENGINE_READY || st.state == ENGINE_DRAINING;
    bool ok = works && st.step_age_us <= st.step_bound_us;
    struct http_buf b = {0};
    http_buf_printf(&b,
                    "{\"status\":\"%s\",\"state\":\"%s\",\"running\":%d,\"waiting\":%d,"
                    "\"steps\":%llu,\"step\":",
                    ok ? "ok" : works ? "stuck" : state, state, st.running, st.waiting,
                    (unsigned long long)st.steps);
    if (st.step)
        http_buf_printf(&b, "{\"id\":%llu,\"rows\":%d,\"age_ms\":%llu,\"bound_ms\":%llu}}",
                        (unsigned long long)st.step, st.step_rows,
                        (unsigned long long)(st.step_age_us / 1000),
                        (unsigned long long)(st.step_bound_us / 1000));
    else
        http_buf_puts(&b, "null}");
    answer(x, ok ? 200 : 503, &b);
}

static void put_worker(struct http_buf *b, const struct engine_worker *w) {
    http_buf_printf(
        b, "{\"rank\":%d,\"pid\":%lld,\"start_time\":%llu,\"state\":\"%s\",\"device\":", w->rank,
        (long long)w->pid, (unsigned long long)w->start_time, worker_state_name(w->state));
    put_string(b, w->device);
    http_buf_printf(b, ",\"last_step\":%llu,\"age_ms\":", (unsigned long long)w->last_step);
    if (w->age_us == UINT64_MAX)
        http_buf_puts(b, "null");
    else
        http_buf_printf(b, "%llu", (unsigned long long)(w->age_us / 1000));
    http_buf_printf(b,
                    ",\"load_bytes\":%llu,\"load_total\":%llu,\"memory_used_bytes\":%llu,"
                    "\"memory_free_bytes\":%llu,\"restarts\":%d,\"restarts_by_cause\":{",
                    (unsigned long long)w->load_bytes, (unsigned long long)w->load_total,
                    (unsigned long long)w->memory_used_bytes,
                    (unsigned long long)w->memory_free_bytes, w->restarts);
    for (int c = 0; c < ENGINE_CAUSES; c++)
        http_buf_printf(b, "%s\"%s\":%d", c ? "," : "", engine_cause_name((enum engine_cause)c),
                        w->restarts_by[c]);
    http_buf_puts(b, "},\"last_error\":");
    w->last_error[0] ? put_string(b, w->last_error) : http_buf_puts(b, "null");
    http_buf_puts(b, "}");
}

void api_workers(struct http_exchange *x, void *user) {
    struct api *a = user;
    struct engine_status st;
    engine_status(a->engine, &st);
    struct http_buf b = {0};
    http_buf_puts(&b, "{\"data\":[");
    for (int i = 0; i < st.n_workers; i++) {
        if (i) http_buf_puts(&b, ",");
        put_worker(&b, &st.workers[i]);
    }
    http_buf_puts(&b, "]}");
    answer(x, 200, &b);
}

void api_version(struct http_exchange *x, void *user) {
    UNUSED(user);
    struct http_buf b = {0};
    http_buf_printf(&b, "{\"version\":\"%s\"}", OCTAVO_VERSION);
    answer(x, 200, &b);
}

/* ---- metrics ----------------------------------------------------------------------------------
 */

static void put_metric(struct http_buf *b, const char *name, const char *kind, const char *help,
                       double v) {
    http_buf_printf(b, "# HELP octavo_%s %s\n# TYPE octavo_%s %s\noctavo_%s %.15g\n", name, help,
                    name, kind, name, v);
}

void api_metrics(struct http_exchange *x, void *user) {
    struct api *a = user;
    struct engine_status st;
    engine_status(a->engine, &st);
    struct http_buf b = {0};
    put_metric(&b, "ready", "gauge", "1 when answers can be expected.",
               st.state == ENGINE_READY && !a->draining);
    put_metric(&b, "sequences_running", "gauge", "Sequences that hold a slot.", st.running);
    put_metric(&b, "sequences_waiting", "gauge", "Sequences in the queue.", st.waiting);
    put_metric(&b, "requests_in_progress", "gauge", "HTTP requests not answered yet.", a->n_works);
    put_metric(&b, "connections", "gauge", "Open HTTP connections.", http_connections(a->http));
    put_metric(&b, "pages_used", "gauge", "Cache pages in use.", (double)st.pages_used);
    put_metric(&b, "pages_total", "gauge", "Cache pages there are.", (double)st.pages_total);
    put_metric(&b, "pages_kept", "gauge", "Cache pages not in use whose content may be found again.",
               (double)st.pages_kept);
    put_metric(&b, "requests_total", "counter", "Generation requests received.",
               (double)a->n_requests);
    put_metric(&b, "steps_total", "counter", "Steps completed.", (double)st.steps);
    put_metric(&b, "restarts_total", "counter", "Worker restarts.", (double)st.restarts);
    put_metric(&b, "reclaims_total", "counter", "Waits for device memory after a death.",
               (double)st.reclaims);
    put_metric(&b, "reclaim_seconds_total", "counter", "Seconds waited for device memory.",
               st.reclaim_seconds);
    put_metric(&b, "prompt_tokens_total", "counter", "Prompt tokens taken.",
               (double)st.prompt_tokens);
    put_metric(&b, "cached_tokens_total", "counter", "Of these, found in the cache.",
               (double)st.cached_tokens);
    put_metric(&b, "output_tokens_total", "counter", "Tokens sampled.", (double)st.output_tokens);
    http_answer(x, 200, "text/plain; version=0.0.4; charset=utf-8", "", b.p ? b.p : "", b.n);
    http_buf_deinit(&b);
}
