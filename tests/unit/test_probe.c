/* tests/unit/test_probe.c: what a worker's probe answers in each state, and that clients that are
 * slow, gone, mad or many take nothing from the others. Client and probe share this one thread: the
 * probe turns when the test says so, and the clock is the test's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker/probe.h"

#define SECOND 1000000ull

static struct probe *probe;
static struct probe_status status;
static char name[64];
static uint64_t now;

static int start(void **state) {
    UNUSED(state);
    struct err_text err = {0};
    static int serial;
    snprintf(name, sizeof name, "@octavo-test-probe-%d-%d", (int)getpid(), serial++);
    if (probe_open(&probe, &(struct probe_options){.socket = name}, &err) < 0) fail_msg("%s", err.text);
    now = 100 * SECOND;
    status = (struct probe_status){.rank = 3, .world = 8, .pid = 4242, .start_time = 99,
                                   .device = "cpu \"fast\"", .last_error = "", .generation = 2};
    status.beat = (struct msg_beat){.state = WORKER_READY, .last_step = 17, .load_bytes = 5,
                                    .load_total = 6, .memory_used_bytes = 7, .memory_free_bytes = 8};
    status.last_step_at_us = now - 1500000;
    return 0;
}

static int stop(void **state) {
    UNUSED(state);
    probe_close(probe);
    probe = NULL;
    return 0;
}

/* ---- clients --------------------------------------------------------------------------------- */

static int connect_to(const char *to) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(to);
    memcpy(a.sun_path, to, n);
    if (to[0] == '@') a.sun_path[0] = 0;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    if (connect(fd, (struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n)) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void say_bytes(int fd, const void *p, size_t n) {
    assert_int_equal(send(fd, p, n, MSG_NOSIGNAL), n);
}

static void say(int fd, const char *text) {
    say_bytes(fd, text, strlen(text));
}

static void turn(int times) {
    for (int i = 0; i < times; i++) probe_turn(probe, &status, now);
}

/* All that came, up to the end of the stream; -1 if it has not ended. */
static ssize_t hear(int fd, char *out, size_t cap) {
    size_t n = 0;
    for (;;) {
        ssize_t got = recv(fd, out + n, cap - 1 - n, 0);
        if (got < 0) return -1;
        n += (size_t)got;
        out[n] = 0;
        if (got == 0) return (ssize_t)n;
    }
}

/* One request from connect to the end; the answer, whole. */
static const char *ask(const char *request) {
    static char answer[8192];
    int fd = connect_to(name);
    assert_true(fd >= 0);
    say(fd, request);
    turn(2);
    if (hear(fd, answer, sizeof answer) < 0) fail_msg("%s: expected an answer that ends", request);
    close(fd);
    turn(1);
    return answer;
}

static void expect(const char *path, int code, const char *word) {
    char request[256], first[64];
    snprintf(request, sizeof request, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path);
    const char *a = ask(request), *body = strstr(a, "\r\n\r\n");
    snprintf(first, sizeof first, "HTTP/1.1 %d ", code);
    assert_non_null(body);
    if (strncmp(a, first, strlen(first)) || strncmp(body + 4, word, strlen(word)) ||
        strcmp(body + 4 + strlen(word), "\n"))
        fail_msg("%s: expected %d %s, found %s", path, code, word, a);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void every_state_has_its_codes(void **state) {
    UNUSED(state);
    static const struct {
        enum worker_state state;
        int ready;
    } rows[] = {{WORKER_SPAWNED, 503}, {WORKER_LOADING, 503},  {WORKER_LOADED, 503},
                {WORKER_READY, 200},   {WORKER_STEPPING, 200}, {WORKER_DRAINING, 503},
                {WORKER_CAPTURING, 503}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        status.beat.state = rows[i].state;
        const char *word = worker_state_name(rows[i].state);
        expect("/live", 200, word);
        expect("/ready", rows[i].ready, word);
        expect("/progress", 200, word);
    }
}

static void a_step_beyond_its_bound_is_no_progress(void **state) {
    UNUSED(state);
    status.beat.state = WORKER_STEPPING;
    status.step_began_us = now;
    status.step_bound_us = 5 * SECOND;
    now += 5 * SECOND;
    expect("/progress", 200, "stepping");
    now += 1;
    expect("/progress", 503, "stuck");
    expect("/ready", 200, "stepping");
    expect("/live", 200, "stuck");
    status.step_began_us = 0;
    now += 1000 * SECOND; /* idle for long is not stuck */
    expect("/progress", 200, "stepping");
}

static void status_tells_all_as_json(void **state) {
    UNUSED(state);
    status.last_error = "tab\there";
    status.graphs = 84;
    status.graph_bytes = 1234;
    status.graph_seconds = 1.5;
    const char *body = strstr(ask("GET /status?x=1 HTTP/1.0\n\n"), "\r\n\r\n");
    assert_non_null(body);
    assert_string_equal(body + 4,
                        "{\"rank\":3,\"world\":8,\"pid\":4242,\"start_time\":99,\"state\":\"ready\","
                        "\"ready\":true,\"stuck\":false,\"device\":\"cpu \\\"fast\\\"\",\"generation\":2,"
                        "\"last_step\":17,\"age_ms\":1500,\"step_ms\":null,"
                        "\"graphs\":84,\"graph_bytes\":1234,\"graph_seconds\":1.500,\"load_bytes\":5,"
                        "\"load_total\":6,\"memory_used_bytes\":7,\"memory_free_bytes\":8,"
                        "\"last_error\":\"tab?here\"}\n");
    status.last_error = "";
    status.last_step_at_us = 0;
    body = strstr(ask("GET /status HTTP/1.1\r\n\r\n"), "\r\n\r\n");
    assert_non_null(strstr(body, "\"age_ms\":null"));
    assert_non_null(strstr(body, "\"last_error\":null"));
}

static void the_longest_status_is_whole(void **state) {
    UNUSED(state);
    char device[96], error[512];
    memset(device, '"', sizeof device);
    memset(error, '\\', sizeof error);
    device[95] = error[511] = 0;
    status.device = device;
    status.last_error = error;
    status.beat.last_step = status.beat.load_bytes = status.beat.load_total = UINT64_MAX;
    const char *a = ask("GET /status HTTP/1.1\r\n\r\n");
    assert_string_equal(a + strlen(a) - 3, "\"}\n");
}

static void what_is_no_request_is_refused(void **state) {
    UNUSED(state);
    static const struct {
        const char *request, *answer;
    } rows[] = {{"POST /live HTTP/1.1\r\n\r\n", "HTTP/1.1 405 "},
                {"GET /nowhere HTTP/1.1\r\n\r\n", "HTTP/1.1 404 "},
                {"GET /live/ HTTP/1.1\r\n\r\n", "HTTP/1.1 404 "},
                {"GET live HTTP/1.1\r\n\r\n", "HTTP/1.1 400 "},
                {"GET /live HTTP/2\r\n\r\n", "HTTP/1.1 400 "},
                {"GET /live\r\n\r\n", "HTTP/1.1 400 "},
                {"GET /live HTTP/1.1 more\r\n\r\n", "HTTP/1.1 400 "},
                {"\r\n\r\n", "HTTP/1.1 400 "},
                {"\x16\x03\x01\x02\n\n", "HTTP/1.1 400 "},
                {"\r\nGET /live HTTP/1.1\r\n\r\n", "HTTP/1.1 200 "}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        const char *a = ask(rows[i].request);
        if (strncmp(a, rows[i].answer, strlen(rows[i].answer)))
            fail_msg("%s: expected %s, found %s", rows[i].request, rows[i].answer, a);
    }
    int fd = connect_to(name);
    char answer[512];
    say_bytes(fd, "GET /live\0 HTTP/1.1\r\n\r\n", 23);
    turn(2);
    assert_true(hear(fd, answer, sizeof answer) > 0);
    assert_non_null(strstr(answer, " 400 "));
    close(fd);
}

static void head_is_an_answer_without_a_body(void **state) {
    UNUSED(state);
    const char *a = ask("HEAD /ready HTTP/1.1\r\n\r\n");
    assert_non_null(strstr(a, "Content-Length: 6\r\n"));
    assert_string_equal(a + strlen(a) - 4, "\r\n\r\n");
}

static void a_request_may_come_byte_by_byte(void **state) {
    UNUSED(state);
    const char *request = "GET /live HTTP/1.1\r\nHost: x\r\n\r\n";
    char answer[512];
    int fd = connect_to(name);
    for (const char *p = request; *p; p++) {
        say_bytes(fd, p, 1);
        turn(1);
    }
    assert_true(hear(fd, answer, sizeof answer) > 0);
    assert_non_null(strstr(answer, " 200 OK"));
    close(fd);
}

static void a_request_too_long_is_refused_and_its_rest_dropped(void **state) {
    UNUSED(state);
    char *much = malloc(100000), answer[512];
    memset(much, 'a', 100000);
    memcpy(much, "GET /live HTTP/1.1\r\nX: ", 23);
    int fd = connect_to(name);
    say_bytes(fd, much, 100000);
    turn(30);
    assert_true(hear(fd, answer, sizeof answer) > 0);
    assert_non_null(strstr(answer, " 431 "));
    close(fd);
    free(much);
}

static void who_hangs_is_cut_off_and_keeps_nobody_out(void **state) {
    UNUSED(state);
    int hanging[3 * PROBE_CLIENTS];
    char answer[512];
    for (size_t i = 0; i < ARRAY_LEN(hanging); i++) {
        hanging[i] = connect_to(name);
        assert_true(hanging[i] >= 0);
        say(hanging[i], "GET /li");
        turn(1);
        now++;
    }
    expect("/live", 200, "ready");
    struct pollfd fds[PROBE_FDS];
    assert_int_equal(probe_fds(probe, fds), PROBE_CLIENTS); /* a listener; the asker has left */
    now += PROBE_PATIENCE_US + 1;
    turn(1);
    assert_int_equal(probe_fds(probe, fds), 1);
    for (size_t i = 0; i < ARRAY_LEN(hanging); i++) {
        assert_int_equal(hear(hanging[i], answer, sizeof answer), 0); /* closed, unanswered */
        close(hanging[i]);
    }
}

static void who_does_not_close_is_closed(void **state) {
    UNUSED(state);
    struct pollfd fds[PROBE_FDS];
    int fd = connect_to(name);
    say(fd, "GET /live HTTP/1.1\r\n\r\n");
    turn(2);
    assert_int_equal(probe_fds(probe, fds), 2);
    now += PROBE_PATIENCE_US + 1;
    turn(1);
    assert_int_equal(probe_fds(probe, fds), 1);
    close(fd);
}

static void who_leaves_early_is_forgotten(void **state) {
    UNUSED(state);
    struct pollfd fds[PROBE_FDS];
    static const char *const parts[] = {"", "GET /li", "GET /live HTTP/1.1\r\n\r\n"};
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) {
        int fd = connect_to(name);
        if (*parts[i]) say(fd, parts[i]);
        close(fd);
        turn(3);
        assert_int_equal(probe_fds(probe, fds), 1);
    }
    expect("/ready", 200, "ready");
}

static void random_bytes_hurt_nobody(void **state) {
    UNUSED(state);
    unsigned seed = (unsigned)time(NULL);
    if (getenv("OCTAVO_TEST_SEED")) seed = (unsigned)atoi(getenv("OCTAVO_TEST_SEED"));
    print_message("seed %u (OCTAVO_TEST_SEED)\n", seed);
    srand(seed);
    for (int i = 0; i < 2000; i++) {
        char bytes[64];
        int fd = connect_to(name);
        static const char alphabet[] = "GET /livereadystatus HTTP/1.1\r\n\n\r\n\n?\\\"\0";
        size_t n = (size_t)rand() % sizeof bytes;
        for (size_t k = 0; k < n; k++)
            bytes[k] = rand() % 8 ? alphabet[(size_t)rand() % sizeof alphabet] : (char)rand();
        if (n) say_bytes(fd, bytes, n);
        turn(1);
        if (rand() % 2) say(fd, "\r\n\r\n");
        turn(1);
        close(fd);
        now += 1000;
    }
    expect("/live", 200, "ready");
}

static void without_descriptors_it_rests_and_comes_back(void **state) {
    UNUSED(state);
    struct rlimit old, none;
    struct pollfd fds[PROBE_FDS];
    int fd = connect_to(name);
    say(fd, "GET /live HTTP/1.1\r\n\r\n");
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    none = old;
    none.rlim_cur = 3; /* nothing more can be opened; what is open stays */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    turn(1);
    int n = probe_fds(probe, fds);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(n, 0); /* polling the listener would spin */
    now += SECOND;
    turn(2);
    char answer[512];
    assert_true(hear(fd, answer, sizeof answer) > 0);
    close(fd);
}

static void a_port_answers_too_and_a_taken_one_is_named(void **state) {
    UNUSED(state);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    struct probe *second;
    struct err_text err = {0};
    char want[64], answer[512];
    int taken = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(taken, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(taken, 1), 0);
    assert_int_equal(getsockname(taken, (struct sockaddr *)&a, &size), 0);
    struct probe_options o = {.port = ntohs(a.sin_port)};
    assert_int_equal(probe_open(&second, &o, &err), ERR_SETUP);
    snprintf(want, sizeof want, "probe port 127.0.0.1:%d: expected to listen there", o.port);
    assert_non_null(strstr(err.text, want));
    close(taken);
    assert_int_equal(probe_open(&second, &o, &err), OK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    say(fd, "GET /ready HTTP/1.1\r\n\r\n");
    for (int i = 0; i < 1000; i++) probe_turn(second, &status, now);
    assert_true(hear(fd, answer, sizeof answer) > 0);
    assert_non_null(strstr(answer, " 200 OK"));
    close(fd);
    probe_close(second);
}

static void a_socket_file_of_a_dead_worker_is_replaced_and_ours_removed(void **state) {
    UNUSED(state);
    char path[64];
    struct probe *p;
    struct err_text err = {0};
    snprintf(path, sizeof path, "/tmp/octavo-test-probe-%d", (int)getpid());
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    strcpy(a.sun_path, path);
    int dead = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(dead, (struct sockaddr *)&a, sizeof a), 0);
    close(dead);
    assert_int_equal(probe_open(&p, &(struct probe_options){.socket = path}, &err), OK);
    struct probe *second;
    assert_int_equal(probe_open(&second, &(struct probe_options){.socket = path}, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, path)); /* somebody listens there: not removed */
    probe_close(p);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(probe_open(&p, &(struct probe_options){.socket = "@"}, &err), ERR_SETUP);
    char longer[200];
    memset(longer, 'x', sizeof longer);
    longer[199] = 0;
    assert_int_equal(probe_open(&p, &(struct probe_options){.socket = longer}, &err), ERR_SETUP);
}

int main(void) {
#define PROBE(f) cmocka_unit_test_setup_teardown(f, start, stop)
    const struct CMUnitTest tests[] = {
        PROBE(every_state_has_its_codes),
        PROBE(a_step_beyond_its_bound_is_no_progress),
        PROBE(status_tells_all_as_json),
        PROBE(the_longest_status_is_whole),
        PROBE(what_is_no_request_is_refused),
        PROBE(head_is_an_answer_without_a_body),
        PROBE(a_request_may_come_byte_by_byte),
        PROBE(a_request_too_long_is_refused_and_its_rest_dropped),
        PROBE(who_hangs_is_cut_off_and_keeps_nobody_out),
        PROBE(who_does_not_close_is_closed),
        PROBE(who_leaves_early_is_forgotten),
        PROBE(random_bytes_hurt_nobody),
        PROBE(without_descriptors_it_rests_and_comes_back),
        PROBE(a_port_answers_too_and_a_taken_one_is_named),
        PROBE(a_socket_file_of_a_dead_worker_is_replaced_and_ours_removed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
