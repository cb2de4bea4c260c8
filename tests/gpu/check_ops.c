/* tests/gpu/check_ops.c: every slot of the CUDA table against the CPU's, on random data.
 *
 * Usage: check_ops [GROUP...]; no group: all of them. Prints one PASS or FAIL line per group with the
 * worst relative error, ends with 0 only if all passed. Needs a GPU, so it is no part of the
 * ordinary test run.
 *
 * Sizes are 1, primes, limits (8 rows for the narrow product, 64 for grouped experts, 128 for the
 * tensor-core product) and one past them. Tolerances: 1e-4 where activations keep sixteen bits (up to
 * 64 rows), 1e-3 where they are rounded to half precision, both far from what a wrong index gives.
 */
#include "tests/gpu/check.h"

#define FINE   1e-4
#define COARSE 1e-3

const struct kernels *kernels_cpu_table(void);
const struct kernels *kernels_cuda_table(void);
void check_chains(void); /* check_chain.c */

#define EACH_SIDE(s) for (int s = 0; s < SIDES; s++)
#define RUN(s, op, ...) side[s].k->op(side[s].c, __VA_ARGS__)

static bool dense(int type) { return type == KT_F32 || type == KT_F16 || type == KT_BF16; }

/* Others in a layer send its quantised experts the way of many rows. */
static bool tiled(int type) { return ktype_scalar(type) && !dense(type); }

/* ---- packing --------------------------------------------------------------------------------- */

static void check_pack(void) {
    static const int rows[] = {1, 16, 17, 131}, cols[] = {256, 768, 32, 96, 192};
    for (int i = 0; i < n_all_types; i++)
        for (int r = 0; r < 4; r++)
            for (int c = 0; c < 5; c++) {
                int type = all_types[i], elems = ktype_block_elems(type);
                if (cols[c] % elems) continue;
                size_t bytes = (size_t)(rows[r] * ktype_row_bytes(type, cols[c]));
                begin("pack %s [2, %d, %d]", ktype_name(type), rows[r], cols[c]);
                struct kmat_both m = mat_new(type, 2, rows[r], cols[c]);
                uint8_t *a = malloc(bytes), *b = malloc(bytes);
                for (int at = 0; at < 2; at++) {
                    memset(b, 0xA5, bytes);
                    side[0].k->mat_unpack(side[0].c, &m.m[0], at, a);
                    side[1].k->mat_unpack(side[1].c, &m.m[1], at, b);
                    size_t k = 0;
                    while (k < bytes && a[k] == b[k]) k++;
                    passed(1);
                    if (k < bytes)
                        fail("byte %zu of %zu: expected %02x, found %02x", k, bytes, a[k], b[k]);
                }
                free(a);
                free(b);
            }
    report("mat_pack, mat_unpack");
}

/* ---- products -------------------------------------------------------------------------------- */

static void one_matmul(int type, int rows, int cols, int T) {
    begin("matmul %s [%d, %d] x %d rows", ktype_name(type), rows, cols, T);
    struct kmat_both w = mat_new(type, 1, rows, cols);
    int64_t xs = cols + 4, ys = rows + 3;
    struct both x = both_floats(T * xs, 1), y = both_new((size_t)(T * ys) * 4);
    EACH_SIDE(s)
    RUN(s, matmul, &(struct kop_matmul){&w.m[s], x.p[s], y.p[s], xs, ys, T}, 1);
    float *a = host_floats(&y, 0), *b = host_floats(&y, 1);
    double norm = 0, diff = 0;
    for (int t = 0; t < T; t++)
        for (int r = 0; r < rows; r++) {
            double d = (double)a[t * ys + r] - (double)b[t * ys + r];
            norm += (double)a[t * ys + r] * (double)a[t * ys + r];
            diff += d == d ? d * d : 1e30;
        }
    free(a);
    free(b);
    double error = sqrt(diff / (norm + 1e-30));
    /* of one or two numbers alone a sum may have cancelled */
    double most = rows * T > 2 && (dense(type) || T <= 64) ? FINE : COARSE;
    struct both e = both_new(4);
    float v[2] = {1, (float)(1 + error)};
    side[0].k->put(side[0].c, e.p[0], &v[0], 4);
    side[1].k->put(side[1].c, e.p[1], &v[1], 4);
    compare("y", &e, 1, most);
}

static void check_matmul(void) {
    static const int T[] = {1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 64, 65, 129, 200};
    for (int i = 0; i < n_all_types; i++) {
        for (int t = 0; t < 14; t++) {
            one_matmul(all_types[i], 67, 512, T[t]);
            both_free_all();
        }
        one_matmul(all_types[i], 1, 256, 1);
        one_matmul(all_types[i], 16, 256, 130);
        one_matmul(all_types[i], 300, 2304, 3);
        one_matmul(all_types[i], 300, 2304, 8);
        one_matmul(all_types[i], 300, 2304, 31);
        if (ktype_block_elems(all_types[i]) <= 32) {
            one_matmul(all_types[i], 40, 192, 1);
            one_matmul(all_types[i], 40, 96, 6);
            one_matmul(all_types[i], 40, 96, 17);
            one_matmul(all_types[i], 33, 32, 2);
            one_matmul(all_types[i], 33, 32, 33);
        }
        both_free_all();
    }
    report("matmul, all types");
}

/* A width of which other ranks have everything: the product is zero. */
static void check_empty(int T) {
    begin("matmul without columns, %d rows", T);
    struct kmat w = {KT_Q4_K, 1, 40, 0, NULL, 0, 0, NULL};
    struct both x = both_floats(T, 1), y = both_new((size_t)T * 40 * 4);
    EACH_SIDE(s)
    RUN(s, matmul, &(struct kop_matmul){&w, x.p[s], y.p[s], 0, 40, T}, 1);
    compare("y", &y, T * 40, 0);
    both_free_all();
}

/* NVFP4 weights may have factors beside them: one, or one a matrix. */
static void add_scales(struct kmat_both *w, int n) {
    struct both factors = both_floats(n, 4);
    EACH_SIDE(s) {
        w->m[s].scales = n;
        w->m[s].scale = factors.p[s];
    }
}

static void check_scaled(int T) {
    begin("matmul with a factor, %d rows", T);
    struct kmat_both w = mat_new(KT_NVFP4, 1, 70, 256);
    struct both x = both_floats(T * 256, 1), y = both_new((size_t)T * 70 * 4);
    add_scales(&w, 1);
    EACH_SIDE(s)
    RUN(s, matmul, &(struct kop_matmul){&w.m[s], x.p[s], y.p[s], 256, 70, T}, 1);
    compare("y", &y, T * 70, FINE);
    both_free_all();
}

static void check_jobs(void) {
    check_scaled(1);
    check_scaled(70);
    check_empty(1);
    check_empty(70);
    static const int T[] = {1, 4, 8, 9, 70};
    for (int t = 0; t < 5; t++) {
        begin("matmul, jobs of several types, %d rows", T[t]);
        struct kmat_both w[4] = {mat_new(KT_F32, 1, 37, 512), mat_new(KT_Q8_0, 1, 200, 512),
                                 mat_new(KT_Q4_K, 1, 90, 512), mat_new(KT_Q6_K, 1, 5, 512)};
        struct both x = both_floats(T[t] * 512, 1), y[4];
        for (int j = 0; j < 4; j++) y[j] = both_new((size_t)(T[t] * w[j].m[0].rows) * 4);
        EACH_SIDE(s) {
            struct kop_matmul jobs[4];
            for (int j = 0; j < 4; j++)
                jobs[j] = (struct kop_matmul){&w[j].m[s], x.p[s], y[j].p[s],
                                              512,        w[j].m[s].rows, T[t]};
            RUN(s, matmul, jobs, 4);
        }
        for (int j = 0; j < 4; j++)
            compare("y", &y[j], T[t] * w[j].m[0].rows, j == 0 || T[t] <= 64 ? FINE : COARSE);
    }
    report("matmul, jobs");
}

static void check_head_matmul(void) {
    static const int types[] = {KT_Q8_0, KT_Q5_0, KT_Q4_1, KT_IQ4_NL, KT_F32, KT_BF16};
    static const int T[] = {1, 3, 8, 9, 65, 130};
    for (int i = 0; i < 6; i++)
        for (int t = 0; t < 6; t++) {
            int H = 5, rows = 130, cols = 192;
            begin("head_matmul %s [%d, %d, %d] x %d rows", ktype_name(types[i]), H, rows, cols,
                  T[t]);
            struct kmat_both w = mat_new(types[i], H, rows, cols);
            int64_t xr = H * 256, yr = H * rows;
            struct both x = both_floats(T[t] * xr, 1), y = both_new((size_t)(T[t] * yr) * 4);
            EACH_SIDE(s)
            RUN(s, head_matmul,
                &(struct kop_head_matmul){&w.m[s], x.p[s], y.p[s], xr, 256, yr, rows, T[t]});
            compare("y", &y, T[t] * yr, dense(types[i]) || T[t] <= 64 ? FINE : COARSE);
            both_free_all();
        }
    report("head_matmul");
}

/* ---- rows ------------------------------------------------------------------------------------ */

struct rows {
    struct kbatch b[SIDES];
    struct kseqs q[SIDES];
    int32_t *pos, *slot, *pages;
    struct both last_token, seen_prompt, seen_output, sampling, token;
};

static struct rows rows_new(int T, int S, int slots, int max_pages, int vocab,
                            const int32_t *pos, const int32_t *slot, const int32_t *token,
                            const int32_t *out_row) {
    struct rows r = {0};
    int n_pages = slots * max_pages;
    int32_t *pages = malloc((size_t)n_pages * 4), most = 0;
    for (int i = 0; i < n_pages; i++) pages[i] = i;
    for (int i = n_pages - 1; i > 0; i--) { /* pages lie anywhere */
        int k = random_below(i + 1), v = pages[i];
        pages[i] = pages[k];
        pages[k] = v;
    }
    int32_t *last = malloc((size_t)slots * 4);
    for (int i = 0; i < slots; i++) last[i] = random_below(vocab);
    struct ksampling *p = calloc((size_t)slots, sizeof *p);
    for (int i = 0; i < slots; i++) p[i].n_prompt = 3, p[i].repetition = 1;
    struct both table = both_ints(n_pages, pages), posb = both_ints(T, pos);
    struct both slotb = both_ints(T, slot), outb = both_ints(S, out_row);
    r.token = both_ints(T, token);
    r.last_token = both_ints(slots, last);
    uint16_t *zero = calloc((size_t)slots * (size_t)vocab, 2);
    r.seen_prompt = both_bytes(zero, (size_t)slots * (size_t)vocab * 2);
    r.seen_output = both_bytes(zero, (size_t)slots * (size_t)vocab * 2);
    r.sampling = both_bytes(p, (size_t)slots * sizeof *p);
    for (int t = 0; t < T; t++) most = pos[t] + 1 > most ? pos[t] + 1 : most;
    EACH_SIDE(s) {
        r.b[s] = (struct kbatch){T, S, most, r.token.p[s], posb.p[s], slotb.p[s], outb.p[s]};
        r.q[s] = (struct kseqs){slots, max_pages, vocab, table.p[s], r.last_token.p[s],
                                r.seen_prompt.p[s], r.seen_output.p[s], r.sampling.p[s]};
    }
    free(zero);
    free(p);
    free(last);
    free(pages);
    return r;
}

static void check_rows(void) {
    static const int widths[] = {256, 6144, 131}, Ts[] = {1, 7, 33};
    for (int w = 0; w < 3; w++)
        for (int t = 0; t < 3; t++)
            for (int add = 0; add < 2; add++) {
                int T = Ts[t], W = widths[w];
                begin("norm [%d, %d]%s", T, W, add ? " with add" : "");
                struct both h = both_floats(T * W, 2), a = both_floats(T * W, 2);
                struct both gain = both_floats(W, 1), y = both_new((size_t)(T * W) * 4);
                EACH_SIDE(s)
                RUN(s, norm, &(struct kop_norm){T, W, h.p[s], add ? a.p[s] : NULL, gain.p[s],
                                                1e-5f, y.p[s]});
                compare("y", &y, T * W, 1e-6);
                compare("h", &h, T * W, 0);
                begin("swiglu [%d, %d]", T, W);
                EACH_SIDE(s) RUN(s, swiglu, &(struct kop_swiglu){T, W, h.p[s], a.p[s], y.p[s]});
                compare("act", &y, T * W, 1e-6);
            }
    report("norm, swiglu");
    for (int i = 0; i < n_all_types; i++) {
        int32_t pos[5] = {0, 1, 2, 9, 4}, slot[5] = {0, 1, -1, 1, 0}, out[3] = {4, -1, 0};
        int32_t token[5] = {7, K_TOKEN_LAST, 3, 66, 1000};
        begin("feed, embed %s, angles, gather", ktype_name(all_types[i]));
        struct rows r = rows_new(5, 3, 2, 2, 67, pos, slot, token, out);
        struct kmat_both table = mat_new(all_types[i], 1, 67, 512);
        struct both h = both_new(5 * 512 * 4), y = both_new(3 * 512 * 4);
        struct both angles = both_new(5 * 64 * 4);
        double f[32];
        for (int k = 0; k < 32; k++) f[k] = pow(1e6, -k / 32.0);
        struct both freq = both_bytes(f, sizeof f);
        EACH_SIDE(s) {
            RUN(s, feed, &(struct kop_feed){&r.b[s], &r.q[s]});
            RUN(s, embed, &(struct kop_embed){&r.b[s], &table.m[s], h.p[s]});
            RUN(s, angles, &(struct kop_angles){&r.b[s], freq.p[s], angles.p[s], 32});
            RUN(s, gather, &(struct kop_gather){&r.b[s], 512, h.p[s], y.p[s]});
        }
        compare_rows("h", &h, 5, 512, slot, 0);
        compare("gathered", &y, 3 * 512, 0);
        compare_rows("angles", &angles, 5, 64, slot, 1e-7);
        compare_ints("token", &r.token, 5);
        compare_ints("seen in prompt", &r.seen_prompt, 67);
        compare_ints("seen in output", &r.seen_output, 67);
    }
    report("feed, embed, angles, gather");
}

/* ---- attention ------------------------------------------------------------------------------- */

struct attention {
    struct kdims d;
    int context;
    bool half_split;
};

/* Fills the caches of two slots through attn_prep, in one step of many rows, then looks at the
 * cache through select and attend for T rows. */
static void one_attention(const struct attention *a, int T, bool selected) {
    struct kdims d = a->d;
    int R = d.r_kv, P = d.d_rope, J = d.ix_dim, N = d.d_nope, H = d.n_heads, I = d.ix_heads;
    int n = a->context, rows = 2 * n, max_pages = (n + 63) / 64, K = d.ix_topk;
    int most = rows > T ? rows : T;
    int32_t *pos = malloc((size_t)most * 4), *slot = malloc((size_t)most * 4);
    for (int i = 0; i < rows; i++) pos[i] = i / 2, slot[i] = i % 2;
    begin("attention: %d heads, %d+%d, context %d, %d rows, %s", H, R, P, n, T,
          selected ? "selected" : "dense");
    struct rows fill = rows_new(rows, 1, 2, max_pages, 16, pos, slot, pos, pos);
    double f[64];
    for (int k = 0; k < P / 2; k++) f[k] = pow(1e4, -2.0 * k / P);
    struct both freq = both_bytes(f, sizeof f), angles = both_new((size_t)(most * P) * 4);
    struct both q_a = both_floats(rows * (int64_t)d.r_q, 1), kv = both_floats(rows * (R + P), 2);
    struct both ik = both_floats(rows * J, 1), gq = both_floats(d.r_q, 1), gk = both_floats(R, 1);
    struct both gi = both_floats(J, 1), bi = both_floats(J, 1);
    struct kcache cache[SIDES];
    EACH_SIDE(s) {
        size_t cells = (size_t)(2 * max_pages * K_PAGE);
        cache[s].latent = side[s].k->alloc(side[s].c, cells * side[s].k->latent_bytes(&d));
        cache[s].index = side[s].k->alloc(side[s].c, cells * side[s].k->index_bytes(&d));
        side[s].k->zero(side[s].c, cache[s].latent, cells * side[s].k->latent_bytes(&d));
        side[s].k->zero(side[s].c, cache[s].index, cells * side[s].k->index_bytes(&d));
        RUN(s, angles, &(struct kop_angles){&fill.b[s], freq.p[s], angles.p[s], P / 2});
        RUN(s, attn_prep,
            &(struct kop_attn_prep){&fill.b[s], &fill.q[s], &d, &cache[s], angles.p[s], q_a.p[s],
                                    gq.p[s], kv.p[s], gk.p[s], ik.p[s], gi.p[s], bi.p[s]});
    }
    compare("q_a", &q_a, rows * (int64_t)d.r_q, 1e-6);

    for (int t = 0; t < T; t++) {
        pos[t] = t == 0 ? n - 1 : random_below(n);
        slot[t] = t == 1 ? -1 : t / 3 % 2; /* neighbours share a sequence, or not */
    }
    struct rows r = fill;
    struct both posb = both_ints(T, pos), slotb = both_ints(T, slot);
    struct both q = both_floats((int64_t)T * H * (N + P), 1);
    struct both qk = both_floats((int64_t)T * H * (R + P), 1);
    struct both iq = both_floats((int64_t)T * I * J, 1), w = both_floats((int64_t)T * I, 1);
    struct both sel = both_new((size_t)(T * K) * 4), n_sel = both_new((size_t)T * 4);
    struct both out = both_new((size_t)T * (size_t)(H * R) * 4);
    struct kbounds bounds = {T, T, n, 16};
    EACH_SIDE(s) {
        size_t bytes = side[s].k->scratch_bytes(&d, &bounds);
        dptr scratch = side[s].k->alloc(side[s].c, bytes);
        r.b[s].n_rows = T, r.b[s].pos = posb.p[s], r.b[s].slot = slotb.p[s];
        r.b[s].max_context = n;
        RUN(s, angles, &(struct kop_angles){&r.b[s], freq.p[s], angles.p[s], P / 2});
        RUN(s, rope, &(struct kop_rope){&r.b[s], &d, angles.p[s], q.p[s], qk.p[s], iq.p[s]});
        if (selected) {
            RUN(s, select, &(struct kop_select){&r.b[s], &r.q[s], &d, &cache[s], iq.p[s], w.p[s],
                                                sel.p[s], n_sel.p[s], scratch});
            if (s == 1) { /* the reference's choice goes on, so that attend is compared alone */
                int32_t *h = host_ints(&sel, 0), *mine = host_ints(&sel, 1);
                int32_t *counts = host_ints(&n_sel, 0);
                compare_ints("n_selected", &n_sel, T);
                int differ = 0, all = 0;
                for (int t = 0; t < T; t++) {
                    if (slot[t] < 0) continue;
                    int i = 0, k = 0;
                    for (; i < counts[t] && k < counts[t];) {
                        if (h[t * K + i] == mine[t * K + k]) i++, k++;
                        else if (h[t * K + i] < mine[t * K + k]) i++, differ++;
                        else k++, differ++;
                        if (k > 0 && k < counts[t] && mine[t * K + k] <= mine[t * K + k - 1]) {
                            fail("select: row %d: positions not ascending at %d", t, k);
                            break;
                        }
                    }
                    all += counts[t];
                }
                passed(1);
                if (differ * 50 > all + 100) fail("select: %d of %d positions differ", differ, all);
                side[1].k->put(side[1].c, sel.p[1], h, sel.bytes);
                side[1].k->sync(side[1].c);
                free(h);
                free(mine);
                free(counts);
            }
        }
        RUN(s, attend, &(struct kop_attend){&r.b[s], &r.q[s], &d, &cache[s], qk.p[s],
                                            selected ? sel.p[s] : NULL, n_sel.p[s], out.p[s],
                                            scratch});
        side[s].k->sync(side[s].c);
        side[s].k->free(side[s].c, scratch);
        side[s].k->free(side[s].c, cache[s].latent);
        side[s].k->free(side[s].c, cache[s].index);
    }
    compare_rows("qk", &qk, T, H * (R + P), slot, 1e-6);
    compare_rows("iq", &iq, T, I * J, slot, 1e-6);
    compare_rows("out", &out, T, H * R, slot, 2e-3);
    free(pos);
    free(slot);
    both_free_all();
}

static void check_attention(void) {
    struct kdims d = {.d_model = 64, .n_heads = 8, .d_nope = 192, .d_rope = 64, .d_v = 256,
                      .r_q = 96, .r_kv = 512, .ix_heads = 4, .ix_dim = 128, .ix_topk = 64,
                      .ix_rope_interleaved = true, .rms_eps = 1e-5f, .ix_eps = 1e-6f,
                      .attn_scale = 0.0625f};
    static const int contexts[] = {1, 31, 64, 65, 333, 1100};
    for (int c = 0; c < 6; c++)
        for (int sel = 0; sel < 2; sel++) {
            struct attention a = {d, contexts[c], false};
            one_attention(&a, 1, sel);
            one_attention(&a, 7, sel);
            a.d.n_heads = 64;
            a.d.ix_heads = 32;
            one_attention(&a, 3, sel);
        }
    struct attention many = {d, 300, false};
    many.d.n_heads = 64;
    one_attention(&many, 140, true);  /* 64 heads per block */
    one_attention(&many, 140, false);
    many.d.n_heads = 32;
    one_attention(&many, 140, true);  /* 32 heads per block */
    many.d.n_heads = 3;
    many.d.ix_rope_interleaved = false;
    one_attention(&many, 300, true);
    many.d.ix_topk = 256;
    many.d.n_heads = 16;
    one_attention(&many, 5, true);
    struct attention odd = {d, 200, false};
    odd.d.r_kv = 96, odd.d.d_rope = 32, odd.d.ix_dim = 64, odd.d.ix_heads = 5;
    one_attention(&odd, 5, true); /* no shape of the fast kernels */
    report("attn_prep, rope, select, attend");
}

/* ---- experts --------------------------------------------------------------------------------- */

struct moe {
    int E, U, D, F, Fs, gate, up, down, shared, gating, groups;
    bool bias;
    int first, count; /* experts of this rank; count 0: all */
};

static void one_experts(const struct moe *m, int T) {
    struct kdims d = {.d_model = m->D, .n_experts = m->E, .n_used = m->U, .gating = m->gating,
                      .n_groups = m->groups, .n_groups_used = m->groups > 1 ? m->groups / 2 : 1,
                      .norm_weights = m->gating == 2, .weights_scale = 2.5f, .n_heads = 1,
                      .r_kv = 512, .d_rope = 64};
    begin("experts E %d U %d D %d F %d %s %s %s, %d rows", m->E, m->U, m->D, m->F,
          ktype_name(m->gate), ktype_name(m->up), ktype_name(m->down), T);
    int32_t *pos = calloc((size_t)T, 4), *slot = calloc((size_t)T, 4);
    for (int t = 0; t < T; t++) slot[t] = T > 2 && t % 5 == 2 ? -1 : 0;
    struct rows r = rows_new(T, 1, 1, 1, 16, pos, slot, pos, pos);
    int held = m->count ? m->count : m->E;
    struct kmat_both gate = mat_new(m->gate, held, m->F, m->D), up = mat_new(m->up, held, m->F, m->D);
    struct kmat_both down = mat_new(m->down, held, m->D, m->F), shared;
    if (m->down == KT_NVFP4) add_scales(&down, held);
    if (m->Fs) shared = mat_new(m->shared, 1, m->D, m->Fs);
    struct both logits = both_floats((int64_t)T * m->E, 4), bias = both_floats(m->E, 1);
    struct both x = both_floats((int64_t)T * m->D, 1), sact = both_floats((int64_t)T * m->Fs + 1, 1);
    struct both ids = both_new((size_t)(T * m->U) * 4), weights = both_new((size_t)(T * m->U) * 4);
    struct both act = both_new((size_t)T * (size_t)(m->U * m->F) * 4);
    struct both y = both_new((size_t)T * (size_t)m->D * 4);
    struct kbounds bounds = {T, 1, 64, 16};
    EACH_SIDE(s) {
        dptr scratch = side[s].k->alloc(side[s].c, side[s].k->scratch_bytes(&d, &bounds));
        RUN(s, experts_up,
            &(struct kop_experts_up){&r.b[s], &d, logits.p[s], m->bias ? bias.p[s] : NULL,
                                     &gate.m[s], &up.m[s], x.p[s], ids.p[s], weights.p[s],
                                     act.p[s], scratch, m->first});
        RUN(s, experts_down,
            &(struct kop_experts_down){&r.b[s], &d, ids.p[s], weights.p[s], &down.m[s], act.p[s],
                                       m->Fs ? &shared.m[s] : NULL, sact.p[s], y.p[s], scratch,
                                       m->first});
        side[s].k->sync(side[s].c);
        side[s].k->free(side[s].c, scratch);
    }
    int32_t *skip = malloc((size_t)(T * m->U) * 4);
    int32_t *chosen = host_ints(&ids, 0);
    for (int i = 0; i < T * m->U; i++) {
        bool ours = chosen[i] >= m->first && chosen[i] < m->first + held;
        skip[i] = ours ? slot[i / m->U] : -1;
    }
    free(chosen);
    compare_ints("ids", &ids, T * m->U);
    compare("weights", &weights, T * m->U, 1e-6);
    bool fine = T <= 64 && tiled(m->gate) && tiled(m->up) && tiled(m->down);
    double most = fine ? 2 * FINE : COARSE;
    compare_rows("act", &act, T * m->U, m->F, skip, most);
    compare_rows("y", &y, T, m->D, slot, most);
    free(skip);
    free(pos);
    free(slot);
    both_free_all();
}

static void check_experts(void) {
    static const int T[] = {1, 2, 5, 16, 63, 64, 65, 130, 300};
    struct moe m = {16, 4, 256, 64, 64, KT_Q4_K, KT_Q4_K, KT_Q5_0, KT_Q8_0, 2, 1, true, 0, 0};
    for (int t = 0; t < 9; t++) one_experts(&m, T[t]);
    struct moe wide = {64, 8, 512, 256, 256, KT_Q4_K, KT_Q4_K, KT_Q5_K, KT_Q8_0, 2, 1, true, 0, 0};
    for (int t = 0; t < 9; t++) one_experts(&wide, T[t]);
    struct moe grouped = {32, 6, 256, 96, 0, KT_Q6_K, KT_Q3_K, KT_IQ4_NL, KT_Q8_0, 1, 8, false, 0, 0};
    for (int t = 0; t < 9; t++) one_experts(&grouped, T[t]);
    struct moe plain = {8, 2, 256, 96, 96, KT_BF16, KT_F32, KT_F16, KT_F32, 2, 1, true, 0, 0};
    for (int t = 0; t < 9; t++) one_experts(&plain, T[t]);
    struct moe mixed = {8, 2, 256, 256, 96, KT_Q8_0, KT_F32, KT_Q2_K, KT_Q4_0, 2, 1, true, 0, 0};
    for (int t = 0; t < 9; t++) one_experts(&mixed, T[t]);
    /* more rows than one tile takes */
    struct moe crowded = {4, 2, 256, 256, 96, KT_Q6_K, KT_Q6_K, KT_Q8_0, KT_Q8_0, 2, 1, false, 0, 0};
    one_experts(&crowded, 300);
    one_experts(&crowded, 700);
    /* types without tiles, alone and beside others; experts dealt out */
    struct moe books = {16, 4, 256, 256, 256, KT_IQ2_XXS, KT_IQ2_XXS, KT_IQ3_S, KT_IQ1_M, 2, 1, true, 0, 0};
    for (int t = 0; t < 9; t++) one_experts(&books, T[t]);
    struct moe beside = {16, 4, 256, 512, 0, KT_MXFP4, KT_Q4_K, KT_NVFP4, KT_Q8_0, 2, 1, true, 0, 0};
    for (int t = 0; t < 9; t++) one_experts(&beside, T[t]);
    struct moe dealt = {16, 4, 256, 256, 0, KT_Q4_K, KT_Q4_K, KT_Q6_K, KT_Q8_0, 2, 1, true, 5, 3};
    for (int t = 0; t < 9; t++) one_experts(&dealt, T[t]);
    struct moe both = {16, 4, 256, 256, 0, KT_IQ1_S, KT_F32, KT_IQ2_S, KT_Q8_0, 2, 1, true, 12, 4};
    for (int t = 0; t < 9; t++) one_experts(&both, T[t]);
    report("experts_up, experts_down");
}

/* ---- sampling -------------------------------------------------------------------------------- */

static void one_sample(int vocab, int parts, int S, int kind) {
    int part_cols = (vocab + 40) / parts + 1, T = S;
    begin("sample: vocabulary %d in %d parts, %d rows, kind %d", vocab, parts, S, kind);
    int32_t *pos = malloc((size_t)T * 4), *slot = malloc((size_t)T * 4), *out = malloc((size_t)S * 4);
    for (int t = 0; t < T; t++) pos[t] = 10 + t, slot[t] = t, out[t] = S > 3 && t == 2 ? -1 : t;
    struct rows r = rows_new(T, S, T, 1, vocab + 5, pos, slot, pos, out);
    struct ksampling *p = calloc((size_t)T, sizeof *p);
    for (int t = 0; t < T; t++) {
        p[t] = (struct ksampling){.temperature = 1, .top_p = 1, .repetition = 1, .n_prompt = 3,
                                  .seed = random_next()};
        if (kind == 0) p[t].temperature = 0, p[t].top_logprobs = 20;
        if (kind == 1) p[t].top_p = 0.9f, p[t].top_logprobs = 5;
        if (kind == 2) p[t].top_k = 50, p[t].temperature = 0.7f;
        if (kind == 3) p[t].min_p = 0.05f, p[t].repetition = 1.3f, p[t].presence = 0.5f;
        if (kind == 4) p[t].temperature = 20, p[t].top_p = 0.99f; /* flat: the long way */
        if (kind == 5) p[t].temperature = 20, p[t].top_k = 3000, p[t].min_p = 0.6f;
        if (kind == 6) p[t].temperature = 20; /* a draw from everything */
        if (kind >= 2) {
            p[t].n_bias = 3;
            for (int i = 0; i < 3; i++)
                p[t].bias_token[i] = random_below(vocab), p[t].bias_value[i] = 5;
        }
    }
    struct both sampling = both_bytes(p, (size_t)T * sizeof *p);
    uint16_t *seen = calloc((size_t)T * (size_t)(vocab + 5), 2);
    for (int i = 0; i < 50 * T; i++) seen[random_below(T * (vocab + 5))] = (uint16_t)random_below(4);
    struct both output = both_bytes(seen, (size_t)T * (size_t)(vocab + 5) * 2);
    struct both logits = both_floats((int64_t)parts * S * part_cols, 12);
    struct both token = both_new((size_t)S * 4), logprob = both_new((size_t)S * 4);
    struct both top = both_new((size_t)(S * K_TOP_MAX) * 4);
    struct both top_logprob = both_new((size_t)(S * K_TOP_MAX) * 4);
    struct kdims d = {.n_heads = 1, .r_kv = 512, .d_rope = 64};
    struct kbounds bounds = {T, S, 64, vocab};
    EACH_SIDE(s) {
        dptr scratch = side[s].k->alloc(side[s].c, side[s].k->scratch_bytes(&d, &bounds));
        r.q[s].sampling = sampling.p[s];
        r.q[s].seen_output = output.p[s];
        RUN(s, sample,
            &(struct kop_sample){&r.b[s], &r.q[s], logits.p[s], parts, part_cols, vocab,
                                 token.p[s], logprob.p[s], top.p[s], top_logprob.p[s], scratch});
        side[s].k->sync(side[s].c);
        side[s].k->free(side[s].c, scratch);
    }
    compare_ints("token", &token, S);
    compare_ints("last token", &r.last_token, T);
    compare("logprob", &logprob, S, 1e-5);
    compare_ints("top tokens", &top, S * K_TOP_MAX);
    compare("top logprobs", &top_logprob, S * K_TOP_MAX, 1e-5);
    free(pos);
    free(slot);
    free(out);
    free(p);
    free(seen);
    both_free_all();
}

static void check_sample(void) {
    for (int kind = 0; kind < 7; kind++) {
        one_sample(11, 1, 3, kind);
        one_sample(1024, 2, 9, kind);
        one_sample(4053, 8, 33, kind);
        one_sample(154820, 2, 3, kind);
    }
    report("sample");
}

/* ---- the model's true shapes ------------------------------------------------------------------ */

static void check_true(void) {
    static const int T[] = {1, 4, 8, 130};
    for (int t = 0; t < 4; t++) {
        one_matmul(KT_Q8_0, 2048, 6144, T[t]);
        one_matmul(KT_F32, 256, 6144, T[t]);
        one_matmul(KT_Q6_K, 1000, 6144, T[t]);
        both_free_all();
        one_matmul(KT_Q8_0, 1024, 16384, T[t]);
        both_free_all();
    }
    struct moe m = {16, 8, 6144, 2048, 2048, KT_Q4_K, KT_Q4_K, KT_Q5_K, KT_Q8_0, 2, 1, true, 0, 0};
    one_experts(&m, 1);
    one_experts(&m, 6);
    one_experts(&m, 70);
    struct moe shard = {64, 8, 6144, 256, 256, KT_Q4_K, KT_Q4_K, KT_Q5_K, KT_Q8_0, 2, 1, true, 0, 0};
    one_experts(&shard, 1);
    one_experts(&shard, 33);
    report("true shapes");
}

/* ---- main ------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*run)(void);
} groups[] = {
    {"pack", check_pack},       {"rows", check_rows},     {"matmul", check_matmul},
    {"jobs", check_jobs},       {"heads", check_head_matmul}, {"attention", check_attention},
    {"experts", check_experts}, {"sample", check_sample}, {"true", check_true},
    {"chain", check_chains},
};

int main(int argc, char **argv) {
    char err[512] = "";
    side[0].k = kernels_cpu_table();
    side[1].k = kernels_cuda_table();
    EACH_SIDE(s) {
        side[s].c = side[s].k->open(0, err, sizeof err);
        if (!side[s].c) {
            fprintf(stderr, "check_ops: %s\n", err);
            return 2;
        }
        struct kdevice_info info;
        side[s].k->info(side[s].c, &info);
        printf("%s: %s\n", s ? "device" : "reference", info.name);
    }
    for (size_t g = 0; g < sizeof groups / sizeof groups[0]; g++) {
        bool wanted = argc == 1;
        for (int i = 1; i < argc; i++) wanted = wanted || strcmp(argv[i], groups[g].name) == 0;
        if (wanted) groups[g].run();
    }
    printf("%s %d checks, %d failed\n", checks_failed ? "FAIL" : "PASS", checks_done,
           checks_failed);
    EACH_SIDE(s) side[s].k->close(side[s].c);
    return checks_failed != 0;
}
