/* tests/unit/test_notify.c: what a service manager is told, state by state.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/notify.h"

static struct notify n;
static struct engine_status st;
static char out[NOTIFY_BYTES];

static int fresh(void **state) {
    UNUSED(state);
    n = (struct notify){.watchdog = true};
    st =
        (struct engine_status){.state = ENGINE_LOADING, .why = "loading the model", .n_workers = 2};
    return 0;
}

/* A manager whose queue is full does not hold the loop up, and hears later what it missed. */
static void a_full_queue_is_not_waited_for(void **state) {
    UNUSED(state);
    int pair[2], sent = 0;
    char heard[NOTIFY_BYTES];
    assert_int_equal(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair), 0);
    while (send(pair[0], "x", 1, MSG_DONTWAIT) == 1) sent++;
    n.fd = pair[0];
    notify_look(&n, &st, true, false);
    assert_false(n.ready);
    while (sent-- > 0) assert_int_equal(recv(pair[1], heard, sizeof heard, 0), 1);
    notify_look(&n, &st, true, false);
    assert_true(n.ready);
    ssize_t bytes = recv(pair[1], heard, sizeof heard - 1, MSG_DONTWAIT);
    assert_true(bytes > 0);
    heard[bytes] = 0;
    assert_non_null(strstr(heard, "READY=1\n"));
    close(pair[1]);
    notify_close(&n);
}

static bool says(const char *line) {
    char with_end[NOTIFY_BYTES];
    snprintf(with_end, sizeof with_end, "%s\n", line);
    return strstr(out, with_end) != NULL;
}

static void look(bool ready, bool stopping) {
    notify_text(&n, &st, ready, stopping, out);
}

static void ready_is_told_once_and_not_before_it_is_true(void **state) {
    UNUSED(state);
    look(false, false);
    assert_false(says("READY=1"));
    st.state = ENGINE_READY;
    look(false, false);
    assert_false(says("READY=1"));
    look(true, false);
    assert_true(says("READY=1"));
    look(true, false);
    assert_false(says("READY=1"));
    st.state = ENGINE_RECOVERING;
    look(false, false);
    look(true, false);
    assert_false(says("READY=1"));
}

static void loading_and_stopping_ask_for_more_time_and_serving_does_not(void **state) {
    UNUSED(state);
    look(false, false);
    assert_true(says("EXTEND_TIMEOUT_USEC=30000000"));
    look(true, false);
    assert_false(says("EXTEND_TIMEOUT_USEC=30000000"));
    look(true, true);
    assert_true(says("STOPPING=1"));
    assert_true(says("EXTEND_TIMEOUT_USEC=30000000"));
    look(false, true);
    assert_false(says("STOPPING=1"));
    assert_true(says("EXTEND_TIMEOUT_USEC=30000000"));
}

static void a_server_that_is_asked_to_stop_while_loading_never_says_ready(void **state) {
    UNUSED(state);
    look(true, true);
    assert_false(says("READY=1"));
}

static void the_sign_of_life_ends_when_nobody_decides_about_a_step(void **state) {
    UNUSED(state);
    st.state = ENGINE_READY;
    look(true, false);
    assert_true(says("WATCHDOG=1"));
    st.step = 7;
    st.step_bound_us = 3000000;
    st.step_age_us = 12900000;
    look(true, false);
    assert_true(says("WATCHDOG=1"));
    st.step_age_us = 13100000;
    look(true, false);
    assert_false(says("WATCHDOG=1"));
    st.step = 0;
    n.watchdog = false;
    look(true, false);
    assert_false(says("WATCHDOG=1"));
}

static void the_line_says_what_goes_on_and_is_sent_when_it_changes(void **state) {
    UNUSED(state);
    st.workers[0].load_bytes = 3 << 20;
    st.workers[0].load_total = st.workers[1].load_total = 10 << 20;
    look(false, false);
    assert_true(says("STATUS=loading the model: 3 of 20 MiB"));
    look(false, false);
    assert_null(strstr(out, "STATUS="));
    st.state = ENGINE_READY;
    st.running = 3;
    st.waiting = 1;
    look(true, false);
    assert_true(says("STATUS=ready: 2 ranks, 3 running, 1 waiting"));
    st.state = ENGINE_RECOVERING;
    strcpy(st.why, "rank 1 was lost\n(signal 9)");
    look(false, false);
    assert_true(says("STATUS=recovering: rank 1 was lost (signal 9)"));
    st.state = ENGINE_DRAINING;
    look(false, true);
    assert_true(says("STATUS=stopping: 3 running"));
}

static void the_longest_sentence_fits(void **state) {
    UNUSED(state);
    st.state = ENGINE_FAILED;
    memset(st.why, 'x', sizeof st.why - 1);
    look(true, true);
    assert_true(strlen(out) < NOTIFY_BYTES - 1 && out[strlen(out) - 1] == '\n');
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(ready_is_told_once_and_not_before_it_is_true, fresh),
        cmocka_unit_test_setup(loading_and_stopping_ask_for_more_time_and_serving_does_not, fresh),
        cmocka_unit_test_setup(a_server_that_is_asked_to_stop_while_loading_never_says_ready,
                               fresh),
        cmocka_unit_test_setup(the_sign_of_life_ends_when_nobody_decides_about_a_step, fresh),
        cmocka_unit_test_setup(the_line_says_what_goes_on_and_is_sent_when_it_changes, fresh),
        cmocka_unit_test_setup(a_full_queue_is_not_waited_for, fresh),
        cmocka_unit_test_setup(the_longest_sentence_fits, fresh),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
