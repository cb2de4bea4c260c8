/* tests/unit/test_gguf_split.c: opening model files by path, and models split into parts.
 *
 * Each test lays out its own directory of small files under TMPDIR and removes it again.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/gguf.h"
#include "tests/unit/gguf_writer.h"

static char dir[PATH_MAX / 2];

static int make_dir(void **state) {
    UNUSED(state);
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/octavo-gguf-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw) {
    UNUSED(st);
    UNUSED(flag);
    UNUSED(ftw);
    return remove(path);
}

static int remove_dir(void **state) {
    UNUSED(state);
    return nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static const char *in_dir(const char *name) {
    static char paths[4][PATH_MAX];
    static int turn;
    char *p = paths[turn++ % 4];
    snprintf(p, PATH_MAX, "%s/%s", dir, name);
    return p;
}

static const char *part_name(int number, int of) {
    char name[64];
    snprintf(name, sizeof name, "m-%05d-of-%05d.gguf", number, of);
    return in_dir(name);
}

static void write_file(const char *path, const struct bytes *b) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    if (b->n) assert_int_equal(fwrite(b->p, 1, b->n, f), b->n);
    assert_int_equal(fclose(f), 0);
}

/* One part: split keys as told, n tensors of four floats with the value `no`. */
struct part {
    int no, count, total, n_tensors;
    const char *prefix; /* of tensor names */
    bool metadata;
};

static struct bytes build_part(struct part p) {
    struct bytes b = {0};
    char name[32];
    put_header(&b, 3, (uint64_t)p.n_tensors, 3u + p.metadata);
    if (p.metadata) {
        put_key(&b, "general.architecture", GGUF_STRING);
        put_str(&b, "glm-dsa");
    }
    put_key(&b, "split.no", GGUF_U16);
    put_u16(&b, (uint16_t)p.no);
    put_key(&b, "split.count", GGUF_U16);
    put_u16(&b, (uint16_t)p.count);
    put_key(&b, "split.tensors.count", GGUF_I32);
    put_u32(&b, (uint32_t)p.total);
    for (int i = 0; i < p.n_tensors; i++) {
        snprintf(name, sizeof name, "%s.%d.%d", p.prefix ? p.prefix : "t", p.no, i);
        put_tensor(&b, name, 1, (uint64_t[]){4}, 0, (uint64_t)i * 32);
    }
    put_padding(&b, 32);
    for (int i = 0; i < p.n_tensors; i++) {
        put_fill(&b, 16, (uint8_t)p.no);
        if (i + 1 < p.n_tensors) put_fill(&b, 16, 0);
    }
    return b;
}

static void write_part(int number, int of, struct part p) {
    struct bytes b = build_part(p);
    write_file(part_name(number, of), &b);
    free(b.p);
}

/* Three parts: metadata only, two tensors, one tensor. */
static const struct part good[3] = {
    {.no = 0, .count = 3, .total = 3, .n_tensors = 0, .metadata = true},
    {.no = 1, .count = 3, .total = 3, .n_tensors = 2},
    {.no = 2, .count = 3, .total = 3, .n_tensors = 1},
};

static void write_good(void) {
    for (int i = 0; i < 3; i++) write_part(i + 1, 3, good[i]);
}

static void refused(const char *path, int code, const char *file, const char *expect) {
    struct gguf *g;
    struct err_text err = {{0}};
    int rc = gguf_open(&g, path, &err);
    if (rc == code && strstr(err.text, expect) && strstr(err.text, file)) return;
    fail_msg("expected %s with %s: %s, found %s: %s", err_name(code), file, expect, err_name(rc),
             err.text);
}

static void the_demonstration_model_opens(void **state) {
    UNUSED(state);
    const char *root = getenv("OCTAVO_SOURCE_ROOT");
    char path[PATH_MAX];
    struct gguf *g;
    struct gguf_str s;
    struct err_text err = {{0}};
    uint64_t v;
    snprintf(path, sizeof path, "%s/tests/models/tiny.gguf", root ? root : ".");
    if (gguf_open(&g, path, &err)) fail_msg("expected ok, found %s", err.text);
    assert_int_equal(gguf_n_tensors(g), 130);
    assert_int_equal(gguf_n_kv(g), 51);
    assert_int_equal(gguf_total_bytes(g), 26984000);
    assert_int_equal(gguf_get_str(g, "general.architecture", &s, &err), OK);
    assert_memory_equal(s.p, "glm-dsa", s.n);
    assert_int_equal(gguf_get_u64(g, "glm-dsa.embedding_length", &v, &err), OK);
    assert_int_equal(v, 256);
    const struct gguf_kv *kv = gguf_find(g, "tokenizer.ggml.tokens");
    struct gguf_cursor c = {0};
    uint64_t n = 0;
    while (gguf_next_str(kv, &c, &s)) n++;
    assert_int_equal(n, 4096);
    const struct gguf_tensor *t = gguf_tensor_find(g, "token_embd.weight");
    uint8_t first[16];
    assert_int_equal(pread(gguf_part_fd(g, t->part), first, sizeof first, (off_t)t->offset), 16);
    assert_memory_equal(first, t->data, sizeof first);
    gguf_close(g);
}

static void any_part_opens_all_parts(void **state) {
    UNUSED(state);
    write_good();
    for (int i = 1; i <= 3; i++) {
        struct gguf *g;
        struct err_text err = {{0}};
        if (gguf_open(&g, part_name(i, 3), &err)) fail_msg("expected ok, found %s", err.text);
        assert_int_equal(gguf_parts(g), 3);
        assert_int_equal(gguf_n_tensors(g), 3);
        assert_non_null(gguf_find(g, "general.architecture"));
        for (int p = 0; p < 3; p++) assert_string_equal(gguf_part_path(g, p), part_name(p + 1, 3));
        const struct gguf_tensor *t = gguf_tensor_find(g, "t.2.0");
        assert_non_null(t);
        assert_int_equal(t->part, 2);
        assert_int_equal(t->data[0], 2);
        t = gguf_tensor_find(g, "t.1.1");
        assert_int_equal(t->part, 1);
        assert_int_equal(t->data[15], 1);
        gguf_close(g);
    }
}

static void a_missing_part_is_named(void **state) {
    UNUSED(state);
    write_good();
    unlink(part_name(2, 3));
    refused(part_name(1, 3), ERR_SYS, "m-00002-of-00003.gguf",
            "expected part 2 of 3, found no such file");
    refused(part_name(3, 3), ERR_SYS, "m-00002-of-00003.gguf",
            "expected part 2 of 3, found no such file");
    refused(part_name(2, 3), ERR_SYS, "m-00002-of-00003.gguf", "No such file");
}

static void an_empty_or_cut_part_is_named(void **state) {
    UNUSED(state);
    struct bytes none = {0};
    write_good();
    write_file(part_name(3, 3), &none);
    refused(part_name(1, 3), ERR_FORMAT, "m-00003-of-00003.gguf", "found an empty file");
    struct bytes b = build_part(good[2]);
    b.n -= 1;
    write_file(part_name(3, 3), &b);
    refused(part_name(2, 3), ERR_FORMAT, "m-00003-of-00003.gguf", "tensor 't.2.0'");
    b.n = 40;
    write_file(part_name(3, 3), &b);
    refused(part_name(2, 3), ERR_FORMAT, "m-00003-of-00003.gguf", "expected");
    free(b.p);
}

static void mixed_up_parts_are_named(void **state) {
    UNUSED(state);
    write_good();
    write_part(2, 3, good[2]); /* the same part twice */
    refused(part_name(1, 3), ERR_FORMAT, "m-00002-of-00003.gguf",
            "expected part 2 of 3 as the name says, found part 3 of 3 inside");
    refused(part_name(2, 3), ERR_FORMAT, "m-00002-of-00003.gguf",
            "expected part 2 of 3 as the name says, found part 3 of 3 inside");
    write_part(2, 3, (struct part){.no = 1, .count = 4, .total = 3, .n_tensors = 2});
    refused(part_name(1, 3), ERR_FORMAT, "m-00002-of-00003.gguf", "found part 2 of 4 inside");
    write_part(2, 3, (struct part){.no = 3, .count = 3, .total = 3, .n_tensors = 2});
    refused(part_name(1, 3), ERR_FORMAT, "m-00002-of-00003.gguf",
            "key 'split.no': expected 0 to 2, found 3");
    write_part(2, 3, (struct part){.no = 0, .count = 1, .total = 2, .n_tensors = 2});
    refused(part_name(1, 3), ERR_FORMAT, "m-00002-of-00003.gguf", "found a file that is no part");
}

static void split_keys_that_make_no_sense_are_refused(void **state) {
    UNUSED(state);
    write_good();
    write_part(1, 3, (struct part){.no = 0, .count = 0, .total = 3, .metadata = true});
    refused(part_name(1, 3), ERR_FORMAT, "m-00001-of-00003.gguf",
            "key 'split.count': expected 1 to 99999, found 0");
    write_part(1, 3, (struct part){.no = 7, .count = 3, .total = 3, .metadata = true});
    refused(part_name(1, 3), ERR_FORMAT, "m-00001-of-00003.gguf",
            "key 'split.no': expected 0 to 2, found 7");
    write_part(1, 3, (struct part){.no = 0, .count = 3, .total = -1, .metadata = true});
    refused(part_name(1, 3), ERR_FORMAT, "m-00001-of-00003.gguf",
            "key 'split.tensors.count': expected an integer of at least 0");
}

static void a_wrong_total_of_tensors_is_refused(void **state) {
    UNUSED(state);
    write_good();
    write_part(3, 3, (struct part){.no = 2, .count = 3, .total = 4, .n_tensors = 1});
    refused(part_name(1, 3), ERR_FORMAT, "m-00003-of-00003.gguf",
            "expected 3 as in the other parts, found 4");
    write_part(3, 3, (struct part){.no = 2, .count = 3, .total = 3, .n_tensors = 2});
    refused(part_name(1, 3), ERR_FORMAT, "m-00001-of-00003.gguf",
            "expected 3 tensors in all parts, found 4");
}

static void a_tensor_in_two_parts_is_refused(void **state) {
    UNUSED(state);
    struct part twice = good[2];
    write_good();
    twice.no = 1; /* names its tensor t.1.0 … */
    struct bytes b = build_part(twice);
    uint8_t *no = memmem(b.p, b.n, "split.no\2\0\0\0\1", 13); /* … but says it is part 2 */
    assert_non_null(no);
    no[12] = 2;
    write_file(part_name(3, 3), &b);
    free(b.p);
    refused(part_name(1, 3), ERR_FORMAT, "m-00003-of-00003.gguf",
            "tensor 't.1.0': expected every tensor once, found a duplicate");
}

static void siblings_are_named_after_the_path_given(void **state) {
    UNUSED(state);
    struct bytes b = build_part(good[1]);
    write_good();
    write_file(in_dir("renamed.gguf"), &b);
    refused(in_dir("renamed.gguf"), ERR_FORMAT, "renamed.gguf", "to be named");
    write_file(in_dir("m-00002-of-00004.gguf"), &b);
    refused(in_dir("m-00002-of-00004.gguf"), ERR_FORMAT, "m-00002-of-00004.gguf",
            "expected part 2 of 4 as the name says, found part 2 of 3 inside");
    free(b.p);
}

static void links_to_parts_are_followed_but_looked_for_beside_the_link(void **state) {
    UNUSED(state);
    struct gguf *g;
    struct err_text err = {{0}};
    char blob[16];
    for (int i = 0; i < 3; i++) {
        struct bytes b = build_part(good[i]);
        snprintf(blob, sizeof blob, "blob%d", i);
        write_file(in_dir(blob), &b);
        assert_int_equal(symlink(blob, part_name(i + 1, 3)), 0);
        free(b.p);
    }
    if (gguf_open(&g, part_name(2, 3), &err)) fail_msg("expected ok, found %s", err.text);
    assert_int_equal(gguf_n_tensors(g), 3);
    gguf_close(g);
}

static void a_file_joined_with_cat_is_refused_with_a_hint(void **state) {
    UNUSED(state);
    struct bytes joined = {0};
    for (int i = 0; i < 3; i++) {
        struct bytes b = build_part(good[i]);
        put(&joined, b.p, b.n);
        free(b.p);
    }
    write_file(in_dir("joined.gguf"), &joined);
    refused(in_dir("joined.gguf"), ERR_FORMAT, "joined.gguf", "were parts joined with cat?");
    free(joined.p);
}

static void what_is_no_file_is_refused_without_waiting(void **state) {
    UNUSED(state);
    refused(dir, ERR_FORMAT, "octavo-gguf", "expected a file, found a directory");
    assert_int_equal(mkfifo(in_dir("fifo"), 0600), 0);
    refused(in_dir("fifo"), ERR_FORMAT, "fifo", "found a device, pipe or socket");
    refused(in_dir("nothing.gguf"), ERR_SYS, "nothing.gguf", "No such file");
}

/* A header longer than the first read, so that reading on is exercised too. */
static struct bytes build_long(uint32_t n_strings) {
    struct bytes b = {0};
    put_header(&b, 3, 1, 1);
    put_key(&b, "tokens", GGUF_ARRAY);
    put_u32(&b, GGUF_STRING);
    put_u64(&b, n_strings);
    for (uint32_t i = 0; i < n_strings; i++) put_str(&b, "token");
    put_tensor(&b, "t", 1, (uint64_t[]){4}, 0, 0);
    put_padding(&b, 32);
    put_fill(&b, 16, 9);
    return b;
}

static void keys_outlive_a_file_that_is_cut_while_it_is_open(void **state) {
    UNUSED(state);
    struct bytes b = build_long(100000);
    struct gguf *g;
    struct gguf_cursor c = {0};
    struct gguf_str s;
    struct err_text err = {{0}};
    uint32_t n = 0;
    write_file(in_dir("long.gguf"), &b);
    if (gguf_open(&g, in_dir("long.gguf"), &err)) fail_msg("expected ok, found %s", err.text);
    assert_int_equal(gguf_tensor_find(g, "t")->data[0], 9);
    assert_int_equal(truncate(in_dir("long.gguf"), 0), 0);
    while (gguf_next_str(gguf_find(g, "tokens"), &c, &s)) {
        assert_memory_equal(s.p, "token", 5);
        n++;
    }
    assert_int_equal(n, 100000);
    gguf_close(g);
    free(b.p);
}

static void a_refusal_leaves_no_descriptor_open(void **state) {
    UNUSED(state);
    int before = open("/dev/null", O_RDONLY | O_CLOEXEC), after;
    close(before);
    write_good();
    unlink(part_name(3, 3));
    refused(part_name(1, 3), ERR_SYS, "m-00003-of-00003.gguf", "expected part 3 of 3");
    after = open("/dev/null", O_RDONLY | O_CLOEXEC);
    close(after);
    assert_int_equal(before, after);
}

#define BIG_PARTS   11
#define BIG_TENSORS 182 /* a part */
#define BIG_TOKENS  154880

/* Part `number` of a model as large as the real ones: a true header, and a hole for data. */
static void write_big_part(int number) {
    struct bytes b = {0};
    char name[64];
    const uint64_t ne[3] = {6144, 2048, 16}, bytes = 6144 / 256 * 144 * 2048ull * 16;
    bool first = number == 1;
    put_header(&b, 3, BIG_TENSORS, first ? 5 : 3);
    put_key(&b, "split.no", GGUF_U16);
    put_u16(&b, (uint16_t)(number - 1));
    put_key(&b, "split.count", GGUF_U16);
    put_u16(&b, BIG_PARTS);
    put_key(&b, "split.tensors.count", GGUF_I32);
    put_u32(&b, BIG_PARTS * BIG_TENSORS);
    const char *const keys[] = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"};
    for (int k = 0; first && k < 2; k++) {
        put_key(&b, keys[k], GGUF_ARRAY);
        put_u32(&b, GGUF_STRING);
        put_u64(&b, (uint64_t)(k + 1) * BIG_TOKENS);
        for (int i = 0; i < (k + 1) * BIG_TOKENS; i++) {
            snprintf(name, sizeof name, "token %d", i);
            put_str(&b, name);
        }
    }
    for (int i = 0; i < BIG_TENSORS; i++) {
        snprintf(name, sizeof name, "blk.%d.ffn_gate_exps.%d.weight", number, i);
        put_tensor(&b, name, 3, ne, 12, (uint64_t)i * bytes);
    }
    put_padding(&b, 32);
    write_file(part_name(number, BIG_PARTS), &b);
    if (truncate(part_name(number, BIG_PARTS), (off_t)(b.n + BIG_TENSORS * bytes)) < 0)
        fail_msg("a file with a hole: %s", strerror(errno));
    free(b.p);
}

/* Processor time, which a busy machine does not change; it takes a fiftieth of the bound. */
static void eleven_parts_with_two_thousand_tensors_open_in_a_moment(void **state) {
    UNUSED(state);
    struct gguf *g;
    struct err_text err = {0};
    for (int i = 1; i <= BIG_PARTS; i++) write_big_part(i);
    clock_t before = clock();
    if (gguf_open(&g, part_name(4, BIG_PARTS), &err)) fail_msg("expected ok, found %s", err.text);
    double seconds = (double)(clock() - before) / CLOCKS_PER_SEC;
    assert_int_equal(gguf_n_tensors(g), BIG_PARTS * BIG_TENSORS);
    assert_true(gguf_total_bytes(g) > 200e9);
    if (seconds > 1)
        fail_msg("%d parts: expected less than 1 s of processor time, found %.2f", BIG_PARTS,
                 seconds);
    gguf_close(g);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, make_dir, remove_dir)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_demonstration_model_opens),
        TEST(any_part_opens_all_parts),
        TEST(a_missing_part_is_named),
        TEST(an_empty_or_cut_part_is_named),
        TEST(mixed_up_parts_are_named),
        TEST(split_keys_that_make_no_sense_are_refused),
        TEST(a_wrong_total_of_tensors_is_refused),
        TEST(a_tensor_in_two_parts_is_refused),
        TEST(siblings_are_named_after_the_path_given),
        TEST(links_to_parts_are_followed_but_looked_for_beside_the_link),
        TEST(a_file_joined_with_cat_is_refused_with_a_hint),
        TEST(what_is_no_file_is_refused_without_waiting),
        TEST(keys_outlive_a_file_that_is_cut_while_it_is_open),
        TEST(eleven_parts_with_two_thousand_tensors_open_in_a_moment),
        TEST(a_refusal_leaves_no_descriptor_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
