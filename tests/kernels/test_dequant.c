/* tests/kernels/test_dequant.c: decoders against the `gguf` Python package, each other, and the
 * check vectors of the format notes.
 *
 * dequant.bin is written by make_dequant_fixture.py.
 */
#include "tests/kernels/check.h"

static const int types[] = {KT_F32,     KT_F16,    KT_BF16,   KT_Q4_0,    KT_Q4_1,   KT_Q5_0,
                            KT_Q5_1,    KT_Q8_0,   KT_Q2_K,   KT_Q3_K,    KT_Q4_K,   KT_Q5_K,
                            KT_Q6_K,    KT_IQ4_NL, KT_IQ4_XS, KT_IQ2_XXS, KT_IQ2_XS, KT_IQ2_S,
                            KT_IQ3_XXS, KT_IQ3_S,  KT_IQ1_S,  KT_IQ1_M,   KT_MXFP4,  KT_NVFP4};
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

#define CODEBOOK 0xFFFFFFFFu /* stands where a type would */

/* The table that a type's codes point into, and its size. */
static const int8_t *codebook_of(int type, size_t *bytes) {
    const struct kcodebooks *k = &kcodebooks;
    switch (type) {
    case KT_IQ2_XXS:
        return *bytes = sizeof k->iq2_xxs, k->iq2_xxs[0];
    case KT_IQ2_XS:
        return *bytes = sizeof k->iq2_xs, k->iq2_xs[0];
    case KT_IQ2_S:
        return *bytes = sizeof k->iq2_s, k->iq2_s[0];
    case KT_IQ3_XXS:
        return *bytes = sizeof k->iq3_xxs, k->iq3_xxs[0];
    case KT_IQ3_S:
        return *bytes = sizeof k->iq3_s, k->iq3_s[0];
    case KT_IQ1_S:
        return *bytes = sizeof k->iq1, k->iq1[0];
    }
    fail_msg("expected a type with a codebook, found %s", ktype_name(type));
    return NULL;
}

/* FNV-1a over every entry against the digest at `expected`. */
static void check_codebook(int type, size_t bytes, const uint8_t *expected) {
    size_t have = 0;
    const int8_t *entries = codebook_of(type, &have);
    uint64_t digest = 0xCBF29CE484222325, want;
    memcpy(&want, expected, sizeof want);
    assert_int_equal(have, bytes);
    for (size_t i = 0; i < have; i++) digest = (digest ^ (uint8_t)entries[i]) * 0x100000001B3;
    if (digest != want)
        fail_msg("codebook of %s: expected digest %016llx, found %016llx", ktype_name(type),
                 (unsigned long long)want, (unsigned long long)digest);
}

static void every_type_decodes_as_the_reference_package_does(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx), seen = 0, codebooks = 0;
    size_t size;
    uint8_t *fixture = read_fixture(&size);
    for (size_t at = 0; at < size;) {
        uint32_t head[3];
        memcpy(head, fixture + at, sizeof head);
        const uint8_t *blocks = fixture + at + sizeof head;
        if (head[0] == CODEBOOK) {
            check_codebook((int)head[1], head[2], blocks);
            at += sizeof head + 8;
            codebooks++;
            continue;
        }
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
        seen++;
        free(expected);
        free(found);
    }
    assert_int_equal(seen, N_TYPES);
    assert_int_equal(codebooks, 6);
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
    {KT_IQ2_XXS, -1, 0, {-15, 46.875f, -15, 15, -15, 46.875f}, {-3, 9.375f}, 11, -836.5},
    {KT_IQ2_XS, -1, 0, {-16.125f, -9.375f, -3, 3, -9.375f, 3}, {-34.375f, -11}, -23, -710.625},
    {KT_IQ2_S, -1, 0, {-59.375f, 59.375f, 102.125f, 19, 19, 59.375f}, {-27, 27}, 15.625f, 420.75},
    {KT_IQ3_XXS, -1, 0, {-263.5f, 187, 85, 17, 187, -263.5f}, {-11, 170.5f}, 93, -2684.5},
    {KT_IQ3_S, -1, 0, {-209, 133, 19, -133, 133, 57}, {-21, 49}, 133, -214},
    {KT_IQ1_S,
     -1,
     0,
     {-1.125f, -1.125f, -1.125f, 7.875f, -10.125f, -1.125f},
     {0.875f, 7.875f},
     -0.125f,
     -35},
    {KT_IQ1_M,
     -1,
     -1,
     {16.875f, 1.875f, 1.875f, -13.125f, -13.125f, 16.875f},
     {-7.875f, 6.125f},
     3.375f,
     13},
    {KT_MXFP4, -1, -1, {2, 0.5f, -4, -1.5f, 0, 3}, {0.5f, 1}, -3, 13.5},
    {KT_NVFP4, -1, -1, {-1.5f, 0, 3, 1, -6, -2}, {-0.75f, 0}, -0.02734375f, -22.236328125},
};

/* Sets d to 1 where it is not a half float of its own. */
static void set_scales(int type, uint8_t *block) {
    if (type == KT_MXFP4) block[0] = 127;
    if (type == KT_NVFP4) memcpy(block, (const uint8_t[]){0x38, 0x40, 0x30, 0x07}, 4);
    for (int k = 0; type == KT_IQ1_M && k < 4; k++) {
        static const uint8_t top[4] = {0, 0, 0xC0, 0x30};
        block[49 + 2 * k] = (uint8_t)((block[49 + 2 * k] & 15) | top[k]);
    }
}

/* Byte i of the block is 7 + 13 i, d is 1, m or dmin is one half. */
static void the_published_check_vectors_come_out(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof vectors / sizeof vectors[0]; k++) {
        const struct vector *v = &vectors[k];
        uint8_t block[256];
        float y[256], tail[3] = {v->middle[0], v->middle[1], v->last};
        int n = ktype_block_elems(v->type);
        for (int i = 0; i < 256; i++) block[i] = (uint8_t)(7 + 13 * i);
        if (v->d_at >= 0) block[v->d_at] = 0, block[v->d_at + 1] = 0x3C;
        set_scales(v->type, block);
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
