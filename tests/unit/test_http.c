/* tests/unit/test_http.c: the request parser alone, then the server over loopback. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "coordinator/http_conn.h"
#include "tests/unit/http_client.h"

/* ---- the parser -------------------------------------------------------------------------------
 */

static void a_path_has_one_spelling(void **state) {
    UNUSED(state);
    static const char *const cases[][2] = {
        {"/v1/models", "/v1/models"},
        {"//v1//models", "/v1/models"},
        {"/v1/models/", "/v1/models"},
        {"/v1/./models", "/v1/models"},
        {"/health/../v1/models", "/v1/models"},
        {"/../../v1/models", "/v1/models"},
        {"/v1%2Fmodels", "/v1/models"},
        {"/v1/%2e%2E/v1/models", "/v1/models"},
        {"/v1/models?x=/../y", "/v1/models"},
        {"/v1/models#a", "/v1/models"},
        {"http://h:1/v1/models", "/v1/models"},
        {"HTTPS://h/v1/models?q", "/v1/models"},
        {"http://h", "/"},
        {"http://h?x=/v1", "/"},
        {"/", "/"},
        {"/..", "/"},
        {"*", "*"},
        {"/V1/Models", "/V1/Models"},
        {"/a%20b", "/a b"},
        {"/.../x", "/.../x"},
        {"/v1/models/org%2fname", "/v1/models/org/name"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char out[128];
        assert_int_equal(http_parse_target(cases[i][0], strlen(cases[i][0]), out), OK);
        assert_string_equal(out, cases[i][1]);
    }
    static const char *const bad[] = {"/%", "/%0", "/%zz", "/%00", "/a%0d%0ab", "v1", "ftp://h/"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        char out[128];
        assert_int_equal(http_parse_target(bad[i], strlen(bad[i]), out), ERR_FORMAT);
    }
}

static const char chunked_request[] =
    "POST /v1/x?y HTTP/1.1\r\nHost: h\r\nEmpty:\r\nX-Next:  a value \r\nTransfer-Encoding: chunked"
    "\r\n\r\n3;ext=\"1\"\r\nabc\r\n1\r\nd\r\n00a\r\n0123456789\r\n0\r\nX-Trailer: t\r\n\r\n";

static void check_chunked(struct http_parse *p) {
    assert_string_equal(p->path, "/v1/x");
    assert_string_equal(http_parse_header(p, "host"), "h");
    assert_string_equal(http_parse_header(p, "empty"), "");
    assert_memory_equal(http_parse_header(p, "x-next"), "a value", 7);
    assert_null(http_parse_header(p, "x-trailer"));
    assert_true(p->chunked && p->keep_alive);
    assert_int_equal(p->body.n, 14);
    assert_memory_equal(p->body.p, "abcd0123456789", 14);
}

static void a_request_reads_the_same_however_it_is_cut(void **state) {
    UNUSED(state);
    size_t n = sizeof chunked_request - 1;
    for (size_t cut = 0; cut <= n; cut++) {
        struct http_parse p;
        http_parse_init(&p);
        int heads = 0, dones = 0;
        size_t from = 0, ends[] = {cut, n};
        for (int part = 0; part < 2; part++)
            for (;;) {
                size_t used;
                int ev = http_parse(&p, chunked_request + from, ends[part] - from, &used);
                from += used;
                if (ev == HTTP_PARSE_MORE) break;
                assert_int_not_equal(ev, HTTP_PARSE_BAD);
                heads += ev == HTTP_PARSE_HEAD;
                if (ev == HTTP_PARSE_DONE) {
                    dones++;
                    check_chunked(&p);
                    http_parse_next(&p);
                    assert_int_equal(p.phase, HTTP_PHASE_IDLE);
                }
            }
        assert_int_equal(heads, 1);
        assert_int_equal(dones, 1);
        assert_int_equal(p.phase, HTTP_PHASE_IDLE);
        http_parse_deinit(&p);
    }
}

static int status_of(const char *text) {
    struct http_parse p;
    http_parse_init(&p);
    size_t n = strlen(text), used;
    enum http_parse_event ev;
    for (;;) {
        ev = http_parse(&p, text, n, &used);
        text += used;
        n -= used;
        if (ev != HTTP_PARSE_HEAD) break;
    }
    int status = ev == HTTP_PARSE_BAD ? p.status : ev == HTTP_PARSE_DONE ? 200 : 0;
    http_parse_deinit(&p);
    return status;
}

static void messages_that_two_readers_could_cut_differently_are_refused(void **state) {
    UNUSED(state);
    static const struct {
        int status;
        const char *text;
    } cases[] = {
        {200, "GET / HTTP/1.1\r\nHost: h\r\n\r\n"},
        {200, "GET / HTTP/1.0\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"},
        {400,
         "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"},
        {400,
         "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999\r\n\r\n"},
        {413, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 16777217\r\n\r\n"},
        {501, "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"},
        {400, "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"},
        {400,
         "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n"},
        {400, "\x16\x03\x01\x02"},
        {400, "GET / HTTP/1.1\r\nHost : h\r\n\r\n"},
        {505, "GET / HTTP/2.0\r\nHost: h\r\n\r\n"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        int found = status_of(cases[i].text);
        if (found != cases[i].status)
            fail_msg("expected %d, found %d for: %s", cases[i].status, found, cases[i].text);
    }
}

static void json_strings_are_escaped(void **state) {
    UNUSED(state);
    struct http_buf b = {0};
    http_buf_json(&b, "a\"\\\n\r\t\x01\x1f\xc3\xa9z", 11);
    http_buf_number(&b, -1.0 / 0.0);
    assert_string_equal(b.p, "\"a\\\"\\\\\\n\\r\\t\\u0001\\u001f\xc3\xa9z\"-9999");
    http_buf_deinit(&b);
}

/* ---- a server ---------------------------------------------------------------------------------
 */

static uv_loop_t loop;
static struct http_server *server;
static struct http_exchange *held; /* by /hold, until the test answers */
static int n_gone, n_held;

static void on_gone(void *user) {
    assert_ptr_equal(user, &held);
    held = NULL;
    n_gone++;
}

static void do_echo(struct http_exchange *x, void *user) {
    UNUSED(user);
    size_t n;
    const char *body = http_body(x, &n);
    http_answer(x, 200, "text/plain", "", body, n);
}

static void do_get(struct http_exchange *x, void *user) {
    UNUSED(user);
    http_answer(x, 200, "text/plain", "", http_path(x), strlen(http_path(x)));
}

static void do_hold(struct http_exchange *x, void *user) {
    UNUSED(user);
    held = x;
    n_held++;
    http_on_gone(x, on_gone, &held);
}

static void do_stream(struct http_exchange *x, void *user) {
    UNUSED(user);
    http_stream_begin(x, 200, "text/event-stream");
    assert_int_equal(http_stream_write(x, "one ", 4), OK);
    assert_int_equal(http_stream_write(x, "", 0), OK);
    assert_int_equal(http_stream_write(x, "two", 3), OK);
    http_stream_end(x);
}

static const struct http_route routes[] = {
    {"/echo", HTTP_VERB_POST, do_echo, false},
    {"/get", HTTP_VERB_GET, do_get, true},
    {"/get/+", HTTP_VERB_GET, do_get, false},
    {"/hold", HTTP_VERB_GET | HTTP_VERB_POST, do_hold, false},
    {"/stream", HTTP_VERB_GET, do_stream, false},
};

static bool guard(struct http_exchange *x, const struct http_route *r, void *user) {
    UNUSED(user);
    const char *key = http_header(x, "x-refuse");
    if (!key || (r && r->open)) return true;
    http_answer_error(x, 401, "t", NULL, NULL, "", "no");
    return false;
}

static int setup(void **state) {
    UNUSED(state);
    uv_loop_init(&loop);
    held = NULL;
    n_gone = n_held = 0;
    struct http_options o = {
        .host = "127.0.0.1", .routes = routes, .n_routes = (int)ARRAY_LEN(routes), .guard = guard};
    struct err_text err;
    return http_listen(&server, &loop, &o, &err);
}

static void on_closed(void *user) {
    *(bool *)user = true;
}

static int teardown(void **state) {
    UNUSED(state);
    bool closed = false;
    http_close(server, on_closed, &closed);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_true(closed);
    assert_null(held);
    return uv_loop_close(&loop);
}

static void connect_to(struct client *c) {
    client_open(c, &loop, http_port(server));
}

static int ask(const char *text) {
    struct client c;
    connect_to(&c);
    client_send(&c, text);
    int status = client_status(&c);
    client_close(&c);
    return status;
}

static void one_connection_serves_many_requests(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    for (int i = 0; i < 3; i++) {
        client_send(&c, "GET /get HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_int_equal(client_status(&c), 200);
        assert_true(client_has(&c, "\r\n\r\n/get"));
        client_drop(&c);
    }
    client_send(&c, "GET /get HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert_int_equal(client_status(&c), 200);
    assert_true(client_has(&c, "Connection: close"));
    CLIENT_WAIT(&c, c.eof);
    client_close(&c);
}

static void pipelined_requests_are_answered_in_order(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    client_send(&c, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n"
                    "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
                    "GET /get/2 HTTP/1.1\r\nHost: h\r\n\r\nGET /get/3 HTTP/1.1\r\nHost: h\r\n\r\n");
    CLIENT_WAIT(&c, held);
    assert_int_equal(c.in.n, 0);
    struct http_exchange *x = held;
    held = NULL;
    http_answer(x, 200, "text/plain", "", "first", 5);
    static const char *const expected[] = {"first", "abc", "/get/2", "/get/3"};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(client_status(&c), 200);
        char *body = client_body(&c);
        assert_string_equal(body, expected[i]);
        free(body);
        client_drop(&c);
    }
    client_close(&c);
}

static void very_many_pipelined_requests_do_not_pile_up(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    struct http_buf b = {0};
    for (int i = 0; i < 20000; i++) http_buf_puts(&b, "GET /get HTTP/1.1\r\nHost: h\r\n\r\n");
    client_send_n(&c, b.p, b.n);
    int answers = 0;
    while (answers < 20000) {
        CLIENT_WAIT(&c, client_answer(&c));
        struct http_buf in = c.in;
        size_t at = 0, n;
        while (c.in.p = in.p + at, c.in.n = in.n - at, (n = client_answer(&c))) {
            at += n;
            answers++;
            assert_memory_equal(c.in.p, "HTTP/1.1 200", 12);
        }
        c.in = (struct http_buf){0};
        http_buf_put(&c.in, in.p + at, in.n - at);
        http_buf_deinit(&in);
    }
    http_buf_deinit(&b);
    client_close(&c);
}

static void a_body_in_one_byte_chunks_with_trailers_arrives(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    client_send(&c, "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < 26; i++) {
        char chunk[32];
        snprintf(chunk, sizeof chunk, "1;x=y\r\n%c\r\n", 'a' + i);
        for (char *p = chunk; *p; p++) {
            client_send_n(&c, p, 1);
            uv_run(&loop, UV_RUN_NOWAIT);
        }
    }
    client_send(&c, "0\r\nA: b\r\n\r\n");
    assert_int_equal(client_status(&c), 200);
    assert_true(client_has(&c, "\r\n\r\nabcdefghijklmnopqrstuvwxyz"));
    client_drop(&c);
    client_send(&c,
                "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n");
    assert_int_equal(client_status(&c), 200);
    assert_true(client_has(&c, "Content-Length: 0"));
    client_close(&c);
}

static void an_expectation_is_met_before_the_body(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    client_send(&c, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n"
                    "Expect: 100-continue\r\n\r\n");
    CLIENT_WAIT(&c, client_has(&c, "HTTP/1.1 100 Continue\r\n\r\n"));
    client_drop(&c);
    client_send(&c, "hi");
    assert_int_equal(client_status(&c), 200);
    client_drop(&c);
    /* Refused at once, and the connection ends: nobody can tell whether the body will come. */
    client_send(&c, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nX-Refuse: 1\r\n"
                    "Expect: 100-continue\r\n\r\n");
    assert_int_equal(client_status(&c), 401);
    CLIENT_WAIT(&c, c.eof);
    client_close(&c);
}

static void a_refusal_before_the_body_keeps_the_connection(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    client_send(&c, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nX-Refuse: 1\r\n\r\n");
    assert_int_equal(client_status(&c), 401);
    client_drop(&c);
    client_send(&c, "12345POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nok");
    assert_int_equal(client_status(&c), 200);
    assert_true(client_has(&c, "\r\n\r\nok"));
    client_close(&c);
}

static void wrong_requests_get_the_status_that_says_why(void **state) {
    UNUSED(state);
    assert_int_equal(ask("GET /none HTTP/1.1\r\nHost: h\r\n\r\n"), 404);
    assert_int_equal(ask("GET /GET HTTP/1.1\r\nHost: h\r\n\r\n"), 404);
    assert_int_equal(ask("GET /get/ HTTP/1.1\r\nHost: h\r\n\r\n"), 200);
    assert_int_equal(ask("DELETE /get HTTP/1.1\r\nHost: h\r\n\r\n"), 405);
    assert_int_equal(ask("POST /get HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"), 405);
    assert_int_equal(ask("POST /echo HTTP/1.1\r\nHost: h\r\n\r\n"), 411);
    assert_int_equal(ask("POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 16777217\r\n\r\n"),
                     413);
    assert_int_equal(ask("POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n"
                         "Content-Encoding: gzip\r\n\r\nx"),
                     415);
    assert_int_equal(ask("POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n"
                         "Expect: tea\r\n\r\n"),
                     417);
    assert_int_equal(ask("nonsense\r\n\r\n"), 400);
    assert_int_equal(ask("CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n"), 400);
    assert_int_equal(ask("GET http://other/get HTTP/1.1\r\nHost: h\r\n\r\n"), 200);
    assert_int_equal(ask("GET /%67et HTTP/1.1\r\nHost: h\r\n\r\n"), 200);
    assert_int_equal(ask("GET /get HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\n"
                         "Upgrade: h2c\r\n\r\n"),
                     200);
    assert_int_equal(ask("GET /get/x HTTP/1.1\r\nHost: h\r\nX-Refuse: 1\r\n\r\n"), 401);
    assert_int_equal(ask("GET /get/../get HTTP/1.1\r\nHost: h\r\nX-Refuse: 1\r\n\r\n"), 200);
    assert_int_equal(ask("GET /nothing HTTP/1.1\r\nHost: h\r\nX-Refuse: 1\r\n\r\n"), 401);
    assert_int_equal(ask("OPTIONS /echo HTTP/1.1\r\nHost: h\r\nX-Refuse: 1\r\n\r\n"), 401);
    assert_int_equal(ask("OPTIONS /echo HTTP/1.1\r\nHost: h\r\nX-Refuse: 1\r\n"
                         "Access-Control-Request-Method: POST\r\n\r\n"),
                     204);
    assert_int_equal(ask("OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n"), 204);
}

static void what_is_too_large_is_refused_while_it_comes(void **state) {
    UNUSED(state);
    struct http_buf b = {0};
    http_buf_puts(&b, "GET /");
    for (size_t i = 0; i <= LIMIT_URL_BYTES; i++) http_buf_puts(&b, "a");
    assert_int_equal(ask(b.p), 414);
    b.n = 0;
    http_buf_puts(&b, "GET /get HTTP/1.1\r\nHost: h\r\nX: ");
    for (size_t i = 0; i <= LIMIT_HEADER_BYTES; i++) http_buf_puts(&b, "a");
    assert_int_equal(ask(b.p), 431);
    b.n = 0;
    http_buf_puts(&b, "GET /get HTTP/1.1\r\nHost: h\r\n");
    for (size_t i = 0; i < LIMIT_HEADERS; i++) http_buf_printf(&b, "x%zu: 1\r\n", i);
    assert_int_equal(ask(b.p), 431);
    b.n = 0;
    http_buf_puts(&b, "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
    http_buf_printf(&b, "%x\r\n", LIMIT_BODY_BYTES + 1);
    for (size_t i = 0; i <= LIMIT_BODY_BYTES / 16; i++) http_buf_puts(&b, "0123456789abcdef");
    assert_int_equal(ask(b.p), 413);
    http_buf_deinit(&b);
}

static void allow_is_told_and_head_has_no_body(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    client_send(&c, "PUT /get HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n");
    assert_int_equal(client_status(&c), 405);
    assert_true(client_has(&c, "Allow: GET, HEAD, OPTIONS\r\n"));
    client_drop(&c);
    client_send(&c, "HEAD /get HTTP/1.1\r\nHost: h\r\n\r\nGET /get HTTP/1.1\r\nHost: h\r\n\r\n");
    CLIENT_WAIT(&c, client_has(&c, "\r\n\r\n/get"));
    assert_true(client_has(&c, "Content-Length: 4\r\n\r\nHTTP/1.1 200"));
    client_close(&c);
}

static void a_stream_is_chunked_for_1_1_and_ends_the_connection_for_1_0(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    client_send(&c, "GET /stream HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_int_equal(client_status(&c), 200);
    assert_true(client_has(&c, "\r\n\r\n4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"));
    client_drop(&c);
    client_send(&c, "GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    CLIENT_WAIT(&c, c.eof);
    assert_true(client_has(&c, "\r\n\r\none two"));
    assert_false(client_has(&c, "chunked"));
    client_close(&c);
}

static void a_client_that_leaves_is_noticed_while_its_answer_is_owed(void **state) {
    UNUSED(state);
    for (int how = 0; how < 3; how++) {
        struct client c, other;
        connect_to(&c);
        connect_to(&other);
        client_send(&c, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
        CLIENT_WAIT(&c, held);
        n_gone = 0;
        if (how == 0) client_close(&c);
        if (how == 1) client_reset(&c);
        if (how == 2) shutdown(c.fd, SHUT_WR);
        CLIENT_WAIT(&other, n_gone == 1);
        client_close(&c);
        client_send(&other, "GET /get HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_int_equal(client_status(&other), 200);
        client_close(&other);
    }
    struct client nobody = {.fd = -1, .loop = &loop, .eof = true};
    CLIENT_WAIT(&nobody, http_connections(server) == 0);
}

static void leaving_at_any_byte_leaves_nothing_behind(void **state) {
    UNUSED(state);
    static const char text[] =
        "POST /hold HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        "GET /get HTTP/1.1\r\n";
    for (size_t n = 0; n < sizeof text; n++) {
        struct client c;
        connect_to(&c);
        client_send_n(&c, text, n);
        uv_run(&loop, UV_RUN_NOWAIT);
        n % 2 ? client_reset(&c) : client_close(&c);
        uv_run(&loop, UV_RUN_NOWAIT);
    }
    struct client nobody = {.fd = -1, .loop = &loop, .eof = true};
    CLIENT_WAIT(&nobody, http_connections(server) == 0);
    assert_int_equal(n_gone, n_held);
    assert_int_equal(server->body_bytes, 0);
}

static void a_client_that_does_not_read_is_cut_off_and_others_are_not(void **state) {
    UNUSED(state);
    struct client slow, other;
    connect_to(&slow);
    int small = 4096;
    setsockopt(slow.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    client_send(&slow, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    connect_to(&other);
    CLIENT_WAIT(&other, held);
    static char block[32 << 10];
    http_stream_begin(held, 200, "text/plain");
    size_t written = 0;
    while (http_stream_write(held, block, sizeof block) == OK) {
        written += sizeof block;
        assert_true(written < 64u << 20);
        uv_run(&loop, UV_RUN_NOWAIT);
    }
    assert_int_equal(n_gone, 0); /* never from inside a call */
    assert_int_equal(http_stream_write(held, block, 1), ERR_CLOSED);
    CLIENT_WAIT(&other, n_gone == 1);
    client_send(&other, "GET /get HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_int_equal(client_status(&other), 200);
    client_close(&other);
    client_close(&slow);
}

static void the_clock_ends_what_takes_too_long(void **state) {
    UNUSED(state);
    static const struct {
        const char *sent;
        int seconds, status;
    } cases[] = {
        {"GET /get HT", LIMIT_HEADER_SECONDS, 408},
        {"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab", LIMIT_BODY_SECONDS, 408},
        {"", LIMIT_IDLE_SECONDS, 0}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct client c;
        connect_to(&c);
        client_send(&c, cases[i].sent);
        CLIENT_WAIT(&c, server->conns && (!*cases[i].sent || server->conns->phase_seen));
        for (int k = 0; k < 5; k++) uv_run(&loop, UV_RUN_NOWAIT);
        server->conns->since_ms -= (uint64_t)cases[i].seconds * 1000 + 1;
        assert_int_equal(client_status(&c), cases[i].status);
        CLIENT_WAIT(&c, c.eof);
        client_close(&c);
        CLIENT_WAIT(&c, !server->conns);
    }
}

static void draining_ends_connections_after_their_answer(void **state) {
    UNUSED(state);
    struct client idle, busy, late;
    connect_to(&idle);
    connect_to(&busy);
    client_send(&busy, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    CLIENT_WAIT(&busy, held && http_connections(server) == 2);
    http_drain(server);
    CLIENT_WAIT(&idle, idle.eof);
    struct http_exchange *x = held;
    held = NULL;
    http_answer(x, 200, "text/plain", "", "x", 1);
    assert_int_equal(client_status(&busy), 200);
    assert_true(client_has(&busy, "Connection: close"));
    CLIENT_WAIT(&busy, busy.eof);
    connect_to(&late);
    client_send(&late, "GET /get HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_int_equal(client_status(&late), 200);
    CLIENT_WAIT(&late, late.eof);
    client_close(&idle);
    client_close(&busy);
    client_close(&late);
}

/* Connected as far as the kernel is concerned, and not yet accepted: closing would reset them. */
static void who_stands_at_the_door_when_it_closes_is_answered(void **state) {
    UNUSED(state);
    struct client c[3];
    for (size_t i = 0; i < ARRAY_LEN(c); i++) {
        connect_to(&c[i]);
        client_send(&c[i], "GET /get HTTP/1.1\r\nHost: h\r\n\r\n");
    }
    assert_int_equal(http_connections(server), 0);
    http_drain(server);
    http_stop_accepting(server);
    assert_int_equal(http_owed(server), ARRAY_LEN(c));
    for (size_t i = 0; i < ARRAY_LEN(c); i++) {
        assert_int_equal(client_status(&c[i]), 200);
        CLIENT_WAIT(&c[i], c[i].eof);
        client_close(&c[i]);
    }
    assert_int_equal(http_owed(server), 0);
}

/* Its request may be on its way. */
static void draining_leaves_a_young_connection_its_request(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    CLIENT_WAIT(&c, http_connections(server) == 1);
    http_drain(server);
    client_send(&c, "GET /get HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_int_equal(client_status(&c), 200);
    assert_true(client_has(&c, "Connection: close"));
    CLIENT_WAIT(&c, c.eof);
    client_close(&c);
}

static void a_connection_too_many_is_told_so_and_closed(void **state) {
    UNUSED(state);
    struct client c;
    server->n_conns += server->conns_max;
    connect_to(&c);
    assert_int_equal(client_status(&c), 503);
    CLIENT_WAIT(&c, c.eof);
    server->n_conns -= server->conns_max;
    client_close(&c);
    assert_int_equal(ask("GET /get HTTP/1.1\r\nHost: h\r\n\r\n"), 200);
}

static void a_broken_stream_has_no_last_chunk(void **state) {
    UNUSED(state);
    struct client c;
    connect_to(&c);
    client_send(&c, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    CLIENT_WAIT(&c, held);
    http_stream_begin(held, 200, "text/plain");
    http_stream_write(held, "x", 1);
    http_stream_break(held);
    held = NULL;
    CLIENT_WAIT(&c, c.eof);
    assert_false(client_has(&c, "0\r\n\r\n"));
    client_close(&c);
}

static void an_address_in_use_is_one_sentence(void **state) {
    UNUSED(state);
    struct http_server *second;
    struct http_options o = {.host = "127.0.0.1", .port = http_port(server)};
    struct err_text err = {{0}};
    assert_int_equal(http_listen(&second, &loop, &o, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "address already in use"));
    o.host = "no.such.host.invalid";
    assert_int_equal(http_listen(&second, &loop, &o, &err), ERR_SETUP);
    o.host = "[::1]";
    o.port = 0;
    if (http_listen(&second, &loop, &o, &err) == OK) http_close(second, NULL, NULL);
}

#define SERVER_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_path_has_one_spelling),
        cmocka_unit_test(a_request_reads_the_same_however_it_is_cut),
        cmocka_unit_test(messages_that_two_readers_could_cut_differently_are_refused),
        cmocka_unit_test(json_strings_are_escaped),
        SERVER_TEST(one_connection_serves_many_requests),
        SERVER_TEST(pipelined_requests_are_answered_in_order),
        SERVER_TEST(very_many_pipelined_requests_do_not_pile_up),
        SERVER_TEST(a_body_in_one_byte_chunks_with_trailers_arrives),
        SERVER_TEST(an_expectation_is_met_before_the_body),
        SERVER_TEST(a_refusal_before_the_body_keeps_the_connection),
        SERVER_TEST(wrong_requests_get_the_status_that_says_why),
        SERVER_TEST(what_is_too_large_is_refused_while_it_comes),
        SERVER_TEST(allow_is_told_and_head_has_no_body),
        SERVER_TEST(a_stream_is_chunked_for_1_1_and_ends_the_connection_for_1_0),
        SERVER_TEST(a_client_that_leaves_is_noticed_while_its_answer_is_owed),
        SERVER_TEST(leaving_at_any_byte_leaves_nothing_behind),
        SERVER_TEST(a_client_that_does_not_read_is_cut_off_and_others_are_not),
        SERVER_TEST(the_clock_ends_what_takes_too_long),
        SERVER_TEST(draining_ends_connections_after_their_answer),
        SERVER_TEST(who_stands_at_the_door_when_it_closes_is_answered),
        SERVER_TEST(draining_leaves_a_young_connection_its_request),
        SERVER_TEST(a_connection_too_many_is_told_so_and_closed),
        SERVER_TEST(a_broken_stream_has_no_last_chunk),
        SERVER_TEST(an_address_in_use_is_one_sentence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
