/* tests/unit/test_coll_probe.c: ranks as threads measure, with numbers of the test's choosing, and
 * must all come to the same algorithms.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker/coll_ipc_probe.h"

#define RANKS 4

/* Microseconds by algorithm (packets, one-push, one-pull, two-push, two-pull) and size. */
struct times {
    float us[IPC_ALGORITHMS - 1];
};

struct member {
    struct coll *shm;
    const struct times *small, *middle, *large; /* 32 KB, 128 KB, 1 MB */
    int late, aborts_at; /* the measurement that takes too long; before which it aborts; 0: none */
    int measured, rc;
    struct ipc_choice choice;
};

static float time_sum(void *user, enum ipc_algorithm a, int64_t bytes) {
    struct member *m = user;
    const struct times *t = bytes > (128 << 10)  ? m->large
                            : bytes > (32 << 10) ? m->middle
                                                 : m->small;
    m->measured++;
    if (m->aborts_at == m->measured) coll_abort(m->shm);
    if (m->late == m->measured)
        nanosleep(&(struct timespec){.tv_nsec = (IPC_PROBE_US + 10000) * 1000L}, NULL);
    return t->us[a - 1];
}

static void *body(void *arg) {
    struct member *m = arg;
    m->rc = ipc_probe(&m->choice, m->shm, time_sum, m);
    return NULL;
}

static void run(struct member m[RANKS]) {
    static uint32_t generation;
    pthread_t thread[RANKS];
    char path[64];
    struct err_text err = {0};
    uint64_t bytes = coll_shm_bytes(RANKS, 4096);
    int fd = memfd_create("coll", MFD_CLOEXEC);
    assert_true(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    generation++;
    for (int r = 0; r < RANKS; r++)
        assert_int_equal(coll_open_shm(&m[r].shm, path, bytes, r, RANKS, generation, &err), OK);
    for (int r = 0; r < RANKS; r++) pthread_create(&thread[r], NULL, body, &m[r]);
    for (int r = 0; r < RANKS; r++) pthread_join(thread[r], NULL);
    for (int r = 0; r < RANKS; r++) coll_close(m[r].shm);
    close(fd);
}

static void expect(const struct member m[RANKS], struct ipc_choice want) {
    for (int r = 0; r < RANKS; r++) {
        const struct ipc_choice *c = &m[r].choice;
        assert_int_equal(m[r].rc, OK);
        assert_int_equal(c->packets_max, want.packets_max);
        assert_int_equal(c->one_shot_max, want.one_shot_max);
        assert_string_equal(ipc_algorithm_name((enum ipc_algorithm)c->one_shot),
                            ipc_algorithm_name((enum ipc_algorithm)want.one_shot));
        assert_string_equal(ipc_algorithm_name((enum ipc_algorithm)c->two_shot),
                            ipc_algorithm_name((enum ipc_algorithm)want.two_shot));
    }
}

/* As on a switched board: packets when small, one shot in the middle, two when large. */
static const struct times small = {{2, 3, 4, 9, 8}}, middle = {{9, 5, 6, 10, 8}},
                          large = {{90, 70, 60, 30, 20}};

static void fill(struct member m[RANKS]) {
    memset(m, 0, RANKS * sizeof m[0]);
    for (int r = 0; r < RANKS; r++) m[r].small = &small, m[r].middle = &middle, m[r].large = &large;
}

static void each_size_gets_what_is_fastest_there(void **state) {
    UNUSED(state);
    struct member m[RANKS];
    fill(m);
    run(m);
    expect(m, (struct ipc_choice){32 << 10, 128 << 10, IPC_ONE_PUSH, IPC_TWO_PULL, 0});
}

static void the_slowest_rank_decides(void **state) {
    UNUSED(state);
    static const struct times slow_push = {{2, 300, 4, 900, 8}};
    struct member m[RANKS];
    fill(m);
    m[2].small = m[2].middle = &slow_push;
    run(m);
    expect(m, (struct ipc_choice){32 << 10, 128 << 10, IPC_ONE_PULL, IPC_TWO_PULL, 0});
}

static void where_two_shots_always_win_there_is_nothing_else(void **state) {
    UNUSED(state);
    static const struct times two = {{9, 9, 9, 2, 3}};
    struct member m[RANKS];
    fill(m);
    for (int r = 0; r < RANKS; r++) m[r].small = m[r].middle = m[r].large = &two;
    run(m);
    expect(m, (struct ipc_choice){0, 0, IPC_ONE_PUSH, IPC_TWO_PUSH, 0});
    assert_int_equal(ipc_choose(&m[0].choice, 4), IPC_TWO_PUSH);
}

static void when_one_rank_runs_out_of_time_all_keep_the_default(void **state) {
    UNUSED(state);
    struct member m[RANKS];
    fill(m);
    m[1].late = 7;
    run(m);
    expect(m, ipc_choice_default());
    for (int r = 0; r < RANKS; r++) assert_int_equal(m[r].measured, 7);
}

static void an_abort_ends_it_on_every_rank(void **state) {
    UNUSED(state);
    struct member m[RANKS];
    fill(m);
    m[3].aborts_at = 4;
    run(m);
    for (int r = 0; r < RANKS; r++) assert_int_equal(m[r].rc, ERR_ABORTED);
}

static void the_bounds_belong_to_the_smaller_way(void **state) {
    UNUSED(state);
    const struct ipc_choice c = {1024, 4096, IPC_ONE_PULL, IPC_TWO_PUSH, 0};
    assert_int_equal(ipc_choose(&c, 1024), IPC_PACKETS);
    assert_int_equal(ipc_choose(&c, 1028), IPC_ONE_PULL);
    assert_int_equal(ipc_choose(&c, 4096), IPC_ONE_PULL);
    assert_int_equal(ipc_choose(&c, 4100), IPC_TWO_PUSH);
}

static void the_blocks_of_all_ranks_of_a_device_fit_on_it(void **state) {
    UNUSED(state);
    assert_int_equal(ipc_blocks(64, 1, 132), 64); /* a device of its own: as many as asked */
    assert_int_equal(ipc_blocks(64, 2, 132), 33);
    assert_int_equal(ipc_blocks(4, 2, 132), 4);
    assert_int_equal(ipc_blocks(64, 16, 20), 1);
    for (int ranks = 2; ranks <= 16; ranks++)
        for (int sms = 2 * ranks; sms < 200; sms++)
            assert_true(2 * ranks * ipc_blocks(64, ranks, sms) <= sms);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_size_gets_what_is_fastest_there),
        cmocka_unit_test(the_slowest_rank_decides),
        cmocka_unit_test(where_two_shots_always_win_there_is_nothing_else),
        cmocka_unit_test(when_one_rank_runs_out_of_time_all_keep_the_default),
        cmocka_unit_test(an_abort_ends_it_on_every_rank),
        cmocka_unit_test(the_bounds_belong_to_the_smaller_way),
        cmocka_unit_test(the_blocks_of_all_ranks_of_a_device_fit_on_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
