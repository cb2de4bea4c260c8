/* tests/unit/test_coll_nccl.c: what coll_nccl.c does around NCCL, against a stand-in library, with
 * ranks as threads; and coll_host.c on the CPU backend. The real NCCL runs in tests/gpu.
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

#include "tests/unit/fake_nccl.h"
#include "worker/coll_host.h"
#include "worker/coll_nccl.h"

#define RANKS_MAX 8
#define FLOATS    5000

static struct fake_nccl_knobs *knobs;
static void (*set_graphs)(int);
static struct nccl *lib;

struct group {
    int world;
    uint32_t generation;
    uint64_t shm_bytes;
    char path[64];
    int rounds;
    int missing; /* this rank stays away from the sums; < 0: none */
    bool capturing;
    atomic_int waiting;
    int rc[RANKS_MAX], after[RANKS_MAX];
    float x[RANKS_MAX][FLOATS], all[RANKS_MAX][FLOATS * RANKS_MAX];
};

struct member {
    struct group *g;
    int rank;
};

static float value(int round, int rank, int i) {
    uint32_t r = (uint32_t)(round * 7919 + rank * 104729 + i * 31 + 1) * 2654435761u;
    return (float)(int32_t)r * 0x1p-31f * (float)(1 << (r & 15));
}

static struct group *group_new(int world) {
    static uint32_t generation;
    struct group *g = calloc(1, sizeof *g);
    int fd = memfd_create("coll", MFD_CLOEXEC);
    g->world = world;
    g->generation = ++generation;
    g->shm_bytes = coll_shm_bytes(world, 64 << 10);
    g->missing = -1;
    assert_true(fd >= 0 && ftruncate(fd, (off_t)g->shm_bytes) == 0);
    snprintf(g->path, sizeof g->path, "/proc/self/fd/%d", fd);
    memset(knobs, 0, sizeof *knobs);
    return g;
}

static void group_free(struct group *g) {
    close(atoi(strrchr(g->path, '/') + 1));
    free(g);
}

static void group_run(struct group *g, void *(*body)(void *)) {
    pthread_t thread[RANKS_MAX];
    struct member m[RANKS_MAX];
    for (int r = 0; r < g->world; r++) {
        m[r] = (struct member){g, r};
        assert_int_equal(pthread_create(&thread[r], NULL, body, &m[r]), 0);
    }
    for (int r = 0; r < g->world; r++) pthread_join(thread[r], NULL);
}

static struct coll *open_rank(struct group *g, int rank, const struct nccl_device *device,
                              int *rc) {
    struct err_text err = {0};
    struct coll *shm = NULL, *c = NULL;
    *rc = coll_open_shm(&shm, g->path, g->shm_bytes, rank, g->world, g->generation, &err);
    if (*rc < 0) return NULL;
    *rc = coll_open_nccl(&c, lib, device, shm, rank, g->world, g->generation, &err);
    if (*rc == OK) return c;
    assert_true(err.text[0] != 0);
    coll_close(shm);
    return NULL;
}

/* ---- the library ------------------------------------------------------------------------- */

static void the_environment_gets_defaults_unless_the_operator_set_it(void **state) {
    UNUSED(state);
    assert_string_equal(getenv("NCCL_PROTO"), "LL"); /* set in main, before loading */
    assert_string_equal(getenv("NCCL_P2P_LEVEL"), "SYS");
    assert_string_equal(getenv("NCCL_NVLS_ENABLE"), "0");
    assert_string_equal(getenv("NCCL_IB_DISABLE"), "1");
    assert_string_equal(getenv("NCCL_RUNTIME_CONNECT"), "0");
    assert_string_equal(nccl_version(lib), "2.28.99");
}

static void a_library_that_is_missing_or_another_is_named(void **state) {
    UNUSED(state);
    struct nccl *none = NULL;
    struct err_text err = {0};
    char kept[512];
    snprintf(kept, sizeof kept, "%s", getenv("OCTAVO_NCCL_LIBRARY"));
    setenv("OCTAVO_NCCL_LIBRARY", "libno-such-thing.so.9", 1);
    assert_int_equal(nccl_load(&none, &err), ERR_NOT_FOUND);
    assert_non_null(strstr(err.text, "libno-such-thing.so.9"));
    setenv("OCTAVO_NCCL_LIBRARY", "libm.so.6", 1);
    assert_int_equal(nccl_load(&none, &err), ERR_NOT_FOUND);
    assert_non_null(strstr(err.text, "ncclGetVersion"));
    assert_null(none);
    setenv("OCTAVO_NCCL_LIBRARY", kept, 1);
}

static void *transport_body(void *arg) {
    struct member *m = arg;
    struct coll *c = open_rank(m->g, m->rank, &(struct nccl_device){0}, &m->g->rc[m->rank]);
    if (!c) return NULL;
    coll_barrier(c); /* the ranks share one log here, and all have told by now */
    snprintf((char *)m->g->x[m->rank], 96, "%s", coll_nccl_transport(c));
    coll_close(c);
    return NULL;
}

static void the_way_that_messages_take_is_known(void **state) {
    UNUSED(state);
    static const char *const ways[] = {"P2P/IPC", "SHM/direct/direct"};
    for (int off = 0; off < 2; off++) {
        setenv("NCCL_P2P_DISABLE", off ? "1" : "0", 1);
        assert_true(nccl_peers_disabled() == off);
        struct group *g = group_new(3);
        group_run(g, transport_body);
        assert_string_equal((char *)g->x[0], ways[off]);
        for (int r = 0; r < 3; r++) assert_int_equal(g->rc[r], OK);
        group_free(g);
    }
    unsetenv("NCCL_P2P_DISABLE");
    assert_false(nccl_peers_disabled());
}

static void without_peers_no_level_of_peers_is_set(void **state) {
    UNUSED(state);
    struct nccl *other = NULL;
    struct err_text err = {0};
    unsetenv("NCCL_P2P_LEVEL");
    setenv("NCCL_P2P_DISABLE", "1", 1);
    assert_int_equal(nccl_load(&other, &err), OK);
    assert_null(getenv("NCCL_P2P_LEVEL"));
    nccl_unload(other);
    unsetenv("NCCL_P2P_DISABLE");
}

static void a_log_that_the_operator_asked_for_is_left_alone(void **state) {
    UNUSED(state);
    struct nccl *other = NULL;
    struct err_text err = {0};
    struct coll *c = NULL;
    char kept[2][100];
    snprintf(kept[0], 100, "%s", getenv("NCCL_DEBUG"));
    snprintf(kept[1], 100, "%s", getenv("NCCL_DEBUG_FILE"));
    setenv("NCCL_DEBUG", "VERSION", 1);
    unsetenv("NCCL_DEBUG_FILE");
    assert_int_equal(nccl_load(&other, &err), OK);
    assert_string_equal(getenv("NCCL_DEBUG"), "VERSION");
    assert_null(getenv("NCCL_DEBUG_FILE"));
    const struct nccl_device device = {0};
    assert_int_equal(coll_open_nccl(&c, other, &device, NULL, 0, 1, 5, &err), OK);
    assert_string_equal(coll_nccl_transport(c), "see NCCL_DEBUG");
    coll_close(c);
    nccl_unload(other);
    setenv("NCCL_DEBUG", kept[0], 1);
    setenv("NCCL_DEBUG_FILE", kept[1], 1);
}

/* ---- operations -------------------------------------------------------------------------- */

static void *operations_body(void *arg) {
    struct member *m = arg;
    struct group *g = m->g;
    float *x = g->x[m->rank], *all = g->all[m->rank];
    int *rc = &g->rc[m->rank];
    struct coll *c = open_rank(g, m->rank, &(struct nccl_device){0}, rc);
    for (int round = 0; *rc == OK && round < g->rounds; round++) {
        int n = 1 + (round * 977) % FLOATS, root = round % g->world;
        for (int i = 0; i < n; i++) x[i] = value(round, m->rank, i);
        *rc = coll_all_gather(c, x, all, n * (int64_t)sizeof *x);
        for (int r = 0; *rc == OK && r < g->world; r++)
            for (int i = 0; i < n; i++)
                if (all[r * n + i] != value(round, r, i)) *rc = ERR_FORMAT;
        if (*rc == OK) *rc = coll_all_reduce(c, x, n);
        for (int i = 0; *rc == OK && i < n; i++) {
            float want = 0, size = 0;
            for (int r = 0; r < g->world; r++) want += value(round, r, i);
            for (int r = 0; r < g->world; r++) size += __builtin_fabsf(value(round, r, i));
            if (__builtin_fabsf(x[i] - want) > 1e-6f * size) *rc = ERR_FORMAT;
        }
        memcpy(all, x, (size_t)n * sizeof *x);
        if (*rc == OK) *rc = coll_broadcast(c, all, n * (int64_t)sizeof *x, root);
        if (*rc == OK && memcmp(all, x, (size_t)n * sizeof *x) != 0) *rc = ERR_FORMAT;
    }
    if (*rc == OK) *rc = coll_barrier(c);
    if (*rc == OK) *rc = coll_check(c);
    if (c) coll_close(c);
    return NULL;
}

/* The broadcast of every rank's sum equals everybody's own: the same bits. */
static void every_rank_gets_the_same_bits_and_about_the_sum(void **state) {
    UNUSED(state);
    for (int world = 2; world <= 8; world *= 2) {
        struct group *g = group_new(world);
        g->rounds = 20;
        group_run(g, operations_body);
        for (int r = 0; r < world; r++) {
            if (g->rc[r] != OK)
                fail_msg("rank %d of %d: expected ok, found %s", r, world, err_name(g->rc[r]));
        }
        assert_int_equal(knobs->inits, world);
        assert_int_equal(knobs->aborts, world); /* each communicator is given back once */
        group_free(g);
    }
}

static void one_rank_needs_no_shared_memory(void **state) {
    UNUSED(state);
    struct coll *c = NULL;
    struct err_text err = {0};
    float x[3] = {1, 2, 3};
    memset(knobs, 0, sizeof *knobs);
    const struct nccl_device device = {0};
    assert_int_equal(coll_open_nccl(&c, lib, &device, NULL, 0, 1, 5, &err), OK);
    assert_int_equal(coll_all_reduce(c, x, 3), OK);
    assert_true(x[0] == 1 && x[1] == 2 && x[2] == 3);
    coll_abort(c);
    assert_int_equal(coll_all_reduce(c, x, 3), ERR_ABORTED);
    assert_int_equal(coll_check(c), ERR_ABORTED);
    coll_close(c);
    assert_int_equal(knobs->aborts, 1);
}

/* ---- endings ----------------------------------------------------------------------------- */

/* All but one announce a sum; the missing one aborts, and all are free. */
static void *stuck_body(void *arg) {
    struct member *m = arg;
    struct group *g = m->g;
    int *rc = &g->rc[m->rank];
    struct coll *c = open_rank(g, m->rank, &(struct nccl_device){0}, rc);
    if (*rc < 0) return NULL;
    if (m->rank == g->missing) {
        while (atomic_load(&g->waiting) < g->world - 1) sched_yield();
        coll_abort(c);
    } else {
        atomic_fetch_add(&g->waiting, 1);
        *rc = coll_all_reduce(c, g->x[m->rank], 100);
    }
    g->after[m->rank] = coll_broadcast(c, g->x[m->rank], 8, 0);
    coll_close(c);
    return NULL;
}

static void an_abort_by_one_rank_frees_all(void **state) {
    UNUSED(state);
    struct group *g = group_new(4);
    g->missing = 2;
    group_run(g, stuck_body);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(g->rc[r], r == 2 ? OK : ERR_ABORTED);
        assert_int_equal(g->after[r], ERR_ABORTED);
    }
    assert_int_equal(knobs->aborts, 4);
    group_free(g);
}

static void a_new_generation_starts_after_an_abort(void **state) {
    UNUSED(state);
    for (int i = 0; i < 3; i++) {
        struct group *g = group_new(3);
        g->missing = i;
        group_run(g, stuck_body);
        group_free(g);
        g = group_new(3);
        g->rounds = 3;
        group_run(g, operations_body);
        for (int r = 0; r < 3; r++) assert_int_equal(g->rc[r], OK);
        group_free(g);
    }
}

static void drop_graphs(void *user) {
    UNUSED(user);
    set_graphs(-1);
}

static bool yes = true;

/* ncclCommAbort waits for the graphs, and coll_abort must not wait with it. */
static void an_abort_does_not_wait_for_graphs_and_close_drops_them_first(void **state) {
    UNUSED(state);
    struct coll *c = NULL;
    struct err_text err = {0};
    memset(knobs, 0, sizeof *knobs);
    float x[2] = {1, 2};
    const struct nccl_device device = {.drop_graphs = drop_graphs, .capturing = &yes};
    assert_int_equal(coll_open_nccl(&c, lib, &device, NULL, 0, 1, 6, &err), OK);
    assert_int_equal(coll_all_reduce(c, x, 2), OK);
    set_graphs(1);
    coll_abort(c); /* would hang here */
    assert_int_equal(coll_check(c), ERR_ABORTED);
    coll_close(c); /* or here */
    assert_int_equal(knobs->aborts, 1);
    assert_int_equal(knobs->graphs, 0);
}

/* Every rank has a graph with a sum; then one does not come to the next sum. */
static void *stuck_with_graphs_body(void *arg) {
    struct member *m = arg;
    struct group *g = m->g;
    int *rc = &g->rc[m->rank];
    bool capturing = true;
    const struct nccl_device device = {.drop_graphs = drop_graphs, .capturing = &capturing};
    struct coll *c = open_rank(g, m->rank, &device, rc);
    if (*rc < 0) return NULL;
    *rc = coll_all_reduce(c, g->x[m->rank], 100);
    capturing = false;
    if (m->rank == g->missing) {
        while (atomic_load(&g->waiting) < g->world - 1) sched_yield();
        coll_abort(c);
    } else {
        atomic_fetch_add(&g->waiting, 1);
        g->after[m->rank] = coll_all_reduce(c, g->x[m->rank], 100);
    }
    coll_close(c);
    return NULL;
}

static void ranks_with_graphs_that_hang_are_freed_by_an_abort_and_begin_again(void **state) {
    UNUSED(state);
    for (int i = 0; i < 4; i++) {
        struct group *g = group_new(4);
        g->missing = i;
        set_graphs(4);
        group_run(g, stuck_with_graphs_body);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(g->rc[r], OK);
            assert_int_equal(g->after[r], r == i ? OK : ERR_ABORTED);
        }
        assert_int_equal(knobs->aborts, 4);
        assert_int_equal(knobs->graphs, 0);
        group_free(g);
        g = group_new(4);
        g->rounds = 3;
        group_run(g, operations_body);
        for (int r = 0; r < 4; r++) assert_int_equal(g->rc[r], OK);
        group_free(g);
    }
}

static void graphs_without_a_sum_of_nccls_are_kept(void **state) {
    UNUSED(state);
    struct coll *c = NULL;
    struct err_text err = {0};
    float x[2] = {1, 2};
    memset(knobs, 0, sizeof *knobs);
    bool capturing = false;
    const struct nccl_device device = {.drop_graphs = drop_graphs, .capturing = &capturing};
    assert_int_equal(coll_open_nccl(&c, lib, &device, NULL, 0, 1, 9, &err), OK);
    assert_int_equal(coll_all_reduce(c, x, 2), OK);
    coll_close(c);
    assert_int_equal(knobs->graphs, 0); /* one less would be -1 */
}

static void a_capture_never_fails_half_way(void **state) {
    UNUSED(state);
    struct coll *c = NULL;
    struct err_text err = {0};
    bool capturing = true;
    float x[2] = {1, 2};
    memset(knobs, 0, sizeof *knobs);
    const struct nccl_device device = {.capturing = &capturing};
    assert_int_equal(coll_open_nccl(&c, lib, &device, NULL, 0, 1, 7, &err), OK);
    coll_abort(c);
    assert_int_equal(coll_all_reduce(c, x, 2), OK);
    capturing = false;
    assert_int_equal(coll_all_reduce(c, x, 2), ERR_ABORTED);
    assert_int_equal(coll_check(c), ERR_ABORTED);
    coll_close(c);
}

static void an_error_of_the_library_aborts_the_generation(void **state) {
    UNUSED(state);
    struct coll *c = NULL;
    struct err_text err = {0};
    float x[2] = {1, 2};
    memset(knobs, 0, sizeof *knobs);
    const struct nccl_device device = {0};
    assert_int_equal(coll_open_nccl(&c, lib, &device, NULL, 0, 1, 8, &err), OK);
    knobs->fail_sum = 1;
    assert_int_equal(coll_all_reduce(c, x, 2), ERR_ABORTED);
    assert_int_equal(coll_check(c), ERR_ABORTED);
    coll_close(c);
}

static void *open_body(void *arg) {
    struct member *m = arg;
    struct coll *c = open_rank(m->g, m->rank, &(struct nccl_device){0}, &m->g->rc[m->rank]);
    if (c) coll_close(c);
    return NULL;
}

static void without_an_identity_every_rank_refuses(void **state) {
    UNUSED(state);
    struct group *g = group_new(4);
    knobs->refuse_id = 1;
    group_run(g, open_body);
    for (int r = 0; r < 4; r++) assert_int_equal(g->rc[r], ERR_SETUP);
    group_free(g);
}

static void *impatient_body(void *arg) {
    struct member *m = arg;
    const struct nccl_device device = {.patience_s = 1};
    struct coll *c = open_rank(m->g, m->rank, &device, &m->g->rc[m->rank]);
    if (c) coll_close(c);
    return NULL;
}

static void a_start_that_hangs_is_given_up_by_every_rank(void **state) {
    UNUSED(state);
    struct group *g = group_new(3);
    knobs->hang_init = 1;
    group_run(g, impatient_body);
    for (int r = 0; r < 3; r++) assert_int_equal(g->rc[r], ERR_SETUP);
    assert_int_equal(knobs->aborts, 3);
    group_free(g);
}

/* ---- through the host -------------------------------------------------------------------- */

static void *host_body(void *arg) {
    struct member *m = arg;
    struct group *g = m->g;
    const struct kernels *k = kernels_table();
    char text[128];
    struct err_text err = {0};
    struct coll *shm = NULL, *c = NULL;
    struct kctx *ctx = k->open(0, text, sizeof text);
    float *x = g->x[m->rank];
    int *rc = &g->rc[m->rank];
    *rc = coll_open_shm(&shm, g->path, g->shm_bytes, m->rank, g->world, g->generation, &err);
    if (*rc == OK) *rc = coll_open_host(&c, k, ctx, shm, &err);
    for (int round = 0; *rc == OK && round < 20; round++) {
        int n = 1 + (round * 977) % FLOATS;
        for (int i = 0; i < n; i++) x[i] = value(round, m->rank, i);
        *rc = coll_all_gather(c, x, g->all[m->rank], n * (int64_t)sizeof *x);
        if (*rc == OK) *rc = coll_all_reduce(c, x, n);
        for (int i = 0; *rc == OK && i < n; i++) {
            float want = value(round, 0, i);
            for (int r = 1; r < g->world; r++) want += value(round, r, i);
            for (int r = 0; r < g->world; r++)
                if (g->all[m->rank][r * n + i] != value(round, r, i)) *rc = ERR_FORMAT;
            if (memcmp(&want, &x[i], sizeof want) != 0) *rc = ERR_FORMAT;
        }
        x[0] = (float)m->rank;
        if (*rc == OK) *rc = coll_broadcast(c, x, 4, round % g->world);
        if (*rc == OK && x[0] != (float)(round % g->world)) *rc = ERR_FORMAT;
    }
    if (*rc == OK) *rc = coll_barrier(c);
    coll_abort(c);
    g->after[m->rank] = coll_all_reduce(c, x, 1);
    coll_close(c);
    k->close(ctx);
    return NULL;
}

static void through_the_host_the_sum_is_in_rank_order(void **state) {
    UNUSED(state);
    struct group *g = group_new(4);
    group_run(g, host_body);
    for (int r = 0; r < 4; r++) {
        /* a rank that is through the last barrier aborts those that are just leaving it */
        assert_true(g->rc[r] == OK || g->rc[r] == ERR_ABORTED);
        assert_int_equal(g->after[r], ERR_ABORTED);
    }
    group_free(g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_environment_gets_defaults_unless_the_operator_set_it),
        cmocka_unit_test(a_library_that_is_missing_or_another_is_named),
        cmocka_unit_test(the_way_that_messages_take_is_known),
        cmocka_unit_test(without_peers_no_level_of_peers_is_set),
        cmocka_unit_test(a_log_that_the_operator_asked_for_is_left_alone),
        cmocka_unit_test(every_rank_gets_the_same_bits_and_about_the_sum),
        cmocka_unit_test(one_rank_needs_no_shared_memory),
        cmocka_unit_test(an_abort_by_one_rank_frees_all),
        cmocka_unit_test(a_new_generation_starts_after_an_abort),
        cmocka_unit_test(an_abort_does_not_wait_for_graphs_and_close_drops_them_first),
        cmocka_unit_test(ranks_with_graphs_that_hang_are_freed_by_an_abort_and_begin_again),
        cmocka_unit_test(graphs_without_a_sum_of_nccls_are_kept),
        cmocka_unit_test(a_capture_never_fails_half_way),
        cmocka_unit_test(an_error_of_the_library_aborts_the_generation),
        cmocka_unit_test(without_an_identity_every_rank_refuses),
        cmocka_unit_test(a_start_that_hangs_is_given_up_by_every_rank),
        cmocka_unit_test(through_the_host_the_sum_is_in_rank_order),
    };
    setenv("NCCL_PROTO", "LL", 1);
    unsetenv("NCCL_P2P_LEVEL");
    unsetenv("NCCL_NVLS_ENABLE");
    unsetenv("NCCL_IB_DISABLE");
    void *fake = fake_nccl_load(&lib, &knobs);
    if (!fake) return 1;
    *(void **)&set_graphs = dlsym(fake, "fake_nccl_set_graphs");
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    nccl_unload(lib);
    dlclose(fake);
    return rc;
}
