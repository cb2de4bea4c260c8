/* tests/kernels/test_matmul.c: products of matrices: every type, instruction set, odd size and tile
 * border, bit by bit against decoding the row and taking dot.h's plain dot product.
 */
#include "tests/kernels/check.h"

static const int types[] = {KT_F32,     KT_F16,    KT_BF16,   KT_Q4_0,    KT_Q4_1,   KT_Q5_0,
                            KT_Q5_1,    KT_Q8_0,   KT_Q2_K,   KT_Q3_K,    KT_Q4_K,   KT_Q5_K,
                            KT_Q6_K,    KT_IQ4_NL, KT_IQ4_XS, KT_IQ2_XXS, KT_IQ2_XS, KT_IQ2_S,
                            KT_IQ3_XXS, KT_IQ3_S,  KT_IQ1_S,  KT_IQ1_M,   KT_MXFP4,  KT_NVFP4};
#define N_TYPES ((int)(sizeof types / sizeof types[0]))

static struct kmat random_mat(struct rng *rng, int type, int64_t count, int64_t rows,
                              int64_t cols) {
    const struct kernels *k = kernels_table();
    struct kctx *ctx[3];
    check_contexts(ctx);
    struct kmat m = {
        type, count, rows, cols, k->alloc(ctx[0], k->mat_bytes(type, count, rows, cols)),
        0,    0,     NULL};
    uint8_t *file = check_alloc((size_t)(rows * ktype_row_bytes(type, cols)));
    assert_non_null(m.data);
    for (int64_t at = 0; at < count; at++) {
        check_random_weights(rng, type, file, rows * cols);
        k->mat_pack(ctx[0], &m, at, file);
    }
    free(file);
    return m;
}

/* y[j][r] for tightly packed x, straight from the definition. */
static void product_plain(const struct kmat *m, int64_t at, const float *x, float *y, int n) {
    int64_t row_bytes = ktype_row_bytes(m->type, m->cols);
    float *w = check_alloc((size_t)m->cols * sizeof *w);
    for (int64_t r = 0; r < m->rows; r++) {
        kdequant_row(m->type, (uint8_t *)m->data + (at * m->rows + r) * row_bytes, w, m->cols);
        for (int j = 0; j < n; j++) y[j * m->rows + r] = dot_plain(w, x + j * m->cols, m->cols);
    }
    free(w);
}

static void check_size(struct rng *rng, int type, int64_t rows, int64_t cols, int n) {
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct kmat m = random_mat(rng, type, 1, rows, cols);
    float *x = check_alloc((size_t)(n * cols) * 4), *expected = check_alloc((size_t)(n * rows) * 4);
    float *y = check_alloc((size_t)(n * rows) * 4);
    char what[96];
    rng_fill(rng, x, n * cols);
    product_plain(&m, 0, x, expected, n);
    for (int i = 0; i < n_ctx; i++) {
        snprintf(what, sizeof what, "%s %s %lldx%lld, %d rows", ctx[i]->isa->name, ktype_name(type),
                 (long long)rows, (long long)cols, n);
        memset(y, 0xFF, (size_t)(n * rows) * 4);
        cpu_matmul(ctx[i], &(struct kop_matmul){&m, x, y, cols, rows, n}, 1);
        check_same(what, expected, y, n * rows);
        for (int j = 0; j < n; j += 7) { /* alone, as in the company of others */
            cpu_matmul(ctx[i], &(struct kop_matmul){&m, x + j * cols, y, cols, rows, 1}, 1);
            check_same(what, expected + j * rows, y, rows);
        }
    }
    kernels_table()->free(ctx[0], m.data);
    free(x);
    free(expected);
    free(y);
}

static void products_of_every_type_are_the_plain_dot_products_bit_by_bit(void **state) {
    (void)state;
    struct rng rng = rng_new(2);
    for (int k = 0; k < N_TYPES; k++) {
        int64_t unit = ktype_block_elems(types[k]);
        int64_t cols = unit == 1 ? 301 : unit == 32 ? 32 * 19 : 512;
        check_size(&rng, types[k], 7, cols, 5);
        check_size(&rng, types[k], 4, unit == 1 ? 16 : unit, 67);
        check_size(&rng, types[k], 1, 3 * unit, 1);
    }
}

static void sizes_that_fit_no_tile_work(void **state) {
    (void)state;
    static const int odd[] = {1, 2, 3, 5, 15, 16, 17, 31, 33, 127, 257};
    struct rng rng = rng_new(3);
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        check_size(&rng, KT_F32, 1 + rng_below(&rng, 9), odd[i], 1 + rng_below(&rng, 9));
        check_size(&rng, KT_F16, 1 + rng_below(&rng, 9), odd[i], 1 + rng_below(&rng, 9));
    }
    check_size(&rng, KT_Q8_0, 6, 64, 129);
    check_size(&rng, KT_F32, 3, 576, 64);
}

static void jobs_of_one_launch_are_independent_and_keep_to_their_strides(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(4);
    enum { T = 3, COLS = 96, STRIDE = 101, ROWS = 5, OUT = 9 };
    struct kmat a = random_mat(&rng, KT_Q4_0, 1, ROWS, COLS),
                b = random_mat(&rng, KT_F32, 1, ROWS, COLS);
    float x[T * STRIDE], y[2][T * OUT], tight[T * COLS], expected[2][T * ROWS];
    rng_fill(&rng, x, T * STRIDE);
    for (int t = 0; t < T; t++) memcpy(tight + t * COLS, x + t * STRIDE, COLS * sizeof *x);
    product_plain(&a, 0, tight, expected[0], T);
    product_plain(&b, 0, tight, expected[1], T);
    for (int i = 0; i < n_ctx; i++) {
        struct kop_matmul jobs[2] = {{&a, x, y[0], STRIDE, OUT, T}, {&b, x, y[1], STRIDE, OUT, T}};
        for (int k = 0; k < 2 * T * OUT; k++) y[k / (T * OUT)][k % (T * OUT)] = 77;
        cpu_matmul(ctx[i], jobs, 2);
        for (int k = 0; k < 2; k++)
            for (int t = 0; t < T; t++) {
                check_same("job", expected[k] + t * ROWS, y[k] + t * OUT, ROWS);
                for (int r = ROWS; r < OUT; r++) assert_true(y[k][t * OUT + r] == 77);
            }
    }
    kernels_table()->free(ctx[0], a.data);
    kernels_table()->free(ctx[0], b.data);
}

static void heads_multiply_their_own_part_of_a_row(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(5);
    enum { T = 66, H = 3, COLS = 64, ROWS = 13, PAD = 7 };
    struct kmat m = random_mat(&rng, KT_Q8_0, H, ROWS, COLS);
    int64_t x_head = COLS + PAD, x_row = H * x_head, y_head = ROWS + PAD, y_row = H * y_head;
    float *x = check_alloc((size_t)(T * x_row) * 4), *y = check_alloc((size_t)(T * y_row) * 4);
    float *tight = check_alloc(T * COLS * 4), *expected = check_alloc(T * ROWS * 4);
    rng_fill(&rng, x, T * x_row);
    for (int i = 0; i < n_ctx; i++) {
        cpu_head_matmul(ctx[i],
                        &(struct kop_head_matmul){&m, x, y, x_row, x_head, y_row, y_head, T});
        for (int h = 0; h < H; h++) {
            for (int t = 0; t < T; t++)
                memcpy(tight + t * COLS, x + t * x_row + h * x_head, COLS * sizeof *x);
            product_plain(&m, h, tight, expected, T);
            for (int t = 0; t < T; t++)
                check_same("head", expected + t * ROWS, y + t * y_row + h * y_head, ROWS);
        }
    }
    kernels_table()->free(ctx[0], m.data);
    free(x), free(y), free(tight), free(expected);
}

static void the_order_of_rows_changes_no_bit(void **state) {
    (void)state;
    struct kctx *ctx[3];
    int n_ctx = check_contexts(ctx);
    struct rng rng = rng_new(6);
    enum { T = 70, COLS = 256, ROWS = 9 };
    struct kmat m = random_mat(&rng, KT_Q5_K, 1, ROWS, COLS);
    float *x = check_alloc(T * COLS * 4), *moved = check_alloc(T * COLS * 4);
    float *y = check_alloc(T * ROWS * 4), *z = check_alloc(T * ROWS * 4);
    rng_fill(&rng, x, T * COLS);
    for (int t = 0; t < T; t++) memcpy(moved + t * 29 % T * COLS, x + t * COLS, COLS * sizeof *x);
    for (int i = 0; i < n_ctx; i++) {
        cpu_matmul(ctx[i], &(struct kop_matmul){&m, x, y, COLS, ROWS, T}, 1);
        cpu_matmul(ctx[i], &(struct kop_matmul){&m, moved, z, COLS, ROWS, T}, 1);
        for (int t = 0; t < T; t++)
            check_same("moved row", y + t * ROWS, z + t * 29 % T * ROWS, ROWS);
    }
    kernels_table()->free(ctx[0], m.data);
    free(x), free(moved), free(y), free(z);
}

static void a_dot_product_is_as_exact_as_float32_allows(void **state) {
    (void)state;
    struct rng rng = rng_new(7);
    float a[2048], b[2048];
    rng_fill(&rng, a, 2048);
    rng_fill(&rng, b, 2048);
    for (int n = 0; n <= 2048; n += 173) {
        double exact = 0, size = 0;
        for (int i = 0; i < n; i++) {
            exact += (double)a[i] * (double)b[i];
            size += fabs((double)a[i] * (double)b[i]);
        }
        check_near("dot", exact, (double)dot_plain(a, b, n), size * 0x1p-20);
    }
}

static void packing_can_be_undone(void **state) {
    (void)state;
    const struct kernels *k = kernels_table();
    struct kctx *ctx[3];
    check_contexts(ctx);
    struct rng rng = rng_new(8);
    enum { ROWS = 3, COLS = 256 };
    for (int t = 0; t < N_TYPES; t++) {
        size_t bytes = (size_t)(ROWS * ktype_row_bytes(types[t], COLS));
        struct kmat m = random_mat(&rng, types[t], 2, ROWS, COLS);
        uint8_t *in = check_alloc(bytes), *out = check_alloc(bytes);
        for (size_t i = 0; i < bytes; i++) in[i] = (uint8_t)rng_next(&rng);
        assert_int_equal(k->mat_bytes(types[t], 2, ROWS, COLS), 2 * bytes);
        k->mat_pack(ctx[0], &m, 1, in);
        k->mat_unpack(ctx[0], &m, 1, out);
        assert_memory_equal(in, out, bytes);
        k->free(ctx[0], m.data);
        free(in), free(out);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_of_every_type_are_the_plain_dot_products_bit_by_bit),
        cmocka_unit_test(sizes_that_fit_no_tile_work),
        cmocka_unit_test(jobs_of_one_launch_are_independent_and_keep_to_their_strides),
        cmocka_unit_test(heads_multiply_their_own_part_of_a_row),
        cmocka_unit_test(the_order_of_rows_changes_no_bit),
        cmocka_unit_test(a_dot_product_is_as_exact_as_float32_allows),
        cmocka_unit_test(packing_can_be_undone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
