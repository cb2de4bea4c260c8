/* tests/unit/test_api_restart.c: POST /v1/restart/RANK: who may, when, and for which rank.
 */
#include "tests/unit/api_world.h"

/* The status of a POST with these header lines. */
static int post(const char *path, const char *lines, char **body) {
    struct client c;
    struct http_buf b = {0};
    http_buf_printf(&b, "POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n%s\r\n", path, lines);
    client_open(&c, &loop, api_port(api));
    client_send_n(&c, b.p, b.n);
    http_buf_deinit(&b);
    int status = finish_status(&c);
    if (body) *body = client_body(&c);
    client_close(&c);
    return status;
}

static void a_rank_is_noted_and_its_pid_is_told(void **state) {
    UNUSED(state);
    char *body;
    assert_int_equal(post("/v1/restart/1", "", &body), 202);
    assert_string_equal(body, "{\"rank\":1,\"pid\":101,\"restarts\":0}");
    assert_int_equal(engine.restarted, 2);
    free(body);
}

static void what_is_no_rank_is_refused(void **state) {
    UNUSED(state);
    static const struct {
        const char *path;
        int status;
    } cases[] = {{"/v1/restart/2", 404},    {"/v1/restart/999", 404}, {"/v1/restart/-1", 400},
                 {"/v1/restart/1x", 400},   {"/v1/restart/x", 400},   {"/v1/restart/1/2", 400},
                 {"/v1/restart/0001", 400}, {"/v1/restart/", 404},    {"/v1/restart", 404}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        int found = post(cases[i].path, "", NULL);
        if (found != cases[i].status)
            fail_msg("%s: expected %d, found %d", cases[i].path, cases[i].status, found);
    }
    expect_error("/v1/restart/2", "{}", 404, "rank", "not_found");
    assert_int_equal(engine.restarted, 0);
}

static void it_waits_for_a_service_that_is_whole(void **state) {
    UNUSED(state);
    static const enum engine_state not_ready[] = {ENGINE_LOADING, ENGINE_RECOVERING,
                                                  ENGINE_DRAINING, ENGINE_FAILED};
    for (size_t i = 0; i < ARRAY_LEN(not_ready); i++) {
        engine.state = not_ready[i];
        assert_int_equal(post("/v1/restart/0", "", NULL), 503);
    }
    engine.state = ENGINE_READY;
    api_drain(api);
    assert_int_equal(post("/v1/restart/0", "", NULL), 503);
    assert_int_equal(engine.restarted, 0);
}

static void a_page_in_a_browser_may_not(void **state) {
    UNUSED(state);
    assert_int_equal(post("/v1/restart/0", "Origin: http://elsewhere\r\n", NULL), 403);
    assert_int_equal(engine.restarted, 0);
}

static void without_the_key_nobody_may(void **state) {
    UNUSED(state);
    assert_int_equal(post("/v1/restart/0", "", NULL), 401);
    assert_int_equal(post("/v1/restart/0", "Authorization: Bearer sesame\r\n", NULL), 202);
    assert_int_equal(engine.restarted, 1);
}

static char keys[] = "/tmp/octavo-keys-XXXXXX";

static int setup_with_key(void **state) {
    int fd = mkstemp(keys);
    if (fd < 0 || write(fd, "sesame\n", 7) != 7) return -1;
    close(fd);
    keys_path = keys;
    return setup(state);
}

static int teardown_with_key(void **state) {
    keys_path = NULL;
    unlink(keys);
    return teardown(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        API_TEST(a_rank_is_noted_and_its_pid_is_told),
        API_TEST(what_is_no_rank_is_refused),
        API_TEST(it_waits_for_a_service_that_is_whole),
        API_TEST(a_page_in_a_browser_may_not),
        cmocka_unit_test_setup_teardown(without_the_key_nobody_may, setup_with_key,
                                        teardown_with_key),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
