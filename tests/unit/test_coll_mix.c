/* tests/unit/test_coll_mix.c: ranks as threads over two collectives at once, shared memory and the
 * stand-in for NCCL: who takes which way, what an abort spoils, and where the crossover is put.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/fake_nccl.h"
#include "worker/coll_mix.h"
#include "worker/coll_nccl.h"

#define RANKS      4
#define FLOATS     4000
#define LARGE_FROM 8000

static struct fake_nccl_knobs *knobs;
static struct nccl *lib;
static uint32_t generation;

struct group {
    char path[64];
    uint64_t shm_bytes;
    atomic_int waiting, failures;
};

struct member {
    struct group *g;
    int rank;
    bool capturing;
    int rc, after;
    struct coll *shm, *large, *c;
    float x[FLOATS], all[FLOATS * RANKS];
    const float (*us)[2]; /* of the probe: [size][large] */
    int measured, stuck_at, late_at;
    int64_t large_from;
};

#define SHOULD(m, cond)                                                                            \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "rank %d line %d: expected %s\n", (m)->rank, __LINE__, #cond);         \
            atomic_fetch_add(&(m)->g->failures, 1);                                                \
        }                                                                                          \
    } while (0)

static void run(void *(*body)(void *), struct member m[RANKS]) {
    static struct group g;
    pthread_t thread[RANKS];
    int fd = memfd_create("coll", MFD_CLOEXEC);
    memset(&g, 0, sizeof g);
    g.shm_bytes = coll_shm_bytes(RANKS, 64 << 10);
    assert_true(fd >= 0 && ftruncate(fd, (off_t)g.shm_bytes) == 0);
    snprintf(g.path, sizeof g.path, "/proc/self/fd/%d", fd);
    generation++;
    knobs->aborts = 0;
    for (int r = 0; r < RANKS; r++) m[r].g = &g, m[r].rank = r;
    for (int r = 0; r < RANKS; r++)
        assert_int_equal(pthread_create(&thread[r], NULL, body, &m[r]), 0);
    for (int r = 0; r < RANKS; r++) pthread_join(thread[r], NULL);
    close(fd);
    assert_int_equal(g.failures, 0);
}

static struct member *members(void) {
    static struct member m[RANKS];
    memset(m, 0, sizeof m);
    return m;
}

static bool open_mix(struct member *m) {
    struct err_text err = {0};
    const struct nccl_device device = {.capturing = &m->capturing, .shm_stays = true};
    m->rc = coll_open_shm(&m->shm, m->g->path, m->g->shm_bytes, m->rank, RANKS, generation, &err);
    if (m->rc == OK)
        m->rc = coll_open_nccl(&m->large, lib, &device, m->shm, m->rank, RANKS, generation, &err);
    if (m->rc == OK)
        m->rc = coll_open_mix(&m->c, m->shm, m->large, LARGE_FROM, &m->capturing, &err);
    SHOULD(m, m->rc == OK);
    return m->rc == OK;
}

/* The order of adding shows which way a sum took: NCCL's stand-in adds from the last rank down. */
static float value(int rank, int i) {
    return (float)(1 << (rank * 7)) * (1.f + (float)i * 0x1p-20f);
}

static float in_order(int i, bool upward) {
    float sum = value(upward ? 0 : RANKS - 1, i);
    for (int r = 1; r < RANKS; r++) sum += value(upward ? r : RANKS - 1 - r, i);
    return sum;
}

static bool sums(struct member *m, int n, bool upward) {
    for (int i = 0; i < n; i++) m->x[i] = value(m->rank, i);
    if (coll_all_reduce(m->c, m->x, n) != OK) return false;
    for (int i = 0; i < n; i++)
        if (m->x[i] != in_order(i, upward)) return false;
    return true;
}

/* ---- ways ---------------------------------------------------------------------------------- */

static void *sizes_body(void *arg) {
    struct member *m = arg;
    if (!open_mix(m)) return NULL;
    SHOULD(m, !strcmp(m->c->ops->name, "shm+nccl"));
    SHOULD(m, m->c->generation == generation && m->c->world == RANKS && m->c->rank == m->rank);
    SHOULD(m, sums(m, LARGE_FROM / 4 - 1, true));
    SHOULD(m, sums(m, LARGE_FROM / 4, false));
    SHOULD(m, sums(m, FLOATS, false));
    SHOULD(m, sums(m, 1, true));
    for (int n = 100; n <= FLOATS; n += 1300) {
        for (int i = 0; i < n; i++) m->x[i] = value(m->rank, i);
        SHOULD(m, coll_all_gather(m->c, m->x, m->all, n * 4) == OK);
        for (int i = 0; i < n * RANKS; i++) SHOULD(m, m->all[i] == value(i / n, i % n));
        SHOULD(m, coll_broadcast(m->c, m->x, n * 4, 2) == OK);
        for (int i = 0; i < n; i++) SHOULD(m, m->x[i] == value(2, i));
    }
    SHOULD(m, coll_barrier(m->c) == OK);
    SHOULD(m, coll_check(m->c) == OK);
    SHOULD(m, coll_barrier(m->shm) == OK); /* nobody may be gone before all have looked */
    coll_close(m->c);
    return NULL;
}

static void the_size_alone_decides_which_way_a_message_takes(void **state) {
    UNUSED(state);
    run(sizes_body, members());
    assert_int_equal(knobs->aborts, RANKS); /* each communicator is given back once */
}

/* ---- aborts -------------------------------------------------------------------------------- */

/* Not a collective: an abort must not reach those who are still leaving it. */
static void meet(struct member *m) {
    atomic_fetch_add(&m->g->waiting, 1);
    while (atomic_load(&m->g->waiting) < RANKS) sched_yield();
}

static void *small_step_body(void *arg) {
    struct member *m = arg;
    if (!open_mix(m)) return NULL;
    SHOULD(m, sums(m, 100, true));
    meet(m);
    coll_abort(m->c);
    SHOULD(m, coll_check(m->c) == OK); /* shared memory says it by itself, and it was through */
    SHOULD(m, coll_all_reduce(m->c, m->x, 100) == ERR_ABORTED);
    coll_close(m->c);
    return NULL;
}

static void an_abort_after_a_small_step_does_not_spoil_it(void **state) {
    UNUSED(state);
    run(small_step_body, members());
}

/* All know of the abort before they look at the step. */
static void abort_spoils(struct member *m) {
    meet(m);
    if (m->rank == 1) coll_abort(m->c);
    while (m->rank != 1 && coll_check(m->large) == OK) sched_yield();
    SHOULD(m, coll_check(m->c) == ERR_ABORTED);
    coll_close(m->c);
}

static void *large_step_body(void *arg) {
    struct member *m = arg;
    if (!open_mix(m)) return NULL;
    SHOULD(m, sums(m, FLOATS, false));
    SHOULD(m, coll_check(m->c) == OK);
    if (m->capturing) SHOULD(m, coll_check(m->c) == OK);
    SHOULD(m, coll_all_reduce(m->c, m->x, m->capturing ? 100 : FLOATS) == OK);
    abort_spoils(m);
    return NULL;
}

static void an_abort_spoils_a_step_that_went_over_nccl_or_may_have_in_a_graph(void **state) {
    UNUSED(state);
    struct member *m = members();
    run(large_step_body, m);
    m = members();
    for (int r = 0; r < RANKS; r++) m[r].capturing = true;
    run(large_step_body, m);
}

static void *second_step_body(void *arg) {
    struct member *m = arg;
    if (!open_mix(m)) return NULL;
    SHOULD(m, sums(m, 100, true));
    SHOULD(m, sums(m, FLOATS, false));
    SHOULD(m, coll_check(m->c) == OK); /* of the small one, with the large one in flight */
    abort_spoils(m);
    return NULL;
}

static void the_check_of_a_small_step_does_not_answer_for_the_large_one_behind_it(void **state) {
    UNUSED(state);
    run(second_step_body, members());
}

static void *stuck_body(void *arg) {
    struct member *m = arg;
    if (!open_mix(m)) return NULL;
    if (m->rank == 3) {
        while (atomic_load(&m->g->waiting) < RANKS - 1) sched_yield();
        coll_abort(m->c);
    } else {
        atomic_fetch_add(&m->g->waiting, 1);
        SHOULD(m, coll_all_reduce(m->c, m->x, FLOATS) == ERR_ABORTED);
    }
    coll_close(m->c);
    return NULL;
}

static void ranks_stuck_in_a_large_sum_are_freed_by_an_abort_and_can_begin_again(void **state) {
    UNUSED(state);
    for (int i = 0; i < 3; i++) {
        run(stuck_body, members());
        assert_int_equal(knobs->aborts, RANKS);
        run(sizes_body, members());
    }
}

/* ---- the crossover ------------------------------------------------------------------------- */

static float time_sum(void *user, bool large, int64_t bytes) {
    struct member *m = user;
    m->measured++;
    if (m->measured == m->stuck_at) return -1;
    if (m->measured == m->late_at)
        nanosleep(&(struct timespec){.tv_nsec = (MIX_PROBE_US + 10000) * 1000L}, NULL);
    return m->us[bytes > (1 << 20) ? 0 : bytes > (256 << 10) ? 1 : 2][large];
}

static void *probe_body(void *arg) {
    struct member *m = arg;
    struct err_text err = {0};
    m->rc = coll_open_shm(&m->shm, m->g->path, m->g->shm_bytes, m->rank, RANKS, generation, &err);
    SHOULD(m, m->rc == OK);
    m->rc = mix_probe(&m->large_from, m->shm, time_sum, m);
    coll_close(m->shm);
    return NULL;
}

static void expect_crossover(struct member *m, int rc, int64_t large_from) {
    run(probe_body, m);
    for (int r = 0; r < RANKS; r++) {
        assert_int_equal(m[r].rc, rc);
        if (rc == OK) assert_int_equal(m[r].large_from, large_from);
    }
}

static struct member *measuring(const float us[3][2]) {
    struct member *m = members();
    for (int r = 0; r < RANKS; r++) m[r].us = us;
    return m;
}

/* Microseconds {small, large} at 4 MiB, 1 MiB and 256 KiB. */
static const float at_one[3][2] = {{90, 50}, {30, 29}, {9, 20}},
                   never[3][2] = {{50, 51}, {1, 0}, {1, 0}},
                   always[3][2] = {{9, 1}, {9, 1}, {9, 1}},
                   slow[3][2] = {{90, 50}, {30, 31}, {9, 20}};

static void large_begins_where_it_is_faster_and_stays_so(void **state) {
    UNUSED(state);
    expect_crossover(measuring(at_one), OK, 1 << 20);
    expect_crossover(measuring(always), OK, 256 << 10);
    expect_crossover(measuring(never), OK, MIX_NEVER);
}

static void the_slowest_rank_decides_for_all(void **state) {
    UNUSED(state);
    struct member *m = measuring(at_one);
    m[2].us = slow;
    expect_crossover(m, OK, 4 << 20);
}

static void what_was_measured_before_the_time_was_up_holds(void **state) {
    UNUSED(state);
    struct member *m = measuring(always);
    m[1].late_at = 3;
    expect_crossover(m, OK, 4 << 20);
    for (int r = 0; r < RANKS; r++) assert_int_equal(m[r].measured, 3);
    m = measuring(always);
    m[1].late_at = 1;
    expect_crossover(m, OK, MIX_NEVER);
}

static void a_sum_that_does_not_end_on_one_rank_is_known_to_all(void **state) {
    UNUSED(state);
    struct member *m = measuring(at_one);
    m[3].stuck_at = 1;
    expect_crossover(m, ERR_TIMEOUT, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_size_alone_decides_which_way_a_message_takes),
        cmocka_unit_test(an_abort_after_a_small_step_does_not_spoil_it),
        cmocka_unit_test(an_abort_spoils_a_step_that_went_over_nccl_or_may_have_in_a_graph),
        cmocka_unit_test(the_check_of_a_small_step_does_not_answer_for_the_large_one_behind_it),
        cmocka_unit_test(ranks_stuck_in_a_large_sum_are_freed_by_an_abort_and_can_begin_again),
        cmocka_unit_test(large_begins_where_it_is_faster_and_stays_so),
        cmocka_unit_test(the_slowest_rank_decides_for_all),
        cmocka_unit_test(what_was_measured_before_the_time_was_up_holds),
        cmocka_unit_test(a_sum_that_does_not_end_on_one_rank_is_known_to_all),
    };
    void *fake = fake_nccl_load(&lib, &knobs);
    if (!fake) return 1;
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    nccl_unload(lib);
    dlclose(fake);
    return rc;
}
