/* tests/unit/test_http_ask.c: the command line's one HTTP request, against a server that is a pair of
 * lines: what it sends, what it makes of answers, and that nothing holds it beyond its time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/http_ask.h"

static char name[64], heard[4096];

struct server {
    int listener;
    const char *answer; /* NULL: accept and say nothing until the client leaves */
    pthread_t thread;
};

static void *serve(void *arg) {
    struct server *s = arg;
    int fd = accept(s->listener, NULL, NULL);
    size_t n = 0;
    heard[0] = 0;
    while (!strstr(heard, "\r\n\r\n")) {
        ssize_t got = recv(fd, heard + n, sizeof heard - 1 - n, 0);
        if (got <= 0) break;
        heard[n += (size_t)got] = 0;
    }
    if (s->answer) {
        send(fd, s->answer, strlen(s->answer), MSG_NOSIGNAL);
        shutdown(fd, SHUT_WR);
    }
    /* Until the client leaves: closing with something unread would be a reset to it, not an end. */
    char rest[256];
    while (recv(fd, rest, sizeof rest, 0) > 0) {}
    close(fd);
    return NULL;
}

static void start(struct server *s, const char *answer) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    static int serial;
    int n = snprintf(name, sizeof name, "@octavo-test-ask-%d-%d", (int)getpid(), serial++);
    memcpy(a.sun_path + 1, name + 1, (size_t)n - 1);
    *s = (struct server){socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), answer, 0};
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)n);
    assert_int_equal(bind(s->listener, (struct sockaddr *)&a, size), 0);
    assert_int_equal(listen(s->listener, 1), 0);
    assert_int_equal(pthread_create(&s->thread, NULL, serve, s), 0);
}

static void stop(struct server *s) {
    pthread_join(s->thread, NULL);
    close(s->listener);
}

static void an_answer_is_read_by_its_length_or_to_its_end(void **state) {
    UNUSED(state);
    static const char *const answers[] = {
        "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy and more",
        "HTTP/1.0 503 No\r\n\r\nbusy"};
    for (size_t i = 0; i < ARRAY_LEN(answers); i++) {
        struct server s;
        struct http_reply r;
        struct err_text err = {0};
        start(&s, answers[i]);
        struct http_ask a = {.socket = name, .method = "GET", .path = "/x", .timeout_ms = 20000};
        assert_int_equal(http_ask(&a, &r, &err), OK);
        assert_int_equal(r.status, 503);
        assert_int_equal(strncmp(r.body, "busy", 4), 0);
        http_reply_deinit(&r);
        stop(&s);
    }
}

static void a_question_says_who_asks_and_what(void **state) {
    UNUSED(state);
    struct server s;
    struct http_reply r;
    struct err_text err = {0};
    start(&s, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    struct http_ask a = {.socket = name, .method = "POST", .path = "/v1/completions", .key = "k1",
                         .body = "{}", .timeout_ms = 20000};
    assert_int_equal(http_ask(&a, &r, &err), OK);
    assert_int_equal(r.n, 0);
    http_reply_deinit(&r);
    stop(&s);
    const char *const parts[] = {"POST /v1/completions HTTP/1.1\r\n", "\r\nConnection: close\r\n",
                                 "\r\nAuthorization: Bearer k1\r\n", "\r\nContent-Length: 2\r\n"};
    for (size_t i = 0; i < ARRAY_LEN(parts); i++)
        if (!strstr(heard, parts[i])) fail_msg("expected %s in %s", parts[i], heard);
}

static void who_says_nothing_in_time_is_given_up(void **state) {
    UNUSED(state);
    struct server s;
    struct http_reply r;
    struct err_text err = {0};
    start(&s, NULL);
    struct http_ask a = {.socket = name, .method = "GET", .path = "/", .timeout_ms = 50};
    assert_int_equal(http_ask(&a, &r, &err), ERR_TIMEOUT);
    stop(&s);
}

static void what_is_no_answer_is_told_from_none(void **state) {
    UNUSED(state);
    struct server s;
    struct http_reply r;
    struct err_text err = {0};
    struct http_ask a = {.socket = name, .method = "GET", .path = "/", .timeout_ms = 20000};
    start(&s, "SSH-2.0-x\r\n\r\n");
    assert_int_equal(http_ask(&a, &r, &err), ERR_FORMAT);
    assert_string_equal(err.text, "no HTTP answer");
    stop(&s);
    start(&s, "");
    assert_int_equal(http_ask(&a, &r, &err), ERR_FORMAT);
    assert_string_equal(err.text, "closed without an answer");
    stop(&s);
    a.socket = "@octavo-test-nobody";
    assert_int_equal(http_ask(&a, &r, &err), ERR_NOT_FOUND);
    a.socket = "/nowhere/socket";
    assert_int_equal(http_ask(&a, &r, &err), ERR_NOT_FOUND);
}

static void urls_are_parted_or_refused(void **state) {
    UNUSED(state);
    static const struct {
        const char *url, *host;
        int port; /* 0: refused */
    } rows[] = {{"http://h:80", "h", 80},          {"http://h", "h", 80},
                {"http://h:9/v1", "h", 9},         {"http://[::1]:9", "::1", 9},
                {"http://127.0.0.1:65535/", "127.0.0.1", 65535},
                {"https://h", "", 0},              {"h:80", "", 0},
                {"http://", "", 0},                {"http://h:0", "", 0},
                {"http://h:65536", "", 0},         {"http://h:x", "", 0},
                {"http://h:80x", "", 0},           {"http://[::1", "", 0}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        char host[32];
        int port = 0, rc = http_ask_url(rows[i].url, host, sizeof host, &port, NULL);
        if ((rc == OK) != (rows[i].port != 0)) fail_msg("%s: found %d", rows[i].url, rc);
        if (rc < 0) continue;
        assert_string_equal(host, rows[i].host);
        assert_int_equal(port, rows[i].port);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_is_read_by_its_length_or_to_its_end),
        cmocka_unit_test(a_question_says_who_asks_and_what),
        cmocka_unit_test(who_says_nothing_in_time_is_given_up),
        cmocka_unit_test(what_is_no_answer_is_told_from_none),
        cmocka_unit_test(urls_are_parted_or_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
