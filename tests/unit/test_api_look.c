/* tests/unit/test_api_look.c: the routes that only look, and who may: health, progress, models,
 * workers, the tokenizer, keys.
 */
#include "tests/unit/api_world.h"

/* ---- looking ----------------------------------------------------------------------------------
 */

static void health_tells_the_state(void **state) {
    UNUSED(state);
    static const struct {
        enum engine_state s;
        int ready, live;
        const char *status;
    } cases[] = {{ENGINE_LOADING, 503, 200, "loading"},
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

/* A step within its bound is progress however long it takes; one beyond it is not. */
static void progress_is_a_step_within_its_bound(void **state) {
    UNUSED(state);
    static const struct {
        enum engine_state s;
        uint64_t age_us;
        int code;
        const char *status;
    } cases[] = {{ENGINE_READY, 0, 200, "ok"},
                 {ENGINE_READY, 900000, 200, "ok"},
                 {ENGINE_READY, 1100000, 503, "stuck"},
                 {ENGINE_DRAINING, 900000, 200, "ok"},
                 {ENGINE_LOADING, 0, 503, "loading"},
                 {ENGINE_RECOVERING, 0, 503, "recovering"},
                 {ENGINE_FAILED, 0, 503, "failed"}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        engine.state = cases[i].s;
        engine.step_age_us = cases[i].age_us;
        json_t *j;
        assert_int_equal(ask("/health/progress", "", &j), cases[i].code);
        assert_string_equal(str(j, "status"), cases[i].status);
        json_t *step = json_object_get(j, "step");
        if (cases[i].age_us)
            assert_int_equal(json_integer_value(json_object_get(step, "age_ms")),
                             cases[i].age_us / 1000);
        else
            assert_true(json_is_null(step));
        json_decref(j);
    }
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
    json_decref(j);
    assert_int_equal(ask("/version", "", NULL), 200);
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
        API_TEST(models_and_workers_are_listed),
        API_TEST(the_tokenizer_can_be_asked),
        cmocka_unit_test_setup_teardown(every_route_but_health_needs_a_key, setup_keys, teardown),
        API_TEST(a_key_file_without_keys_is_a_set_up_error),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
