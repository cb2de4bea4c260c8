/* tests/unit/test_api_look.c: the routes that only look, and who may: health, progress, models,
 * workers, the tokenizer, keys.
 */
#include "proto/log.h"
#include "tests/unit/api_world.h"

/* ---- looking ----------------------------------------------------------------------------------
 */

static void health_tells_the_state(void **state) {
    UNUSED(state);
    static const struct {
        enum engine_state s;
        int ready, live;
        const char *status;
    } cases[] = {{ENGINE_STARTING, 503, 200, "starting"},
                 {ENGINE_LOADING, 503, 200, "loading"},
                 {ENGINE_CANARY, 503, 200, "canary"},
                 {ENGINE_READY, 200, 200, "ok"},
                 {ENGINE_RECOVERING, 503, 200, "recovering"},
                 {ENGINE_DRAINING, 503, 200, "draining"},
                 {ENGINE_FAILED, 503, 503, "failed"}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        engine.state = cases[i].s;
        json_t *j;
        assert_int_equal(ask("/health/ready", "", &j), cases[i].ready);
        assert_string_equal(str(j, "status"), cases[i].status);
        json_decref(j);
        assert_int_equal(ask("/health", "", NULL), cases[i].ready);
        assert_int_equal(ask("/health/live", "", NULL), cases[i].live);
    }
}

/* A step within its bound is progress however long it takes; one beyond it is not. So is a load in
 * which something moves. */
static void progress_is_a_step_within_its_bound(void **state) {
    UNUSED(state);
    static const struct {
        enum engine_state s;
        uint64_t step_ms, quiet_ms;
        int code;
        const char *status;
    } cases[] = {{ENGINE_READY, 0, 0, 200, "ok"},
                 {ENGINE_READY, 900, 0, 200, "ok"},
                 {ENGINE_READY, 1100, 0, 503, "stuck"},
                 {ENGINE_DRAINING, 900, 0, 200, "ok"},
                 {ENGINE_DRAINING, 1100, 0, 503, "stuck"},
                 {ENGINE_CANARY, 900, 0, 200, "ok"},
                 {ENGINE_CANARY, 1100, 0, 503, "stuck"},
                 {ENGINE_STARTING, 0, 0, 200, "ok"},
                 {ENGINE_LOADING, 0, 4900, 200, "ok"},
                 {ENGINE_LOADING, 0, 5100, 503, "stalled"},
                 {ENGINE_RECOVERING, 0, 0, 503, "recovering"},
                 {ENGINE_FAILED, 0, 0, 503, "failed"}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        engine.state = cases[i].s;
        engine.step_age_us = cases[i].step_ms * 1000;
        engine.load_quiet_us = cases[i].quiet_ms * 1000;
        json_t *j;
        assert_int_equal(ask("/health/progress", "", &j), cases[i].code);
        assert_string_equal(str(j, "status"), cases[i].status);
        assert_string_equal(str(j, "state"), engine_state_name(cases[i].s));
        if (cases[i].step_ms)
            assert_int_equal(json_integer_value(json_object_get(json_object_get(j, "step"), "age_ms")),
                             cases[i].step_ms);
        else
            assert_string_equal(str(j, "step"), "(null)");
        assert_string_equal(str(j, "prefill.tokens"), "1000");
        assert_string_equal(str(j, "last_step_age_ms"), "7");
        json_decref(j);
    }
}

/* A token that was produced after it was asked for, ours or anybody's; else why not. */
static void a_canary_is_a_token_of_now(void **state) {
    UNUSED(state);
    json_t *j;
    assert_int_equal(ask("/health/canary", "", &j), 200);
    assert_string_equal(str(j, "status"), "ok");
    assert_string_equal(str(j, "by"), "canary");
    assert_int_equal(json_integer_value(json_object_get(j, "token")), engine.tokens[0]);
    json_decref(j);
    assert_int_equal(engine.last_max_tokens, 1);
    engine.error_at = 0;
    assert_int_equal(ask("/health/canary", "", &j), 503);
    assert_string_equal(str(j, "status"), "failed");
    assert_string_equal(str(j, "message"), "worker/3 died \"twice\"");
    json_decref(j);
    engine.submit_rc = ERR_FULL;
    engine.streams_talk = true;
    assert_int_equal(ask("/health/canary", "", &j), 200);
    assert_string_equal(str(j, "by"), "streams");
    json_decref(j);
    int submitted = engine.n_submitted;
    for (int s = ENGINE_STARTING; s <= ENGINE_FAILED; s++) {
        if (s == ENGINE_READY) continue;
        engine.state = (enum engine_state)s;
        assert_int_equal(ask("/health/canary", "", &j), 503);
        assert_string_equal(str(j, "status"), engine_state_name(engine.state));
        json_decref(j);
    }
    assert_int_equal(engine.n_submitted, submitted);
}

static void models_and_workers_are_listed(void **state) {
    UNUSED(state);
    json_t *j;
    assert_int_equal(ask("/v1/models", "", &j), 200);
    assert_string_equal(str(j, "data.0.id"), "tiny");
    json_decref(j);
    assert_int_equal(ask("/v1/models/tiny", "", &j), 200);
    json_decref(j);
    assert_int_equal(ask("/v1/models/a%2Fb", "", &j), 404);
    assert_string_equal(str(j, "error.code"), "model_not_found");
    json_decref(j);
    assert_int_equal(ask("/v1/workers", "", &j), 200);
    assert_string_equal(str(j, "data.1.pid"), "101");
    assert_string_equal(str(j, "data.1.age_ms"), "2");
    assert_string_equal(str(j, "data.0.age_ms"), "(null)");
    assert_string_equal(str(j, "data.1.state"), "ready");
    assert_string_equal(str(j, "data.1.last_error"), "bad \xef\xbf\xbd byte");
    assert_string_equal(str(j, "data.0.pci_address"), "(null)");
    assert_string_equal(str(j, "state"), "ready");
    json_decref(j);
    assert_int_equal(ask("/v1/workers/1", "", &j), 200);
    assert_string_equal(str(j, "rank"), "1");
    assert_string_equal(str(j, "device_uuid"), "GPU-0a1b2c3d-0000-1111-2222-333344445555");
    assert_string_equal(str(j, "pci_address"), "0000:c1:00.0");
    assert_string_equal(str(j, "restarts_by_cause.canary"), "0");
    json_decref(j);
    static const char *const none[] = {"2", "-1", "x", "1x", "99999999999"};
    for (size_t i = 0; i < ARRAY_LEN(none); i++) {
        char path[64];
        snprintf(path, sizeof path, "/v1/workers/%s", none[i]);
        assert_int_equal(ask(path, "", NULL), 404);
    }
    assert_int_equal(ask("/version", "", &j), 200);
    assert_string_equal(str(j, "build"), log_build());
    json_decref(j);
    assert_int_equal(ask("/metrics", "", NULL), 200);
}

static void the_tokenizer_can_be_asked(void **state) {
    UNUSED(state);
    json_t *j;
    assert_int_equal(ask("/tokenize", "{\"prompt\":\"Hello there\"}", &j), 200);
    json_t *tokens = json_object_get(j, "tokens");
    assert_int_equal(json_integer_value(json_array_get(tokens, 0)), tok_added(tok, "[gMASK]"));
    json_t *back = json_pack("{s:O}", "tokens", tokens);
    json_array_remove(tokens, 0);
    json_array_remove(tokens, 0);
    char *text = json_dumps(back, 0);
    json_decref(back);
    json_decref(j);
    assert_int_equal(ask("/detokenize", text, &j), 200);
    assert_string_equal(str(j, "prompt"), "Hello there");
    json_decref(j);
    free(text);
    assert_int_equal(ask("/tokenize", "{" HELLO "}", &j), 200);
    assert_int_equal(json_integer_value(json_object_get(j, "count")),
                     json_array_size(json_object_get(j, "tokens")));
    json_decref(j);
    assert_int_equal(ask("/apply-template", "{" HELLO "}", &j), 200);
    assert_string_equal(str(j, "prompt"), "[gMASK]<sop><|user|>Hello<|assistant|><think>");
    json_decref(j);
    assert_int_equal(ask("/tokenize",
                         "{\"prompt\":\"<|user|>\",\"parse_special\":false,"
                         "\"add_special_tokens\":false}",
                         &j),
                     200);
    assert_int_not_equal(json_array_size(json_object_get(j, "tokens")), 1);
    json_decref(j);
    expect_error("/detokenize", "{\"tokens\":[-1]}", 400, "tokens", "(null)");
    expect_error("/tokenize", "{\"prompt\":1}", 400, "prompt", "(null)");
    expect_error("/apply-template", "{\"messages\":\"x\"}", 400, "messages", "(null)");
}

/* ---- keys -------------------------------------------------------------------------------------
 */

static int setup_keys(void **state) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/octavo-keys-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    static const char text[] = "# keys\n\n  sk-one \nsk-two\r\n";
    assert_int_equal(write(fd, text, sizeof text - 1), sizeof text - 1);
    close(fd);
    keys_path = path;
    int rc = setup(state);
    unlink(path);
    keys_path = NULL;
    return rc;
}

static int ask_raw(const char *method, const char *target, const char *lines) {
    struct client c;
    client_open(&c, &loop, api_port(api));
    char text[512];
    snprintf(text, sizeof text, "%s %s HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n%s\r\n{}",
             method, target, lines);
    c.head_only = !strcmp(method, "HEAD");
    client_send(&c, text);
    int status = finish_status(&c);
    client_close(&c);
    return status;
}

static void every_route_but_health_needs_a_key(void **state) {
    UNUSED(state);
    static const char *const methods[] = {"GET", "POST", "HEAD", "OPTIONS", "DELETE"};
    static const char *const more[] = {"//v1/models",
                                       "/v1/../v1/models",
                                       "/V1/MODELS",
                                       "/v1/models/",
                                       "/health/../v1/models",
                                       "http://h/v1/models",
                                       "/nothing",
                                       "/health%2F..%2fmetrics",
                                       "/health/live/x",
                                       "*",
                                       "/"};
    for (size_t m = 0; m < ARRAY_LEN(methods); m++) {
        for (int r = 0; r < api_n_routes; r++) {
            int status = ask_raw(methods[m], api_routes[r].path, "");
            assert_int_equal(status == 401, !api_routes[r].open);
        }
        for (size_t i = 0; i < ARRAY_LEN(more); i++) {
            if (!strcmp(more[i], "*") && strcmp(methods[m], "OPTIONS")) continue;
            assert_int_equal(ask_raw(methods[m], more[i], ""), 401);
        }
    }
    assert_int_equal(ask_raw("GET", "/v1/models", "Authorization: Bearer sk-one\r\n"), 200);
    assert_int_equal(ask_raw("GET", "/v1/models", "Authorization: bearer sk-two\r\n"), 200);
    assert_int_equal(ask_raw("GET", "/v1/models", "Authorization: Bearer sk-on\r\n"), 401);
    assert_int_equal(ask_raw("GET", "/v1/models", "Authorization: Bearer sk-onee\r\n"), 401);
    assert_int_equal(ask_raw("GET", "/v1/models", "Authorization: Bearer \r\n"), 401);
    assert_int_equal(ask_raw("GET", "/v1/models", "Authorization: Basic sk-one\r\n"), 401);
    assert_int_equal(ask_raw("GET", "/v1/models", "Authorization: sk-one\r\n"), 401);
}

/* Who has no key learns one word, the same that is told in detail to those who have one. */
static void without_a_key_health_is_one_word(void **state) {
    UNUSED(state);
    static const char *const paths[] = {"/health", "/health/live", "/health/ready"};
    for (int s = ENGINE_STARTING; s <= ENGINE_FAILED; s++)
        for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
            char word[32], lines[128] = "";
            engine.state = (enum engine_state)s;
            for (int keyed = 0; keyed <= 1; keyed++) {
                struct client c;
                client_open(&c, &loop, api_port(api));
                snprintf(lines, sizeof lines, "GET %s HTTP/1.1\r\nHost: h\r\n%s\r\n", paths[i],
                         keyed ? "Authorization: Bearer sk-one\r\n" : "");
                client_send(&c, lines);
                finish_status(&c);
                char *body = client_body(&c);
                snprintf(word, sizeof word, "%s\n", engine_state_name(engine.state));
                if (keyed) {
                    json_t *j = json_loads(body, 0, NULL);
                    assert_string_equal(str(j, "state"), engine_state_name(engine.state));
                    json_decref(j);
                } else
                    assert_string_equal(body, word);
                free(body);
                client_close(&c);
            }
        }
}

static void a_key_file_without_keys_is_a_set_up_error(void **state) {
    UNUSED(state);
    struct api *second;
    struct api_options o;
    api_options_init(&o);
    o.model_name = "x";
    o.api_key_file = "/dev/null";
    struct err_text err = {{0}};
    assert_int_equal(api_start(&second, &loop, &engine, tok, family, &o, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "found none"));
    o.api_key_file = "/no/such/file";
    assert_int_equal(api_start(&second, &loop, &engine, tok, family, &o, &err), ERR_SETUP);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        API_TEST(health_tells_the_state),
        API_TEST(progress_is_a_step_within_its_bound),
        API_TEST(a_canary_is_a_token_of_now),
        API_TEST(models_and_workers_are_listed),
        API_TEST(the_tokenizer_can_be_asked),
        cmocka_unit_test_setup_teardown(every_route_but_health_needs_a_key, setup_keys, teardown),
        cmocka_unit_test_setup_teardown(without_a_key_health_is_one_word, setup_keys, teardown),
        API_TEST(a_key_file_without_keys_is_a_set_up_error),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
