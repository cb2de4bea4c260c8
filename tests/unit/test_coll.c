/* tests/unit/test_coll.c: collectives with ranks as threads of one process, so that the thread
 * sanitizer sees every rank. Seeds are fixed and printed with what differs.
 */
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker/coll.h"

#define RANKS_MAX 8

struct group {
    int world, fd;
    uint64_t bytes;
    char path[64];
    uint64_t seed;
    int rounds;
    atomic_int waiting; /* ranks about to block, for the abort tests */
    struct coll *coll[RANKS_MAX];
    char failure[RANKS_MAX][160];
    int rc[RANKS_MAX];
};

struct member {
    struct group *g;
    int rank;
};

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Value i of rank's part in a round; exponents differ so that the order of adding shows. */
static float value(const struct group *g, int round, int rank, int64_t i) {
    uint64_t r = mix(g->seed ^ mix((uint64_t)round << 40 ^ (uint64_t)rank << 32 ^ (uint64_t)i));
    float f = (float)(int32_t)(r >> 32) * 0x1p-31f;
    return f * (float)(1 << (r & 15));
}

static void group_open(struct group *g, int world, uint64_t message_bytes) {
    memset(g, 0, sizeof *g);
    g->world = world;
    g->bytes = coll_shm_bytes(world, message_bytes);
    g->fd = memfd_create("coll", MFD_CLOEXEC);
    assert_true(g->fd >= 0);
    assert_int_equal(ftruncate(g->fd, (off_t)g->bytes), 0);
    snprintf(g->path, sizeof g->path, "/proc/self/fd/%d", g->fd);
    for (int r = 0; r < world; r++) {
        struct err_text err = {0};
        if (coll_open_shm(&g->coll[r], g->path, g->bytes, r, world, 7, &err) < 0)
            fail_msg("%s", err.text);
    }
}

static void group_close(struct group *g) {
    for (int r = 0; r < g->world; r++) coll_close(g->coll[r]);
    close(g->fd);
}

static void group_run(struct group *g, void *(*body)(void *)) {
    pthread_t thread[RANKS_MAX];
    struct member member[RANKS_MAX];
    for (int r = 0; r < g->world; r++) {
        member[r] = (struct member){g, r};
        assert_int_equal(pthread_create(&thread[r], NULL, body, &member[r]), 0);
    }
    for (int r = 0; r < g->world; r++) pthread_join(thread[r], NULL);
    for (int r = 0; r < g->world; r++)
        if (g->failure[r][0]) fail_msg("seed %llu: %s", (unsigned long long)g->seed, g->failure[r]);
}

/* Gives the processor away a different number of times on each rank. */
static void skew(const struct group *g, int round, int rank) {
    for (uint64_t n = mix(g->seed + (uint64_t)round * 31 + (uint64_t)rank) % 8; n > 0; n--)
        sched_yield();
}

static int64_t some_size(const struct group *g, int round) {
    uint64_t r = mix(g->seed * 3 + (uint64_t)round);
    int64_t most = r & 3 ? 3000 : 12000;
    return 1 + (int64_t)((r >> 8) % (uint64_t)most);
}

static bool check_sum(struct group *g, int rank, int round, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float want = value(g, round, 0, i);
        for (int r = 1; r < g->world; r++) want += value(g, round, r, i);
        if (memcmp(&want, &x[i], sizeof want) != 0) {
            snprintf(g->failure[rank], sizeof g->failure[rank],
                     "all_reduce rank %d round %d element %lld of %lld: expected %a, found %a",
                     rank, round, (long long)i, (long long)n, (double)want, (double)x[i]);
            return false;
        }
    }
    return true;
}

static bool check_gathered(struct group *g, int rank, int round, const float *x, int64_t n) {
    for (int r = 0; r < g->world; r++)
        for (int64_t i = 0; i < n; i++)
            if (x[r * n + i] != value(g, round, r, i)) {
                snprintf(g->failure[rank], sizeof g->failure[rank],
                         "all_gather rank %d round %d part %d element %lld: expected %a, found %a",
                         rank, round, r, (long long)i, (double)value(g, round, r, i),
                         (double)x[r * n + i]);
                return false;
            }
    return true;
}

static bool check_broadcast(struct group *g, int rank, int round, const float *x, int64_t n,
                            int root) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != value(g, round, root, i)) {
            snprintf(g->failure[rank], sizeof g->failure[rank],
                     "broadcast rank %d round %d element %lld: expected %a, found %a", rank, round,
                     (long long)i, (double)value(g, round, root, i), (double)x[i]);
            return false;
        }
    return true;
}

static void *mixed_body(void *arg) {
    struct member *m = arg;
    struct group *g = m->g;
    struct coll *c = g->coll[m->rank];
    float *x = malloc(12000 * sizeof *x), *all = malloc(12000 * RANKS_MAX * sizeof *all);
    for (int round = 0; round < g->rounds; round++) {
        int64_t n = some_size(g, round);
        for (int64_t i = 0; i < n; i++) x[i] = value(g, round, m->rank, i);
        skew(g, round, m->rank);
        int root = round % g->world, rc = OK;
        bool same = true;
        switch (mix(g->seed + (uint64_t)round) % 4) {
        case 0:
        case 1:
            rc = coll_all_reduce(c, x, n);
            same = rc < 0 || check_sum(g, m->rank, round, x, n);
            break;
        case 2:
            rc = coll_all_gather(c, x, all, n * (int64_t)sizeof *x);
            same = rc < 0 || check_gathered(g, m->rank, round, all, n);
            break;
        default:
            rc = coll_broadcast(c, x, n * (int64_t)sizeof *x, root);
            same = rc < 0 || check_broadcast(g, m->rank, round, x, n, root);
        }
        if (rc < 0)
            snprintf(g->failure[m->rank], sizeof g->failure[m->rank],
                     "rank %d: expected ok, found %s", m->rank, err_name(rc));
        if (rc < 0 || !same) {
            coll_abort(c);
            break;
        }
    }
    free(x);
    free(all);
    return NULL;
}

static void run_mixed(int world, uint64_t message_bytes, int rounds, uint64_t seed) {
    struct group g;
    group_open(&g, world, message_bytes);
    g.seed = seed;
    g.rounds = rounds;
    group_run(&g, mixed_body);
    group_close(&g);
}

static void random_sizes_give_every_rank_the_sum_in_rank_order(void **state) {
    UNUSED(state);
    run_mixed(2, 64 << 10, 300, 11);
    run_mixed(3, 64 << 10, 200, 12);
    run_mixed(8, 64 << 10, 60, 13);
}

static void messages_longer_than_the_buffer_go_in_pieces(void **state) {
    UNUSED(state);
    run_mixed(2, 1, 200, 21);
    run_mixed(3, 1, 100, 22);
    run_mixed(8, 1, 40, 23);
}

/* Rank 0 never comes; the others wait until somebody aborts. */
static void *stuck_body(void *arg) {
    struct member *m = arg;
    struct group *g = m->g;
    if (m->rank == 0) {
        while (atomic_load(&g->waiting) < g->world - 1) sched_yield();
        coll_abort(g->coll[0]);
        g->rc[0] = coll_barrier(g->coll[0]);
        return NULL;
    }
    float x[8] = {0};
    atomic_fetch_add(&g->waiting, 1);
    g->rc[m->rank] = coll_all_reduce(g->coll[m->rank], x, 8);
    return NULL;
}

static void an_abort_ends_every_wait_and_stays(void **state) {
    UNUSED(state);
    for (int world = 2; world <= 8; world += 3) {
        struct group g;
        group_open(&g, world, 4096);
        group_run(&g, stuck_body);
        for (int r = 0; r < world; r++) {
            float x = 0;
            assert_int_equal(g.rc[r], ERR_ABORTED);
            assert_int_equal(coll_all_reduce(g.coll[r], &x, 1), ERR_ABORTED);
            assert_int_equal(coll_barrier(g.coll[r]), ERR_ABORTED);
        }
        group_close(&g);
    }
}

/* Aborts at an arbitrary moment of a busy group; every rank must come back. */
static void *busy_body(void *arg) {
    struct member *m = arg;
    struct group *g = m->g;
    float x[600] = {0};
    int rc = OK;
    for (int round = 0; rc == OK; round++) {
        if (m->rank == 1 && round == g->rounds) coll_abort(g->coll[m->rank]);
        skew(g, round, m->rank);
        rc = coll_all_reduce(g->coll[m->rank], x, 600);
    }
    g->rc[m->rank] = rc;
    return NULL;
}

static void an_abort_at_any_round_lets_every_rank_go(void **state) {
    UNUSED(state);
    for (int round = 0; round < 20; round++) {
        struct group g;
        group_open(&g, 3, 4096);
        g.seed = (uint64_t)round + 31;
        g.rounds = round;
        group_run(&g, busy_body);
        for (int r = 0; r < g.world; r++) assert_int_equal(g.rc[r], ERR_ABORTED);
        group_close(&g);
    }
}

static void *late_body(void *arg) {
    struct member *m = arg;
    if (m->rank == 0)
        while (atomic_load(&m->g->waiting) < m->g->world - 1) sched_yield();
    else
        atomic_fetch_add(&m->g->waiting, 1);
    m->g->rc[m->rank] = coll_barrier(m->g->coll[m->rank]);
    return NULL;
}

static void time_spent_waiting_is_counted(void **state) {
    UNUSED(state);
    uint64_t waited = 0;
    for (int i = 0; i < 200 && waited == 0; i++) {
        struct group g;
        group_open(&g, 2, 4096);
        group_run(&g, late_body);
        assert_int_equal(g.rc[1], OK);
        waited = g.coll[0]->wait_us + g.coll[1]->wait_us;
        group_close(&g);
    }
    if (waited == 0) fail_msg("expected some microseconds of waiting in 200 barriers, found 0");
}

static void a_stranger_and_a_short_memory_are_refused(void **state) {
    UNUSED(state);
    struct group g;
    struct coll *other = NULL;
    struct err_text err = {0};
    group_open(&g, 2, 4096);
    assert_int_equal(coll_open_shm(&other, g.path, g.bytes, 0, 2, 8, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "expected generation 8"));
    assert_int_equal(coll_open_shm(&other, g.path, g.bytes + 1, 0, 2, 7, &err), ERR_SETUP);
    assert_int_equal(coll_open_shm(&other, g.path, 64, 0, 2, 7, &err), ERR_SETUP);
    assert_int_equal(coll_open_shm(&other, "/nonexistent", g.bytes, 0, 2, 7, &err), ERR_SYS);
    group_close(&g);
}

static void a_world_of_one_returns_at_once(void **state) {
    UNUSED(state);
    struct coll *c;
    float x = 2;
    assert_int_equal(coll_open_none(&c), OK);
    assert_int_equal(coll_all_reduce(c, &x, 1), OK);
    assert_int_equal(coll_all_gather(c, &x, &x, 4), OK);
    assert_int_equal(coll_broadcast(c, &x, 4, 0), OK);
    assert_true(x == 2);
    coll_abort(c);
    assert_int_equal(coll_barrier(c), ERR_ABORTED);
    coll_close(c);
    assert_int_equal(coll_shm_bytes(1, 1 << 20), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_world_of_one_returns_at_once),
        cmocka_unit_test(random_sizes_give_every_rank_the_sum_in_rank_order),
        cmocka_unit_test(messages_longer_than_the_buffer_go_in_pieces),
        cmocka_unit_test(an_abort_ends_every_wait_and_stays),
        cmocka_unit_test(an_abort_at_any_round_lets_every_rank_go),
        cmocka_unit_test(time_spent_waiting_is_counted),
        cmocka_unit_test(a_stranger_and_a_short_memory_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
