/* tests/unit/test_load.c: what loading puts on the device, what it reads for it, and how it ends
 * when the file or a peer is not what it was.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker/convoy.h"
#include "worker/pipeline.h"
#include "worker/tensors.h"

static char model_path[512], folder[512];

static int find_paths(void **state) {
    UNUSED(state);
    const char *source = getenv("OCTAVO_SOURCE_ROOT"), *build = getenv("OCTAVO_BUILD_ROOT");
    snprintf(model_path, sizeof model_path, "%s/tests/models/tiny.gguf", source ? source : ".");
    snprintf(folder, sizeof folder, "%s/test-load-XXXXXX", build ? build : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

static int drop_folder(void **state) {
    UNUSED(state);
    return rmdir(folder);
}

/* ---- the pipeline ------------------------------------------------------------------------ */

struct counting {
    int64_t next, fill_fails_at, take_fails_at;
    atomic_int filling, filled;
};

static int count_fill(void *user, int64_t piece, uint8_t *slot, uint8_t *bounce,
                      const atomic_bool *stop, struct err_text *err) {
    struct counting *c = user;
    UNUSED(stop);
    if (piece == c->fill_fails_at) return err_set(err, ERR_SYS, "piece %d", (int)piece);
    memset(bounce, (int)piece, 64);
    memcpy(slot, &piece, sizeof piece);
    memcpy(slot + sizeof piece, bounce, 64);
    atomic_fetch_add(&c->filled, 1);
    return OK;
}

static int count_take(void *user, int64_t piece, const uint8_t *slot, struct err_text *err) {
    struct counting *c = user;
    int64_t found;
    memcpy(&found, slot, sizeof found);
    assert_int_equal(piece, c->next++);
    assert_int_equal(found, piece);
    assert_int_equal(slot[sizeof piece + 63], (uint8_t)piece);
    return piece == c->take_fails_at ? err_set(err, ERR_FORMAT, "took %d", (int)piece) : OK;
}

static struct pipeline counting_pipeline(struct counting *c, int64_t n, int threads, int slots) {
    return (struct pipeline){.n_pieces = n,
                             .slot_bytes = 100,
                             .bounce_bytes = 64,
                             .n_threads = threads,
                             .n_slots = slots,
                             .fill = count_fill,
                             .take = count_take,
                             .user = c};
}

static void pieces_are_taken_in_order_whatever_the_threads_and_slots(void **state) {
    UNUSED(state);
    for (int threads = 1; threads <= 8; threads *= 2)
        for (int slots = 1; slots <= 9; slots += 4)
            for (int64_t n = 0; n < 200; n = 3 * n + 1) {
                struct counting c = {.fill_fails_at = -1, .take_fails_at = -1};
                struct pipeline p = counting_pipeline(&c, n, threads, slots);
                assert_int_equal(pipeline_run(&p, NULL), OK);
                assert_int_equal(c.next, n);
            }
}

static void the_first_failure_ends_a_pipeline_with_its_sentence(void **state) {
    UNUSED(state);
    for (int i = 0; i < 20; i++) {
        struct err_text err = {0};
        struct counting c = {.fill_fails_at = 70, .take_fails_at = -1};
        struct pipeline p = counting_pipeline(&c, 1000, 4, 6);
        assert_int_equal(pipeline_run(&p, &err), ERR_SYS);
        assert_string_equal(err.text, "piece 70");
        assert_true(c.next <= 70 && c.filled < 80);
        c = (struct counting){.fill_fails_at = -1, .take_fails_at = 70};
        assert_int_equal(pipeline_run(&p, &err), ERR_FORMAT);
        assert_string_equal(err.text, "took 70");
        assert_int_equal(c.next, 71);
    }
}

/* ---- the convoy -------------------------------------------------------------------------- */

static char share_path[64];
static int share_fd = -1;

static void new_share(void) {
    if (share_fd >= 0) close(share_fd);
    share_fd = memfd_create("octavo-test-load", MFD_CLOEXEC);
    assert_int_equal(ftruncate(share_fd, CONVOY_SHARE_BYTES), 0);
    snprintf(share_path, sizeof share_path, "/proc/%d/fd/%d", (int)getpid(), share_fd);
}

static struct convoy *open_convoy(int rank, int world, uint64_t window, uint64_t patience_us) {
    struct convoy *c;
    struct err_text err = {0};
    const struct convoy_options o = {.path = share_path,
                                     .rank = rank,
                                     .world = world,
                                     .window_bytes = window,
                                     .patience_us = patience_us};
    if (convoy_open(&c, &o, &err) < 0) fail_msg("%s", err.text);
    return c;
}

#define CONVOY_STEPS 300
#define CONVOY_RANKS 4

static atomic_int convoy_at[CONVOY_RANKS], convoy_spread;

static void *walk(void *user) {
    int rank = (int)(intptr_t)user;
    atomic_bool stop = false;
    struct convoy *c = open_convoy(rank, CONVOY_RANKS, 10, 60000000);
    for (int at = 0; at < CONVOY_STEPS; at++) {
        assert_true(convoy_wait(c, (uint64_t)at, &stop));
        for (int r = 0; r < CONVOY_RANKS; r++) {
            int spread = at - atomic_load(&convoy_at[r]);
            if (spread > atomic_load(&convoy_spread)) atomic_store(&convoy_spread, spread);
        }
        atomic_store(&convoy_at[rank], at); /* never behind what the convoy hears */
        convoy_move(c, (uint64_t)at);
    }
    atomic_store(&convoy_at[rank], CONVOY_STEPS);
    convoy_close(c);
    return NULL;
}

static void nobody_goes_further_than_the_window_ahead_of_the_slowest(void **state) {
    UNUSED(state);
    pthread_t t[CONVOY_RANKS];
    new_share();
    for (int r = 0; r < CONVOY_RANKS; r++)
        assert_int_equal(pthread_create(&t[r], NULL, walk, (void *)(intptr_t)r), 0);
    for (int r = 0; r < CONVOY_RANKS; r++) pthread_join(t[r], NULL);
    if (convoy_spread > 10) fail_msg("expected at most 10 apart, found %d", (int)convoy_spread);
}

static void a_peer_that_does_not_move_is_left_and_one_that_is_done_is_not_waited_for(void **state) {
    UNUSED(state);
    atomic_bool stop = false;
    new_share();
    struct convoy *me = open_convoy(0, 8, 10, 20000), *done = open_convoy(1, 8, 10, 20000);
    convoy_close(done); /* and the others never come */
    convoy_move(me, 1000);
    for (uint64_t at = 1000; at < 1000000; at += 1000) { /* 20 s if it waited each time */
        convoy_move(me, at);
        assert_true(convoy_wait(me, at + 5, &stop));
    }
    stop = true;
    assert_false(convoy_wait(me, UINT64_MAX / 2, &stop));
    convoy_close(me);
}

static void a_share_that_is_not_there_is_refused(void **state) {
    UNUSED(state);
    struct convoy *c;
    struct err_text err = {0};
    struct convoy_options o = {.path = "/nowhere/at/all", .world = 2};
    assert_int_equal(convoy_open(&c, &o, &err), ERR_SETUP);
    assert_non_null(
        strstr(err.text, "--load-share: expected 4096 shared bytes at /nowhere/at/all"));
    int fd = memfd_create("short", MFD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    o.path = path;
    assert_int_equal(convoy_open(&c, &o, &err), ERR_SETUP);
    close(fd);
}

/* ---- weights ----------------------------------------------------------------------------- */

static struct gguf *open_model(const char *path) {
    struct gguf *g;
    struct err_text err = {0};
    if (gguf_open(&g, path, &err) < 0) fail_msg("%s", err.text);
    return g;
}

static struct model_options small(int rank, int world) {
    return (struct model_options){
        .rank = rank, .world = world, .max_slots = 1, .max_rows = 4, .max_outs = 1, .context = 64};
}

static void load(struct model *m, const struct gguf *g, const struct model_options *o) {
    struct err_text err = {0};
    *m = (struct model){0};
    if (model_load(m, g, o, (struct load_progress){0}, &err) < 0) fail_msg("%s", err.text);
}

static void expect_bytes(const struct model *m, const struct tensor_need *n, int64_t at,
                         const uint8_t *found, const uint8_t *expected, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (found[i] != expected[i])
            fail_msg("rank %d of %d: %s: matrix %d, byte %zu: expected %02x, found %02x", m->rank,
                     m->world, n->tensor->name, (int)at, i, expected[i], found[i]);
}

/* Compares matrix `at` of the share with the mapping, a row at a time: the slow way to cut. */
static void check_matrix(const struct model *m, const struct tensor_need *n, const struct kmat *mat,
                         int64_t at) {
    const struct gguf_tensor *t = n->tensor;
    size_t run = (size_t)ktype_row_bytes(mat->type, mat->cols);
    uint8_t *found = malloc(run * (size_t)mat->rows);
    m->k->mat_unpack(m->ctx, mat, at, found);
    int64_t matrix = at + (n->cut == CUT_STACK ? m->rank * mat->count : 0);
    for (int64_t r = 0; r < mat->rows; r++) {
        int64_t row = matrix * n->rows + r + (n->cut == CUT_ROWS ? m->rank * mat->rows : 0);
        const uint8_t *expected = t->data + (size_t)row * t->row_bytes;
        if (n->cut == CUT_COLS) expected += (size_t)m->rank * run;
        expect_bytes(m, n, at, found + (size_t)r * run, expected, run);
    }
    free(found);
}

static int check_tensor(void *user, const struct tensor_need *n, struct err_text *err) {
    const struct model *m = user;
    const char *owner = n->block < 0 ? (const char *)m : (const char *)&m->layers[n->block];
    UNUSED(err);
    if (n->vector) {
        size_t bytes = (size_t)n->cols * sizeof(float);
        float *want = malloc(bytes), *found = malloc(bytes);
        kdequant_row((int)n->tensor->type, n->tensor->data, want, n->cols);
        m->k->get(m->ctx, found, *(float *const *)(const void *)(owner + n->offset), bytes);
        expect_bytes(m, n, 0, (uint8_t *)found, (uint8_t *)want, bytes);
        free(want);
        free(found);
        return OK;
    }
    const struct kmat *mat = (const struct kmat *)(const void *)(owner + n->offset);
    int by_rows = n->cut == CUT_ROWS ? m->world : 1, by_cols = n->cut == CUT_COLS ? m->world : 1;
    assert_int_equal(mat->rows, n->rows / by_rows);
    assert_int_equal(mat->cols, n->cols / by_cols);
    assert_int_equal(mat->count, n->count / (n->cut == CUT_STACK ? m->world : 1));
    for (int64_t at = 0; at < mat->count; at++) check_matrix(m, n, mat, at);
    return OK;
}

static void check_weights(struct model *m, const struct gguf *g) {
    struct hparams hp;
    assert_int_equal(model_read_hparams(&hp, g, NULL), OK);
    assert_int_equal(tensors_each(&hp, g, check_tensor, m, NULL), OK);
}

static void every_byte_of_every_rank_is_the_files(void **state) {
    UNUSED(state);
    struct gguf *g = open_model(model_path);
    for (int world = 1; world <= 8; world *= 2)
        for (int rank = 0; rank < world; rank++) {
            struct model m;
            struct model_options o = small(rank, world);
            load(&m, g, &o);
            check_weights(&m, g);
            model_unload(&m);
        }
    gguf_close(g);
}

static int host_pieces, host_calls;
static bool host_refuses;

static void *counted_host_alloc(struct kctx *c, size_t bytes) {
    host_calls++;
    if (host_refuses) return NULL;
    host_pieces++;
    return kernels_table()->host_alloc(c, bytes);
}

static void counted_host_free(struct kctx *c, void *p) {
    host_pieces--;
    kernels_table()->host_free(c, p);
}

static void pieces_wait_in_the_devices_own_host_memory_or_else_in_ordinary(void **state) {
    UNUSED(state);
    struct gguf *g = open_model(model_path);
    const struct model_options o = small(0, 1);
    struct kernels table = *kernels_table();
    table.host_alloc = counted_host_alloc;
    table.host_free = counted_host_free;
    for (int refused = 0; refused < 2; refused++) {
        struct model m = {.k = &table, .ctx = table.open(0, NULL, 0)};
        host_refuses = refused;
        assert_int_equal(model_load(&m, g, &o, (struct load_progress){0}, NULL), OK);
        assert_int_equal(host_calls, 1 + refused);
        assert_int_equal(host_pieces, 0); /* given back */
        assert_true(m.staging_bytes > 0);
        check_weights(&m, g);
        model_unload(&m);
    }
    gguf_close(g);
}

static void the_size_of_a_read_changes_nothing(void **state) {
    UNUSED(state);
    const size_t sizes[] = {1, 3000, 70000, 300000, 64 << 20};
    struct gguf *g = open_model(model_path);
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        struct model m;
        struct model_options o = small(1, 2);
        o.load_piece_bytes = sizes[i];
        load(&m, g, &o);
        check_weights(&m, g);
        model_unload(&m);
    }
    gguf_close(g);
}

struct heard {
    uint64_t bytes, total;
    int n;
};

static void hear(void *user, uint64_t bytes, uint64_t total) {
    struct heard *h = user;
    assert_true(bytes >= h->bytes && bytes <= total && (!h->n || total == h->total));
    *h = (struct heard){bytes, total, h->n + 1};
}

static void progress_counts_the_bytes_asked_of_the_file_and_ends_with_all(void **state) {
    UNUSED(state);
    struct gguf *g = open_model(model_path);
    struct model m = {0};
    struct heard h = {0};
    struct model_options o = small(0, 1);
    assert_int_equal(model_load(&m, g, &o, (struct load_progress){hear, &h}, NULL), OK);
    assert_true(h.n > 0 && h.bytes == h.total && h.total == m.asked_bytes);
    assert_true(m.asked_bytes > 0 && m.asked_bytes <= gguf_total_bytes(g));
    model_unload(&m);
    gguf_close(g);
}

/* ---- files of our own -------------------------------------------------------------------- */

static void copy_model(char path[600], const char *name) {
    snprintf(path, 600, "%s/%s", folder, name);
    FILE *from = fopen(model_path, "rb"), *to = fopen(path, "wb");
    assert_non_null(from);
    assert_non_null(to);
    static char buf[1 << 16];
    for (size_t n; (n = fread(buf, 1, sizeof buf, from)) > 0;)
        assert_int_equal(fwrite(buf, 1, n, to), n);
    fclose(from);
    assert_int_equal(fclose(to), 0);
}

static void a_file_cut_while_it_is_read_is_a_sentence_and_not_a_crash(void **state) {
    UNUSED(state);
    char path[600];
    copy_model(path, "cut.gguf");
    for (int half = 0; half < 2; half++) {
        struct gguf *g = open_model(path);
        struct err_text err = {0};
        struct model m = {0};
        struct model_options o = small(half, 2);
        struct stat st;
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(truncate(path, st.st_size / 2), 0);
        assert_int_equal(model_load(&m, g, &o, (struct load_progress){0}, &err), ERR_FORMAT);
        if (!strstr(err.text, path) || !strstr(err.text, "it was cut while it was read"))
            fail_msg("expected a sentence about the cut file, found: %s", err.text);
        model_unload(&m);
        gguf_close(g);
        copy_model(path, "cut.gguf");
    }
    unlink(path);
}

static uint64_t bytes_from_devices(void) {
    uint64_t n = 0;
    char line[128];
    FILE *f = fopen("/proc/self/io", "r");
    while (f && fgets(line, sizeof line, f)) sscanf(line, "read_bytes: %" SCNu64, &n);
    if (f) fclose(f);
    return n;
}

static void drop_from_cache(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
}

/* Loads as one rank in a process of its own; says how much its threads read from devices. */
static pid_t load_in_child(const char *path, int rank, int world, uint64_t window, int out) {
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) return pid;
    struct gguf *g = open_model(path);
    struct model m;
    struct model_options o = small(rank, world);
    o.load_share = share_path;
    o.load_window_bytes = window;
    o.load_piece_bytes = 256 << 10;
    uint64_t before = bytes_from_devices(), n;
    load(&m, g, &o);
    n = bytes_from_devices() - before;
    check_weights(&m, g);
    _exit(write(out, &n, sizeof n) == sizeof n ? 0 : 1);
}

static void each_byte_is_read_once_per_host(void **state) {
    UNUSED(state);
    char path[600];
    struct stat st;
    copy_model(path, "once.gguf");
    assert_int_equal(stat(path, &st), 0);
    for (int world = 1; world <= 8; world *= 2) {
        int pipes[2];
        pid_t pid[8];
        uint64_t sum = 0;
        new_share();
        drop_from_cache(path);
        assert_int_equal(pipe(pipes), 0);
        for (int r = 0; r < world; r++) pid[r] = load_in_child(path, r, world, 2 << 20, pipes[1]);
        for (int r = 0; r < world; r++) {
            int status;
            uint64_t n;
            assert_int_equal(waitpid(pid[r], &status, 0), pid[r]);
            assert_int_equal(status, 0);
            assert_int_equal(read(pipes[0], &n, sizeof n), sizeof n);
            sum += n;
        }
        close(pipes[0]);
        close(pipes[1]);
        print_message("%d ranks: %.3f of the file's bytes read from the device\n", world,
                      (double)sum / (double)st.st_size);
        if (sum == 0) { /* a file system without a device under it, as in memory */
            unlink(path);
            skip();
        }
        if ((double)sum > 1.1 * (double)st.st_size)
            fail_msg("%d ranks: expected about %lld bytes from the device, found %" PRIu64, world,
                     (long long)st.st_size, sum);
    }
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_are_taken_in_order_whatever_the_threads_and_slots),
        cmocka_unit_test(the_first_failure_ends_a_pipeline_with_its_sentence),
        cmocka_unit_test(nobody_goes_further_than_the_window_ahead_of_the_slowest),
        cmocka_unit_test(a_peer_that_does_not_move_is_left_and_one_that_is_done_is_not_waited_for),
        cmocka_unit_test(a_share_that_is_not_there_is_refused),
        cmocka_unit_test(every_byte_of_every_rank_is_the_files),
        cmocka_unit_test(pieces_wait_in_the_devices_own_host_memory_or_else_in_ordinary),
        cmocka_unit_test(the_size_of_a_read_changes_nothing),
        cmocka_unit_test(progress_counts_the_bytes_asked_of_the_file_and_ends_with_all),
        cmocka_unit_test(a_file_cut_while_it_is_read_is_a_sentence_and_not_a_crash),
        cmocka_unit_test(each_byte_is_read_once_per_host),
    };
    return cmocka_run_group_tests(tests, find_paths, drop_folder);
}
