/* tests/unit/test_fleet.c: what the fleet plans before it starts anybody: cores, cache pages,
 * command lines. Its life with processes is tested through the engine, in test_engine.c.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/cacheplan.h"
#include "coordinator/fleet_state.h"
#include "coordinator/launch.h"
#include "coordinator/pin.h"

static cpu_set_t set_of(const int *cpus, int n) {
    cpu_set_t s;
    CPU_ZERO(&s);
    for (int i = 0; i < n; i++) CPU_SET(cpus[i], &s);
    return s;
}

static void cores_are_dealt_in_runs_and_none_twice(void **state) {
    UNUSED(state);
    const int mine[] = {1, 2, 3, 8, 9, 10, 11, 40};
    static const char *const want[] = {"1-2", "3,8-9", "10-11,40"};
    cpu_set_t allowed = set_of(mine, 8), all;
    char text[PIN_TEXT_BYTES];
    CPU_ZERO(&all);
    for (int r = 0; r < 3; r++) {
        cpu_set_t got, both;
        pin_plan(&got, &allowed, r, 3);
        pin_text(text, &got);
        assert_string_equal(text, want[r]);
        CPU_AND(&both, &got, &all);
        assert_int_equal(CPU_COUNT(&both), 0);
        CPU_OR(&all, &all, &got);
    }
    assert_true(CPU_EQUAL(&all, &allowed));
}

static void fewer_cores_than_workers_are_shared(void **state) {
    UNUSED(state);
    const int mine[] = {4, 7};
    cpu_set_t allowed = set_of(mine, 2), got;
    for (int r = 0; r < 3; r++) {
        pin_plan(&got, &allowed, r, 3);
        assert_true(CPU_EQUAL(&got, &allowed));
    }
}

static void the_cache_is_as_large_as_useful_and_no_larger_than_there_is_room(void **state) {
    UNUSED(state);
    struct cache_room r = {.host_memory = true,
                           .host_available_bytes = 8000000,
                           .free_bytes = 1000,
                           .ranks_per_device = 4,
                           .world = 4,
                           .page_bytes = 1000,
                           .context = 640,
                           .max_seqs = 2};
    assert_int_equal(cache_plan_pages(&r), 22); /* two sequences of ten pages, one to spare each */
    r.max_seqs = 1000;
    assert_int_equal(cache_plan_pages(&r), 500); /* a quarter of 8 MB, over four ranks */
    r.host_memory = false;
    r.free_bytes = 4000000;
    assert_int_equal(cache_plan_pages(&r), 900); /* nine tenths of 4 MB, over four ranks */
    r.cache_tokens = 65;
    assert_int_equal(cache_plan_pages(&r), 2);
    struct err_text err = {0};
    int64_t pages;
    r.cache_tokens = 1000 * LIMIT_PAGE_TOKENS;
    assert_int_equal(cache_plan(&r, &pages, &err), OK); /* all there is, if that is asked for */
    assert_int_equal(pages, 1000);
    r.cache_tokens++;
    assert_int_equal(cache_plan(&r, &pages, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "at most the 64000"));
    assert_non_null(strstr(err.text, "found 64001"));
    r.cache_tokens = 0;
    r.free_bytes = 4000;
    assert_int_equal(cache_plan_pages(&r), 0);
    assert_int_equal(cache_plan(&r, &pages, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "found 4000 bytes"));
    assert_true(cache_host_available() > 0);
}

static void a_step_may_take_longer_the_more_it_feeds_and_the_farther_it_looks_back(void **state) {
    UNUSED(state);
    static struct fleet f;
    static struct msg_step one, chunk;
    f.o.step_timeout_s = 3;
    one = (struct msg_step){.id = 1, .n_entries = 1, .entries = {{.pos = 50, .count = 1}}};
    chunk = (struct msg_step){.id = 2, .n_entries = 1, .entries = {{.pos = 0, .count = 512}}};
    fleet_note_step(&f, &one, 0);
    assert_true(f.flight[0].due_us >= 60 * SECOND_US); /* nothing is known yet */
    for (int r = 0; r < LIMIT_RANKS; r++) f.w[r].answered = 9;
    fleet_answer_done(&f, 30000); /* a step of one row took 30 ms */
    assert_int_equal(f.n_flight, 0);
    fleet_note_step(&f, &one, 0);
    uint64_t decode = f.flight[f.flight_head].due_us;
    assert_in_range(decode, 3 * SECOND_US, 4 * SECOND_US);
    fleet_answer_done(&f, 30000);
    fleet_note_step(&f, &chunk, 0);
    uint64_t prefill = f.flight[f.flight_head].due_us;
    assert_true(prefill > 3 * SECOND_US + 8 * 512 * 25000ull);
    fleet_answer_done(&f, SECOND_US);
    chunk.entries[0].pos = 100000;
    fleet_note_step(&f, &chunk, 0);
    assert_true(f.flight[f.flight_head].due_us > 10 * prefill);
    f.stalls = 1; /* it was only slow: twice as long next time */
    assert_true(fleet_step_bound_us(&f, 1) > 2 * 3 * SECOND_US);
}

/* A clock that only this test turns. */
static void restarts_wait_twice_as_long_each_time_until_a_minute_of_health(void **state) {
    UNUSED(state);
    static struct fleet f;
    static struct worker w;
    static const uint64_t want_ms[] = {0, 100, 200, 400, 800, 1600, 3200, 6400, 10000, 10000};
    f.o.restart_delay_ms = 100;
    uint64_t now = 1000 * SECOND_US;
    for (int life = 0; life < 3; life++) {
        for (size_t i = 0; i < ARRAY_LEN(want_ms); i++) {
            w.ready_us = i % 2 ? now : 0; /* whether it got so far or not */
            now += i ? 59 * SECOND_US : 0;
            w.lost_us = now;
            assert_int_equal(fleet_restart_delay_us(&f, &w), want_ms[i] * 1000);
        }
        w.ready_us = now;
        now += 60 * SECOND_US;
        w.lost_us = now;
        assert_int_equal(fleet_restart_delay_us(&f, &w), 0);
        assert_int_equal(fleet_restart_delay_us(&f, &(struct worker){.streak = 70, .lost_us = now}),
                         10 * SECOND_US);
        w = (struct worker){0};
    }
    w.cause = CAUSE_ASKED; /* is nobody's failure */
    w.streak = 5;
    assert_int_equal(fleet_restart_delay_us(&f, &w), 0);
}

static void a_start_time_belongs_to_a_living_process(void **state) {
    UNUSED(state);
    uint64_t mine = child_start_time(getpid());
    assert_true(mine > 0);
    assert_true(mine >= child_start_time(getppid()));
    assert_int_equal(child_start_time(INT32_MAX), 0);
}

static const char *value_of(char **argv, const char *name) {
    for (int i = 1; argv[i] && argv[i + 1]; i += 2)
        if (!strcmp(argv[i], name)) return argv[i + 1];
    return "";
}

static void a_command_line_says_who_and_the_environment_proves_it(void **state) {
    UNUSED(state);
    struct launch a, b;
    struct engine_options o = {.worker_path = "/w",
                               .model_path = "/m with space.gguf",
                               .device = "cuda",
                               .tp = 3,
                               .n_devices = 2,
                               .collective = "ipc",
                               .shard_cache = "/shards",
                               .context = 77,
                               .max_seqs = 5,
                               .max_step_rows = 9};
    setenv("OCTAVO_COOKIE", "inherited", 1);
    assert_int_equal(launch_init(&a), OK);
    assert_int_equal(launch_init(&b), OK);
    assert_string_not_equal(a.cookie, b.cookie);
    assert_string_not_equal(a.endpoint, b.endpoint);
    assert_int_equal(strlen(a.cookie), 64);
    assert_int_equal(launch_argv(&a, &o, 2, 7), OK);
    assert_string_equal(a.argv[0], "/w");
    assert_string_equal(value_of(a.argv, "--rank"), "2");
    assert_string_equal(value_of(a.argv, "--world"), "3");
    assert_string_equal(value_of(a.argv, "--model"), "/m with space.gguf");
    assert_string_equal(value_of(a.argv, "--device-index"), "0"); /* three ranks on two devices */
    assert_string_equal(value_of(a.argv, "--context"), "77");
    assert_string_equal(value_of(a.argv, "--incarnation"), "7");
    assert_string_equal(value_of(a.argv, "--connect"), a.endpoint);
    assert_string_equal(value_of(a.argv, "--collective"), "ipc");
    assert_string_equal(value_of(a.argv, "--shard-cache"), "/shards");
    assert_int_equal(access(value_of(a.argv, "--load-share"), R_OK | W_OK), 0);
    assert_true(value_of(a.argv, "--cpus")[0] != 0);
    int cookies = 0;
    for (char **e = a.env; *e; e++)
        if (!strncmp(*e, "OCTAVO_COOKIE=", 14)) {
            cookies++;
            assert_string_equal(*e + 14, a.cookie);
        }
    assert_int_equal(cookies, 1);
    for (char **w = a.argv; *w; w++) assert_null(strstr(*w, a.cookie));
    launch_deinit(&a);
    launch_deinit(&b);
}

static void reap(uv_loop_t *loop, struct child *c) {
    while (c->open) uv_run(loop, UV_RUN_ONCE);
}

static void a_child_is_started_seen_to_end_and_killed(void **state) {
    UNUSED(state);
    uv_loop_t loop;
    struct child c = {0};
    struct err_text err = {0};
    char buf[64];
    char *three[] = {"/bin/sh", "-c", "exit 3", NULL};
    char *none[] = {"/nowhere/x", NULL}, *env[] = {NULL};
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(child_spawn(&c, &loop, three, env, &err), OK);
    reap(&loop, &c);
    assert_true(c.exited);
    assert_string_equal(child_ending(&c, buf, sizeof buf), "exit code 3");
    char *wait[] = {"/bin/sh", "-c", "kill -STOP $$", NULL};
    assert_int_equal(child_spawn(&c, &loop, wait, env, &err), OK);
    assert_true(c.start_time > 0);
    child_kill(&c);
    reap(&loop, &c);
    assert_true(c.killed);
    assert_string_equal(child_ending(&c, buf, sizeof buf), "signal 9");
    assert_int_equal(child_spawn(&c, &loop, none, env, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "/nowhere/x"));
    reap(&loop, &c);
    assert_int_equal(uv_loop_close(&loop), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cores_are_dealt_in_runs_and_none_twice),
        cmocka_unit_test(fewer_cores_than_workers_are_shared),
        cmocka_unit_test(the_cache_is_as_large_as_useful_and_no_larger_than_there_is_room),
        cmocka_unit_test(a_step_may_take_longer_the_more_it_feeds_and_the_farther_it_looks_back),
        cmocka_unit_test(restarts_wait_twice_as_long_each_time_until_a_minute_of_health),
        cmocka_unit_test(a_start_time_belongs_to_a_living_process),
        cmocka_unit_test(a_command_line_says_who_and_the_environment_proves_it),
        cmocka_unit_test(a_child_is_started_seen_to_end_and_killed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
