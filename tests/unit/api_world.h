/* tests/unit/api_world.h: the demonstration model's tokenizer, the HTTP server and API on a loop of
 * their own, and a scripted engine behind them; included once by each test of the API.
 */
#ifndef OCTAVO_TESTS_API_WORLD_H
#define OCTAVO_TESTS_API_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>
#include <jansson.h>

#include "coordinator/api_job.h"
#include "tests/unit/fake_engine.c"
#include "tests/unit/http_client.h"

static struct tok *tok;
static enum chat_family family;
static uv_loop_t loop;
static struct engine engine;
static struct api *api;
static struct tok_ids script;

static const char *source_path(const char *name) {
    static char path[4096];
    const char *root = getenv("OCTAVO_SOURCE_ROOT");
    snprintf(path, sizeof path, "%s/%s", root ? root : ".", name);
    return path;
}

static int open_model(void **state) {
    UNUSED(state);
    struct err_text err = {{0}};
    struct gguf *g;
    if (gguf_open(&g, source_path("tests/models/tiny.gguf"), &err) < 0 ||
        tok_open(&tok, g, &err) < 0) {
        fprintf(stderr, "expected the demonstration model, found: %s\n", err.text);
        return -1;
    }
    family = chat_family_of(g);
    gguf_close(g);
    return 0;
}

static int close_model(void **state) {
    UNUSED(state);
    tok_close(tok);
    return 0;
}

/* What every sequence says from now on. */
static void say(const char *text) {
    script.n = 0;
    assert_int_equal(tok_encode(tok, text, strlen(text), TOK_TRUSTED, &script), OK);
    engine.tokens = script.ids;
    engine.n_tokens = (int)script.n;
}

static const char *keys_path;

static int start_api(int port) {
    int n;
    engine = (struct engine){.error_at = -1, .state = ENGINE_READY, .eog = tok_eog(tok, &n)[0]};
    say("Let me think.</think>Paris is the capital.");
    uv_loop_init(&loop);
    struct api_options o;
    api_options_init(&o);
    o.port = port;
    o.model_name = "tiny";
    o.context = 4096;
    o.api_key_file = keys_path;
    struct err_text err = {{0}};
    int rc = api_start(&api, &loop, &engine, tok, family, &o, &err);
    if (rc < 0) fprintf(stderr, "%s\n", err.text);
    return rc;
}

static int setup(void **state) {
    UNUSED(state);
    return start_api(0);
}

static void on_done(void *user) {
    *(bool *)user = true;
}

static int teardown(void **state) {
    UNUSED(state);
    bool done = false;
    api_stop(api, on_done, &done);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_true(done);
    assert_int_equal(fake_living(&engine), 0);
    fake_tick(&engine); /* sweeps the dead */
    assert_null(engine.seqs);
    tok_ids_deinit(&script);
    return uv_loop_close(&loop);
}

/* ---- asking -----------------------------------------------------------------------------------
 */

static void send_to(struct client *c, const char *method, const char *path, const char *body) {
    struct http_buf b = {0};
    http_buf_printf(&b, "%s %s HTTP/1.1\r\nHost: h\r\nContent-Length: %zu\r\n\r\n", method, path,
                    strlen(body));
    http_buf_puts(&b, body);
    client_send_n(c, b.p, b.n);
    http_buf_deinit(&b);
}

static void send_new(struct client *c, const char *path, const char *body) {
    client_open(c, &loop, api_port(api));
    send_to(c, *body ? "POST" : "GET", path, body);
}

/* Ticks the engine until the answer is complete. */
static int finish_status(struct client *c) {
    CLIENT_WAIT(c,
                (fake_tick(&engine), c->busy = fake_living(&engine), client_answer(c) || c->eof));
    return client_status(c);
}

/* One whole answer; *body is JSON, or NULL if it is not. */
static int ask(const char *path, const char *body, json_t **json) {
    struct client c;
    send_new(&c, path, body);
    int status = finish_status(&c);
    char *text = client_body(&c);
    if (json) *json = json_loads(text, 0, NULL);
    free(text);
    client_close(&c);
    return status;
}

static const char *str(json_t *v, const char *path) { /* "choices.0.message.content" */
    char part[64];
    while (v && *path) {
        size_t n = strcspn(path, ".");
        snprintf(part, sizeof part, "%.*s", (int)n, path);
        v = json_is_array(v) ? json_array_get(v, strtoul(part, NULL, 10))
                             : json_object_get(v, part);
        path += n + (path[n] == '.');
    }
    static char number[32];
    if (json_is_integer(v)) {
        snprintf(number, sizeof number, "%lld", (long long)json_integer_value(v));
        return number;
    }
    if (json_is_real(v)) {
        snprintf(number, sizeof number, "%g", json_real_value(v));
        return number;
    }
    if (json_is_null(v)) return "(null)";
    return v && json_is_string(v) ? json_string_value(v) : "(absent)";
}

#define CHAT  "/v1/chat/completions"
#define HELLO "\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]"

static void expect_error(const char *path, const char *body, int status, const char *param,
                         const char *code) {
    json_t *j;
    int found = ask(path, body, &j);
    if (found != status || strcmp(str(j, "error.param"), param) ||
        strcmp(str(j, "error.code"), code))
        fail_msg("expected %d param %s code %s, found %d param %s: %s for %.200s", status, param,
                 code, found, str(j, "error.param"), str(j, "error.message"), body);
    assert_string_not_equal(str(j, "error.message"), "(absent)");
    json_decref(j);
}

#define API_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

#endif
