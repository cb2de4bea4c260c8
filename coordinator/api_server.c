/* coordinator/api_server.c: the API as a whole: routes, keys, start, drain, stop.
 *
 * Owns: struct api.  Called by: cmd_serve.c.  Fails how: api_start: ERR_SETUP and a sentence.
 * Tested by: tests/unit/test_api.c
 *
 * There is one guard in front of all routes, and it lets a request pass without a key only for a
 * route that is marked open in the table; paths are in their normal form before they are compared.
 * So a new route is guarded unless somebody opens it.
 */
#include "coordinator/api_job.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

const struct http_route api_routes[] = {
    {"/v1/chat/completions", HTTP_VERB_POST, api_chat, false},
    {"/v1/completions", HTTP_VERB_POST, api_text, false},
    {"/v1/models", HTTP_VERB_GET, api_models, false},
    {"/v1/models/+", HTTP_VERB_GET, api_model, false},
    {"/v1/workers", HTTP_VERB_GET, api_workers, false},
    {"/v1/workers/+", HTTP_VERB_GET, api_worker, false},
    {"/tokenize", HTTP_VERB_POST, api_tokenize, false},
    {"/detokenize", HTTP_VERB_POST, api_detokenize, false},
    {"/apply-template", HTTP_VERB_POST, api_apply_template, false},
    {"/v1/restart/+", HTTP_VERB_POST, api_restart, false},
    {"/metrics", HTTP_VERB_GET, api_metrics, false},
    {"/version", HTTP_VERB_GET, api_version, false},
    {"/health", HTTP_VERB_GET, api_ready, true},
    {"/health/live", HTTP_VERB_GET, api_live, true},
    {"/health/ready", HTTP_VERB_GET, api_ready, true},
    {"/health/progress", HTTP_VERB_GET, api_progress, false},
    {"/health/canary", HTTP_VERB_GET, api_canary, false},
};
const int api_n_routes = (int)ARRAY_LEN(api_routes);

/* ---- options ----------------------------------------------------------------------------------
 */

void api_options_init(struct api_options *o) {
    *o = (struct api_options){.host = "127.0.0.1",
                              .port = 8000,
                              .context = LIMIT_CONTEXT_TOKENS,
                              .temperature = 1,
                              .top_p = 1,
                              .repetition = 1};
}

/* A value out of its range in the file is passed over: it is a hint, not a contract. */
static void get_hint(const struct gguf *g, const char *key, double min, double max, double *out) {
    double v;
    if (gguf_get_f64(g, key, &v, NULL) == OK && v >= min && v <= max) *out = v;
}

void api_options_from_gguf(struct api_options *o, const struct gguf *g) {
    get_hint(g, "general.sampling.temp", 0, 2, &o->temperature);
    get_hint(g, "general.sampling.top_p", 0, 1, &o->top_p);
    get_hint(g, "general.sampling.min_p", 0, 1, &o->min_p);
    get_hint(g, "general.sampling.penalty_repeat", 0.01, 100, &o->repetition);
    uint64_t k;
    if (gguf_get_u64(g, "general.sampling.top_k", &k, NULL) == OK && k <= INT32_MAX)
        o->top_k = (int)k;
}

void api_defaults(const struct api *a, struct openai_defaults *d) {
    *d = (struct openai_defaults){.model = a->model_name,
                                  .vocab = tok_vocab(a->tok),
                                  .temperature = a->o.temperature,
                                  .top_p = a->o.top_p,
                                  .min_p = a->o.min_p,
                                  .repetition = a->o.repetition,
                                  .top_k = a->o.top_k};
    api_random(&d->random_seed, sizeof d->random_seed);
}

static bool guard(struct http_exchange *x, const struct http_route *r, void *user) {
    UNUSED(user);
    if ((r && r->open) || api_has_key(x)) return true;
    const char *auth = http_header(x, "authorization");
    http_answer_error(x, 401, "invalid_request_error", NULL, "invalid_api_key",
                      "WWW-Authenticate: Bearer\r\n",
                      auth ? "The API key is not known here."
                           : "An API key is needed: Authorization: Bearer KEY.");
    return false;
}

/* ---- life -------------------------------------------------------------------------------------
 */

static void api_free(struct api *a) {
    api_keys_free(a);
    free(a->model_name);
    free(a);
}

static void on_timer(uv_timer_t *t) {
    api_beat(t->data);
}

static void on_timer_closed(uv_handle_t *h) {
    struct api *a = h->data;
    a->timer_closed = true;
    api_check_done(a);
}

int api_start(struct api **out, uv_loop_t *loop, struct engine *engine, const struct tok *tok,
              enum chat_family family, const struct api_options *o, struct err_text *err) {
    json_object_seed(0); /* before threads do it at the same time */
    struct api *a = calloc(1, sizeof *a);
    assert(a);
    a->loop = loop;
    a->engine = engine;
    a->tok = tok;
    a->family = family;
    a->o = *o;
    a->o.host = a->o.api_key_file = NULL; /* not ours to keep */
    a->model_name = strdup(o->model_name);
    a->started = (int64_t)time(NULL);
    assert(a->model_name);
    int rc = o->api_key_file ? api_keys_read(a, o->api_key_file, err) : OK;
    struct http_options h = {.host = o->host,
                             .port = o->port,
                             .routes = api_routes,
                             .n_routes = api_n_routes,
                             .guard = guard,
                             .user = a};
    if (rc == OK) rc = http_listen(&a->http, loop, &h, err);
    if (rc < 0) {
        api_free(a);
        return rc;
    }
    uv_timer_init(loop, &a->timer);
    a->timer.data = a;
    uv_timer_start(&a->timer, on_timer, 1000, 1000);
    *out = a;
    return OK;
}

int api_port(const struct api *a) {
    return http_port(a->http);
}

int api_in_progress(const struct api *a) {
    return a->n_works;
}

bool api_finish(struct api *a) {
    http_stop_accepting(a->http);
    return http_owed(a->http) > 0;
}

void api_drain(struct api *a) {
    if (a->draining) return;
    a->draining = true;
    http_drain(a->http);
}

/* Pool threads may still work on requests whose clients are gone. */
bool api_check_done(struct api *a) {
    if (!a->stopping || !a->http_closed || !a->timer_closed || a->n_works) return false;
    void (*done)(void *) = a->done;
    void *user = a->done_user;
    api_free(a);
    if (done) done(user);
    return true;
}

static void on_http_closed(void *user) {
    struct api *a = user;
    a->http_closed = true;
    api_check_done(a);
}

void api_stop(struct api *a, void (*done)(void *user), void *user) {
    assert(!a->stopping);
    a->draining = a->stopping = true;
    a->done = done;
    a->done_user = user;
    uv_close((uv_handle_t *)&a->timer, on_timer_closed);
    http_close(a->http, on_http_closed, a);
}
