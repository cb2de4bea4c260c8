/* tests/unit/test_shard.c: the shard cache is used when it fits, noticed when it is damaged, and
 * never in the way.
 */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker/model.h"

static char model_path[512], folder[400], cache[512];

static int make_folder(void **state) {
    UNUSED(state);
    const char *source = getenv("OCTAVO_SOURCE_ROOT"), *build = getenv("OCTAVO_BUILD_ROOT");
    snprintf(model_path, sizeof model_path, "%s/tests/models/tiny.gguf", source ? source : ".");
    snprintf(folder, sizeof folder, "%s/test-shard-XXXXXX", build ? build : "/tmp");
    if (!mkdtemp(folder)) return -1;
    snprintf(cache, sizeof cache, "%s/cache", folder);
    return 0;
}

/* Calls visit, if any, with the path of each file in the cache; says how many there are. */
static int each_file(void (*visit)(const char *path)) {
    DIR *d = opendir(cache);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[1024];
        if (e->d_name[0] == '.') continue;
        n++;
        snprintf(path, sizeof path, "%s/%s", cache, e->d_name);
        if (visit) visit(path);
    }
    if (d) closedir(d);
    return n;
}

static void remove_file(const char *path) {
    unlink(path);
}

static int drop_folder(void **state) {
    UNUSED(state);
    each_file(remove_file);
    rmdir(cache);
    return rmdir(folder);
}

static struct model load(int rank, int world, const char *dir) {
    struct gguf *g;
    struct model m = {0};
    struct err_text err = {0};
    const struct model_options o = {.rank = rank,
                                    .world = world,
                                    .max_slots = 1,
                                    .max_rows = 4,
                                    .max_outs = 1,
                                    .context = 64,
                                    .shard_dir = dir};
    if (gguf_open(&g, model_path, &err) < 0) fail_msg("%s", err.text);
    if (model_load(&m, g, &o, (struct load_progress){0}, &err) < 0) fail_msg("%s", err.text);
    gguf_close(g);
    return m;
}

static void expect_same(const struct model *a, const struct model *b) {
    assert_int_equal(a->weight_bytes, b->weight_bytes);
    const struct kmat *x = &a->layers[1].down_exps, *y = &b->layers[1].down_exps;
    assert_int_equal(x->layout, y->layout);
    size_t bytes = (size_t)(x->rows * ktype_row_bytes(x->type, x->cols));
    uint8_t *p = malloc(bytes), *q = malloc(bytes);
    for (int64_t at = 0; at < x->count; at++) {
        a->k->mat_unpack(a->ctx, x, at, p);
        b->k->mat_unpack(b->ctx, y, at, q);
        assert_memory_equal(p, q, bytes);
    }
    free(p);
    free(q);
    if (strcmp(a->k->name, "cpu")) return;
    /* Here the whole arena can be looked at; the gaps in it were cleared for the shard. */
    assert_memory_equal(a->arena[ARENA_WEIGHTS], b->arena[ARENA_WEIGHTS], a->weight_bytes);
}

static void a_second_start_takes_the_shard_and_gets_the_same_bits(void **state) {
    UNUSED(state);
    for (int world = 1; world <= 2; world++)
        for (int rank = 0; rank < world; rank++) {
            struct model first = load(rank, world, cache), second = load(rank, world, cache);
            assert_false(first.from_shard);
            assert_true(second.from_shard);
            assert_int_equal(second.asked_bytes, second.weight_bytes);
            expect_same(&first, &second);
            model_unload(&first);
            model_unload(&second);
        }
    assert_int_equal(each_file(NULL), 3); /* one for each rank of each world, nothing left over */
    each_file(remove_file);
}

static off_t damage_at;

static void damage(const char *path) {
    uint8_t b;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    off_t at = damage_at < 0 ? st.st_size + damage_at : damage_at;
    assert_int_equal(pread(fd, &b, 1, at), 1);
    b ^= 16;
    assert_int_equal(pwrite(fd, &b, 1, at), 1);
    close(fd);
}

static void shorten(const char *path) {
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(truncate(path, st.st_size - 1), 0);
}

static void empty(const char *path) {
    assert_int_equal(truncate(path, 0), 0);
}

static void expect_rebuilt_after(void (*harm)(const char *path), const struct model *good) {
    assert_int_equal(each_file(harm), 1);
    struct model rebuilt = load(0, 2, cache);
    assert_false(rebuilt.from_shard);
    struct model used = load(0, 2, cache);
    assert_true(used.from_shard);
    expect_same(good, &used);
    model_unload(&rebuilt);
    model_unload(&used);
}

static void a_damaged_shard_is_noticed_and_made_again(void **state) {
    UNUSED(state);
    /* magic, version, digest, size, checksum; a layout; a checksum; first, middle and last weight
     */
    const off_t places[] = {0, 8, 16, 24, 40, 4096, 4096 + 450, 5000000, -1};
    struct model good = load(0, 2, cache);
    for (size_t i = 0; i < ARRAY_LEN(places); i++) {
        damage_at = places[i];
        expect_rebuilt_after(damage, &good);
    }
    expect_rebuilt_after(shorten, &good);
    expect_rebuilt_after(empty, &good);
    model_unload(&good);
    each_file(remove_file);
}

static void a_touched_model_and_another_world_do_not_take_it(void **state) {
    UNUSED(state);
    char other[512], kept[512];
    struct model m = load(0, 2, cache);
    model_unload(&m);
    m = load(0, 4, cache);
    assert_false(m.from_shard);
    model_unload(&m);
    m = load(1, 2, cache);
    assert_false(m.from_shard);
    model_unload(&m);
    snprintf(other, sizeof other, "%s/other.gguf", folder);
    snprintf(kept, sizeof kept, "%s", model_path);
    assert_int_equal(symlink(model_path, other), 0); /* the same file by another name */
    snprintf(model_path, sizeof model_path, "%s", other);
    m = load(0, 2, cache);
    assert_true(m.from_shard);
    model_unload(&m);
    unlink(other);
    FILE *from = fopen(kept, "rb"), *to = fopen(other, "wb"); /* the same bytes, written later */
    static char buf[1 << 16];
    for (size_t n; (n = fread(buf, 1, sizeof buf, from)) > 0;)
        assert_int_equal(fwrite(buf, 1, n, to), n);
    fclose(from);
    fclose(to);
    m = load(0, 2, cache);
    assert_false(m.from_shard);
    model_unload(&m);
    unlink(other);
    snprintf(model_path, sizeof model_path, "%s", kept);
    each_file(remove_file);
}

static void a_cache_that_cannot_be_written_is_only_a_warning(void **state) {
    UNUSED(state);
    struct model m = load(0, 1, "/proc/nowhere");
    assert_false(m.from_shard);
    model_unload(&m);
    m = load(0, 1, model_path); /* not a folder */
    assert_false(m.from_shard);
    model_unload(&m);
    pid_t pid = fork();
    if (pid == 0) { /* files end at 1 MB, as on a full disk */
        signal(SIGXFSZ, SIG_IGN);
        struct rlimit limit = {1 << 20, 1 << 20};
        setrlimit(RLIMIT_FSIZE, &limit);
        m = load(0, 1, cache);
        _exit(m.from_shard);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(each_file(NULL), 0); /* not even the half of it */
}

static void ranks_and_twins_may_write_at_once(void **state) {
    UNUSED(state);
    pid_t pid[6];
    for (int i = 0; i < 6; i++)
        if ((pid[i] = fork()) == 0) {
            struct model m = load(i % 2, 2, cache);
            model_unload(&m);
            _exit(0);
        }
    for (int i = 0; i < 6; i++) {
        int status;
        assert_int_equal(waitpid(pid[i], &status, 0), pid[i]);
        assert_int_equal(status, 0);
    }
    assert_int_equal(each_file(NULL), 2);
    for (int r = 0; r < 2; r++) {
        struct model m = load(r, 2, cache);
        assert_true(m.from_shard);
        model_unload(&m);
    }
    each_file(remove_file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_second_start_takes_the_shard_and_gets_the_same_bits),
        cmocka_unit_test(a_damaged_shard_is_noticed_and_made_again),
        cmocka_unit_test(a_touched_model_and_another_world_do_not_take_it),
        cmocka_unit_test(a_cache_that_cannot_be_written_is_only_a_warning),
        cmocka_unit_test(ranks_and_twins_may_write_at_once),
    };
    return cmocka_run_group_tests(tests, make_folder, drop_folder);
}
