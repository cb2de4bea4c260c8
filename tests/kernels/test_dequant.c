/* tests/kernels/test_dequant.c: decoders against the `gguf` Python package, each other, and the
 * check vectors of the format notes.
 *
 * dequant.bin is written by make_dequant_fixture.py.
 */
#include "tests/kernels/check.h"

static const int types[] = {KT_F32,  KT_F16,  KT_BF16, KT_Q4_0,   KT_Q4_1,
                            KT_Q5_0, KT_Q5_1, KT_Q8_0, KT_Q2_K,   KT_Q3_K,
                            KT_Q4_K, KT_Q5_K, KT_Q6_K, KT_IQ4_NL, KT_IQ4_XS};
#define N_TYPES ((int)(sizeof types / sizeof types[0]))

static uint8_t *read_fixture(size_t *n) {
    char path[4096];
    const char *root = getenv("OCTAVO_SOURCE_ROOT");
    snprintf(path, sizeof path, "%s/tests/kernels/dequant.bin", root ? root : ".");
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("%s: expected a readable file", path);
    uint8_t *bytes = check_alloc(1 << 20);
    *n = fread(bytes, 1, 1 << 20, f);
    fclose(f);
    return bytes;
}

static void every_type_decodes_as_the_reference_package_does(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx), seen = 0;
    size_t size;
    uint8_t *fixture = read_fixture(&size);
    for (size_t at = 0; at < size; seen++) {
        uint32_t head[3];
        memcpy(head, fixture + at, sizeof head);
        const uint8_t *blocks = fixture + at + sizeof head;
        float *expected = check_alloc(head[1] * 4), *found = check_alloc(head[1] * 4);
        memcpy(expected, blocks + head[2], head[1] * 4);
        assert_true(ktype_supported((int)head[0]));
        assert_int_equal(ktype_row_bytes((int)head[0], head[1]), head[2]);
        kdequant_row((int)head[0], blocks, found, head[1]);
        check_same(ktype_name((int)head[0]), expected, found, head[1]);
        for (int i = 0; i < n_ctx; i++) {
            char what[64];
            snprintf(what, sizeof what, "%s %s", ctx[i]->isa->name, ktype_name((int)head[0]));
            memset(found, 0xFF, head[1] * 4);
            ctx[i]->isa->decode[head[0]](blocks, found, head[1]);
            check_same(what, expected, found, head[1]);
        }
        at += sizeof head + head[2] + head[1] * 4;
        free(expected);
        free(found);
    }
    assert_int_equal(seen, N_TYPES);
    free(fixture);
}

/* Whole blocks of random bytes, NaN and infinite scales included, at odd addresses. */
static void instruction_sets_decode_random_bytes_alike(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(1);
    for (int k = 0; k < N_TYPES; k++) {
        int64_t n =
            ktype_block_elems(types[k]) == 1 ? 37 : 64 * (int64_t)ktype_block_elems(types[k]);
        int64_t bytes = ktype_row_bytes(types[k], n);
        uint8_t *raw = check_alloc((size_t)bytes + 1);
        float *expected = check_alloc((size_t)n * 4), *found = check_alloc((size_t)n * 4);
        for (int64_t i = 0; i <= bytes; i++) raw[i] = (uint8_t)rng_next(&rng);
        kdequant_row(types[k], raw + 1, expected, n);
        for (int i = 0; i < n_ctx; i++) {
            ctx[i]->isa->decode[types[k]](raw + 1, found, n);
            check_same(ktype_name(types[k]), expected, found, n);
        }
        free(raw);
        free(expected);
        free(found);
    }
}

static const struct vector {
    int type, dmin_at; /* the offset of d, and of m or dmin, or -1 */
    int d_at;
    float first[6], middle[2], last;
    double sum;
} vectors[] = {
    {KT_Q4_0, -1, 0, {-7, 6, 3, 0, -3, -6}, {-6, -6}, 6, -13},
    {KT_Q4_1, 2, 0, {11.5f, 8.5f, 5.5f, 2.5f, 15.5f, 12.5f}, {3.5f, 4.5f}, 15.5f, 285},
    {KT_Q5_0, -1, 0, {5, -14, -1, -4, -7, 6}, {5, 6}, -15, -41},
    {KT_Q5_1, 2, 0, {31.5f, 28.5f, 9.5f, 22.5f, 19.5f, 16.5f}, {22.5f, 7.5f}, 3.5f, 497},
    {KT_Q8_0, -1, 0, {33, 46, 59, 72, 85, 98}, {-15, -2}, -76, 80},
    {KT_Q2_K, 82, 80, {21, 0, 7, 14, 21, 0}, {42, -3}, -6, 2168},
    {KT_Q3_K, -1, 108, {69, -92, 23, -46, 69, -92}, {18, -0.0f}, -36, 335},
    {KT_Q4_K, 2, 0, {389.5f, 212.5f, 35.5f, 802.5f, 625.5f, 448.5f}, {8, -1}, 82, 43208},
    {KT_Q5_K, 2, 0, {1333.5f, 212.5f, 979.5f, 802.5f, 1569.5f, 448.5f}, {56, -1}, 342, 91896},
    {KT_Q6_K, -1, 208, {-1311, 1596, 855, -798, -1539, 1368}, {1081, -1316}, -826, 12900},
    {KT_IQ4_NL, -1, 0, {-104, 89, 38, 1, -35, -83}, {-83, -83}, 89, -137},
    {KT_IQ4_XS, -1, 0, {-565, -265, -65, 110, 325, 635}, {565, 265}, -2314, 5139},
};

/* Byte i of the block is 7 + 13 i, d is 1, m or dmin is one half. */
static void the_published_check_vectors_come_out(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof vectors / sizeof vectors[0]; k++) {
        const struct vector *v = &vectors[k];
        uint8_t block[256];
        float y[256], tail[3] = {v->middle[0], v->middle[1], v->last};
        int n = ktype_block_elems(v->type);
        for (int i = 0; i < 256; i++) block[i] = (uint8_t)(7 + 13 * i);
        block[v->d_at] = 0, block[v->d_at + 1] = 0x3C;
        if (v->dmin_at >= 0) block[v->dmin_at] = 0, block[v->dmin_at + 1] = 0x38;
        kdequant_row(v->type, block, y, n);
        double sum = 0;
        for (int i = 0; i < n; i++) sum += (double)y[i];
        check_same(ktype_name(v->type), v->first, y, 6);
        check_same(ktype_name(v->type), tail, (float[]){y[n / 2], y[n / 2 + 1], y[n - 1]}, 3);
        check_near(ktype_name(v->type), v->sum, sum, 0);
    }
}

static void half_floats_of_every_kind_are_exact(void **state) {
    (void)state;
    assert_true(same_bits(kf16_to_f32(0x3C00), 1.0f));
    assert_true(same_bits(kf16_to_f32(0x8000), -0.0f));
    assert_true(same_bits(kf16_to_f32(0x0001), 0x1p-24f));
    assert_true(same_bits(kf16_to_f32(0x83FF), -0x1.ff8p-15f));
    assert_true(same_bits(kf16_to_f32(0x7BFF), 65504.0f));
    assert_true(same_bits(kf16_to_f32(0xFC00), -INFINITY));
    assert_true(isnan(kf16_to_f32(0x7E01)));
    assert_true(same_bits(kbf16_to_f32(0xC049), -3.140625f));
}

static void unknown_types_are_not_supported(void **state) {
    (void)state;
    int known = 0;
    for (int type = -1; type <= KT_MAX; type++) known += ktype_supported(type);
    assert_int_equal(known, N_TYPES);
    assert_int_equal(ktype_block_elems(9), 0);
    assert_string_equal(ktype_name(-1), "?");
    assert_string_equal(ktype_name(KT_IQ4_XS), "IQ4_XS");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_decodes_as_the_reference_package_does),
        cmocka_unit_test(instruction_sets_decode_random_bytes_alike),
        cmocka_unit_test(the_published_check_vectors_come_out),
        cmocka_unit_test(half_floats_of_every_kind_are_exact),
        cmocka_unit_test(unknown_types_are_not_supported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
