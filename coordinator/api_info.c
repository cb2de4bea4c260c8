/* coordinator/api_info.c: the routes that only look: models, version, metrics.
 *
 * Owns: nothing.  Called by: http.c (routes).  Fails how: cannot; 404 for a model of another name.
 * Tested by: tests/unit/test_api_look.c
 */
#include "coordinator/api_job.h"

#include <string.h>

#include "proto/log.h"

static void answer(struct http_exchange *x, int status, struct http_buf *b) {
    api_answer_json(x, status, b);
    http_buf_deinit(b);
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

void api_version(struct http_exchange *x, void *user) {
    UNUSED(user);
    struct http_buf b = {0};
    http_buf_printf(&b, "{\"version\":\"%s\",\"build\":\"%s\"}", OCTAVO_VERSION, log_build());
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
    put_metric(&b, "requests_refused_total", "counter", "Sequences that found the queue full.",
               (double)st.refused);
    put_metric(&b, "requests_expired_total", "counter", "Sequences that ran out of their time.",
               (double)st.expired);
    put_metric(&b, "preemptions_total", "counter", "Sequences sent back to wait, for want of pages.",
               (double)st.preempted);
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
