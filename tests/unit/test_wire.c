/* tests/unit/test_wire.c: what the sockets promise when the other side is full, gone, new or wrong.
 *
 * Both ends live in one thread here; what ZeroMQ does in its own threads is waited for by receiving
 * with a generous bound, never by sleeping.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#include "proto/wire.h"

#define PATIENCE_MS 20000

static char endpoint[64];
static struct wire *router;
static struct msg *m, *got;
static const struct wire_peer three = {.rank = 3, .incarnation = 1, .channel = 's'};

static int setup(void **state) {
    static int turn;
    struct err_text err;
    UNUSED(state);
    snprintf(endpoint, sizeof endpoint, "ipc://@octavo-test-wire-%d-%d", (int)getpid(), turn++);
    m = calloc(1, sizeof *m);
    got = calloc(1, sizeof *got);
    return m && got && wire_bind(&router, endpoint, &err) == OK ? 0 : -1;
}

static int teardown(void **state) {
    UNUSED(state);
    wire_close(router);
    router = NULL;
    free(m);
    free(got);
    return 0;
}

static struct wire *dealer(struct wire_peer p) {
    struct wire *w = NULL;
    struct err_text err = {{0}};
    if (wire_connect(&w, endpoint, p, &err)) fail_msg("expected a connection, found %s", err.text);
    return w;
}

static void make_done(uint64_t id) {
    m->type = MSG_DONE;
    m->done = (struct msg_done){.step_id = id, .generation = 1};
}

/* The router knows a peer once it has heard of it. */
static void introduce(struct wire *d, struct wire_peer p) {
    struct wire_peer from;
    make_done(1000);
    assert_int_equal(wire_send(d, p, m), OK);
    assert_int_equal(wire_recv(router, &from, got, PATIENCE_MS), OK);
    assert_int_equal(from.rank, p.rank);
    assert_int_equal(from.incarnation, p.incarnation);
    assert_int_equal(from.channel, p.channel);
    assert_int_equal(got->done.step_id, 1000);
}

static void messages_go_both_ways_in_order(void **state) {
    UNUSED(state);
    struct wire *d = dealer(three);
    introduce(d, three);
    for (uint64_t i = 0; i < 100; i++) {
        make_done(i);
        assert_int_equal(wire_send(router, three, m), OK);
        assert_int_equal(wire_send(d, three, m), OK);
    }
    for (uint64_t i = 0; i < 100; i++) {
        assert_int_equal(wire_recv(d, NULL, got, PATIENCE_MS), OK);
        assert_int_equal(got->done.step_id, i);
        assert_int_equal(wire_recv(router, NULL, got, PATIENCE_MS), OK);
        assert_int_equal(got->done.step_id, i);
    }
    wire_close(d);
}

static void a_worker_may_connect_and_speak_before_the_coordinator_listens(void **state) {
    UNUSED(state);
    struct err_text err;
    wire_close(router);
    router = NULL;
    struct wire *d = dealer(three);
    make_done(1000);
    assert_int_equal(wire_send(d, three, m), OK);
    assert_int_equal(wire_bind(&router, endpoint, &err), OK);
    assert_int_equal(wire_recv(router, NULL, got, PATIENCE_MS), OK);
    wire_close(d);
}

static void the_descriptor_says_when_to_drain(void **state) {
    UNUSED(state);
    struct wire *d = dealer(three);
    struct pollfd p = {.fd = wire_fd(router), .events = POLLIN};
    for (uint64_t i = 0; i < 10; i++) {
        make_done(i);
        assert_int_equal(wire_send(d, three, m), OK);
    }
    for (uint64_t next = 0; next < 10;) {
        assert_int_equal(poll(&p, 1, PATIENCE_MS), 1);
        while (wire_recv(router, NULL, got, 0) == OK) assert_int_equal(got->done.step_id, next++);
    }
    wire_close(d);
}

static void an_unknown_peer_is_closed(void **state) {
    UNUSED(state);
    make_done(1);
    assert_int_equal(wire_send(router, three, m), ERR_CLOSED);
    struct wire *d = dealer(three);
    introduce(d, three);
    struct wire_peer other = three;
    other.channel = 'c';
    make_done(1);
    assert_int_equal(wire_send(router, other, m), ERR_CLOSED);
    wire_close(d);
}

/* Sends until the router has noticed that the peer left. */
static int send_until_not_ok(struct wire *w, struct wire_peer p, int *sent) {
    int rc = OK;
    for (*sent = 0; rc == OK && *sent < 10 * 1000 * 1000; ++*sent) rc = wire_send(w, p, m);
    return rc;
}

static void a_peer_that_left_is_closed_and_its_messages_never_reach_the_newborn(void **state) {
    UNUSED(state);
    int sent;
    struct wire *d = dealer(three);
    introduce(d, three);
    make_done(666);
    for (int i = 0; i < 10; i++) assert_int_equal(wire_send(router, three, m), OK);
    wire_close(d);
    struct wire_peer newborn = three;
    newborn.incarnation++;
    d = dealer(newborn);
    introduce(d, newborn);
    make_done(7);
    assert_int_equal(wire_send(router, newborn, m), OK);
    assert_int_equal(wire_recv(d, NULL, got, PATIENCE_MS), OK);
    assert_int_equal(got->done.step_id, 7);
    int rc = send_until_not_ok(router, three, &sent);
    assert_true(rc == ERR_CLOSED || rc == ERR_FULL);
    assert_int_equal(wire_recv(d, NULL, got, 0), ERR_AGAIN);
    wire_close(d);
}

static void a_peer_that_does_not_read_is_full_and_the_others_are_not(void **state) {
    UNUSED(state);
    int sent;
    struct wire_peer reader = {.rank = 4, .incarnation = 9, .channel = 'c'};
    struct wire *lazy = dealer(three), *d = dealer(reader);
    introduce(lazy, three);
    introduce(d, reader);
    make_done(5);
    assert_int_equal(send_until_not_ok(router, three, &sent), ERR_FULL);
    assert_true(sent >= LIMIT_WIRE_QUEUE);
    assert_int_equal(wire_send(router, reader, m), OK);
    assert_int_equal(wire_recv(d, NULL, got, PATIENCE_MS), OK);
    int received = 0; /* nothing that was accepted is lost */
    while (received < sent - 1 && wire_recv(lazy, NULL, got, PATIENCE_MS) == OK) received++;
    assert_int_equal(received, sent - 1);
    wire_close(lazy);
    wire_close(d);
}

static void a_worker_without_a_coordinator_is_full_not_stuck(void **state) {
    UNUSED(state);
    int sent;
    wire_close(router);
    router = NULL;
    struct wire *d = dealer(three);
    make_done(5);
    assert_int_equal(send_until_not_ok(d, three, &sent), ERR_FULL);
    assert_int_equal(sent, LIMIT_WIRE_QUEUE + 1);
    assert_int_equal(wire_recv(d, NULL, got, 1), ERR_AGAIN);
    wire_close(d); /* with a full queue and nobody to take it */
}

static void a_wait_is_bounded(void **state) {
    UNUSED(state);
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    assert_int_equal(wire_recv(router, NULL, got, 0), ERR_AGAIN);
    assert_int_equal(wire_recv(router, NULL, got, 30), ERR_AGAIN);
    clock_gettime(CLOCK_MONOTONIC, &b);
    int64_t ns = (int64_t)(b.tv_sec - a.tv_sec) * 1000000000 + b.tv_nsec - a.tv_nsec;
    assert_true(ns >= 29 * 1000000);
}

static void last_words_leave_before_a_patient_close(void **state) {
    UNUSED(state);
    struct wire *d = dealer(three);
    m->type = MSG_FAILED;
    m->failed = (struct msg_failed){.exit_code = EXIT_SETUP, .text = "model.gguf: too large"};
    assert_int_equal(wire_send(d, three, m), OK);
    wire_close_within(d, PATIENCE_MS);
    assert_int_equal(wire_recv(router, NULL, got, PATIENCE_MS), OK);
    assert_int_equal(got->type, MSG_FAILED);
    assert_string_equal(got->failed.text, "model.gguf: too large");
}

/* ---- strangers: plain ZeroMQ sockets ---- */

struct stranger {
    void *context, *socket;
};

static struct stranger stranger(const char *identity, size_t n) {
    struct stranger s = {.context = zmq_ctx_new()};
    s.socket = zmq_socket(s.context, ZMQ_DEALER);
    int linger = 0;
    zmq_setsockopt(s.socket, ZMQ_LINGER, &linger, sizeof linger);
    if (n) assert_int_equal(zmq_setsockopt(s.socket, ZMQ_ROUTING_ID, identity, n), 0);
    assert_int_equal(zmq_connect(s.socket, endpoint), 0);
    return s;
}

static void stranger_leaves(struct stranger s) {
    zmq_close(s.socket);
    zmq_ctx_term(s.context);
}

static void say(struct stranger s, const char *bytes, size_t n, bool more) {
    assert_int_equal(zmq_send(s.socket, bytes, n, more ? ZMQ_SNDMORE : 0), (int)n);
}

static void an_identity_that_is_none_of_ours_is_refused_and_consumed(void **state) {
    UNUSED(state);
    static const char *const identities[] = {
        "", "x", "3.1", "3.1.", "3.1.x", "3.1.s2", "03.1.s", "3.01.s", " 3.1.s", "3.1. s", "-1.1.s",
        "16.1.s", "3.-1.s", "3.4294967296.s", "+3.1.s", "3.1.s\n", "99999999999999999999.1.s",
        "3333333333333333333333333333333333333333333333.1.s",
    };
    for (size_t i = 0; i < ARRAY_LEN(identities); i++) {
        struct stranger s = stranger(identities[i], strlen(identities[i]));
        struct wire_peer from = {.channel = 'x'};
        say(s, "\x91\x0d", 2, false); /* a right STOP */
        int rc = wire_recv(router, &from, got, PATIENCE_MS);
        if (rc != ERR_FORMAT)
            fail_msg("'%s': expected format, found %s", identities[i], err_name(rc));
        assert_int_equal(from.channel, 0);
        assert_int_equal(wire_recv(router, NULL, got, 0), ERR_AGAIN);
        stranger_leaves(s);
    }
}

static void a_message_that_is_none_is_refused_and_the_next_one_is_read(void **state) {
    UNUSED(state);
    struct stranger s = stranger("5.2.c", 5);
    struct wire_peer from;
    static const struct {
        const char *p;
        size_t n;
        bool more;
        int expect;
    } said[] = {
        {"", 0, false, ERR_FORMAT},        {"garbage", 7, false, ERR_FORMAT},
        {"\x91\x0d", 2, false, OK},        {"", 0, true, 0},
        {"\x91\x0d", 2, false, ERR_FORMAT}, /* an empty frame first, as REQ sockets do */
        {"\x91\x0d", 2, true, 0},          {"", 0, true, 0},
        {"tail", 4, false, ERR_FORMAT},    {"\x92\x01\x02", 3, false, ERR_VERSION},
        {"\x92\x0b\xcf\0\0\0\x01\0\0\0\0", 11, false, ERR_FORMAT},
        {"\x91\x0d", 2, false, OK},
    };
    for (size_t i = 0; i < ARRAY_LEN(said); i++) {
        say(s, said[i].p, said[i].n, said[i].more);
        if (said[i].more) continue;
        int rc = wire_recv(router, &from, got, PATIENCE_MS);
        if (rc != said[i].expect)
            fail_msg("row %zu: expected %s, found %s", i, err_name(said[i].expect), err_name(rc));
        assert_int_equal(from.rank, 5);
        assert_int_equal(from.channel, 'c');
    }
    stranger_leaves(s);
}

static void a_message_above_the_limit_disconnects_its_sender(void **state) {
    UNUSED(state);
    struct stranger s = stranger("5.2.c", 5);
    size_t n = LIMIT_MESSAGE_BYTES + 1;
    char *p = calloc(1, n);
    zmq_send(s.socket, p, n, 0);
    free(p);
    struct wire *d = dealer(three);
    introduce(d, three); /* the next message that arrives is another's */
    wire_close(d);
    stranger_leaves(s);
}

/* ---- endpoints ---- */

static void an_endpoint_in_use_or_not_understood_is_a_sentence(void **state) {
    UNUSED(state);
    struct wire *w = NULL;
    struct err_text err = {{0}};
    assert_int_equal(wire_bind(&w, endpoint, &err), ERR_SYS);
    assert_non_null(strstr(err.text, endpoint));
    assert_non_null(strstr(err.text, "in use"));
    assert_int_equal(wire_bind(&w, "nonsense", &err), ERR_SYS);
    assert_non_null(strstr(err.text, "nonsense: expected to listen there, found:"));
    assert_int_equal(wire_connect(&w, "carrier://pigeon", three, &err), ERR_SYS);
    assert_null(w);
}

static void sockets_in_the_file_system_and_tcp_work_too(void **state) {
    UNUSED(state);
    struct err_text err;
    char path[64];
    snprintf(path, sizeof path, "ipc:///tmp/octavo-test-wire-%d", (int)getpid());
    const char *const endpoints[] = {path, "tcp://127.0.0.1:27391", "tcp://127.0.0.1:27392"};
    int worked = 0;
    for (size_t i = 0; i < ARRAY_LEN(endpoints); i++) {
        wire_close(router);
        router = NULL;
        int rc = wire_bind(&router, endpoints[i], &err);
        if (rc && strstr(err.text, "in use")) continue; /* somebody else's port */
        assert_int_equal(rc, OK);
        snprintf(endpoint, sizeof endpoint, "%s", endpoints[i]);
        struct wire *d = dealer(three);
        introduce(d, three);
        wire_close(d);
        worked++;
    }
    assert_true(worked >= 1);
    unlink(path + strlen("ipc://"));
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(messages_go_both_ways_in_order),
        TEST(a_worker_may_connect_and_speak_before_the_coordinator_listens),
        TEST(the_descriptor_says_when_to_drain),
        TEST(an_unknown_peer_is_closed),
        TEST(a_peer_that_left_is_closed_and_its_messages_never_reach_the_newborn),
        TEST(a_peer_that_does_not_read_is_full_and_the_others_are_not),
        TEST(a_worker_without_a_coordinator_is_full_not_stuck),
        TEST(a_wait_is_bounded),
        TEST(last_words_leave_before_a_patient_close),
        TEST(an_identity_that_is_none_of_ours_is_refused_and_consumed),
        TEST(a_message_that_is_none_is_refused_and_the_next_one_is_read),
        TEST(a_message_above_the_limit_disconnects_its_sender),
        TEST(an_endpoint_in_use_or_not_understood_is_a_sentence),
        TEST(sockets_in_the_file_system_and_tcp_work_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
