/* tests/gpu/check_chain.c: operations in a row, as a layer runs them, the CUDA table against the
 * CPU's.
 *
 * Owns: nothing.  Called by: check_ops (group "chain").  Tested by: being run on a GPU.
 *
 * With one row of x the CUDA backend puts small operations off and does them inside the next one,
 * so results are compared at the end of a chain only; and once more with the host looking after
 * every operation, which makes each run by itself.
 */
#include "tests/gpu/check.h"

void check_chains(void);

#define EACH_SIDE(s) for (int s = 0; s < SIDES; s++)
#define RUN(s, op, ...)                                                                            \
    do {                                                                                           \
        side[s].k->op(side[s].c, __VA_ARGS__);                                                     \
        if (look) side[s].k->sync(side[s].c);                                                      \
    } while (0)

enum {
    D = 768,
    H = 8,
    N = 192,
    P = 64,
    R = 512,
    V = 256,
    Q = 512,
    J = 128,
    I = 4,
    PAGES = 8,
    EXPERTS = 64,
    USED = 8
};

static struct kdims dims_new(int heads) {
    return (struct kdims){.d_model = D,
                          .n_heads = heads,
                          .d_nope = N,
                          .d_rope = P,
                          .d_v = V,
                          .r_q = Q,
                          .r_kv = R,
                          .ix_heads = I,
                          .ix_dim = J,
                          .ix_topk = 2048,
                          .ix_rope_interleaved = true,
                          .rms_eps = 1e-5f,
                          .ix_eps = 1e-6f,
                          .attn_scale = 0.0625f,
                          .n_experts = EXPERTS,
                          .n_used = USED,
                          .n_groups = 1,
                          .n_groups_used = 1,
                          .gating = 2,
                          .norm_weights = true,
                          .weights_scale = 2.5f};
}

struct chain {
    struct kbatch b[SIDES];
    struct kseqs q[SIDES];
    struct both angles, freq;
    int32_t slot[64];
};

/* Positions at .. at + T - 1 of one slot; with gap, the last of more than two is a padding row. */
static struct chain chain_new(int T, int at, bool gap) {
    struct chain c = {0};
    int32_t pos[PAGES * K_PAGE], slot[PAGES * K_PAGE], pages[PAGES] = {3, 1, 0, 6, 7, 2, 5, 4};
    double f[P / 2];
    for (int t = 0; t < T; t++) {
        pos[t] = at + t;
        slot[t] = gap && T > 2 && t == T - 1 ? -1 : 0;
        if (gap) c.slot[t] = slot[t];
    }
    for (int k = 0; k < P / 2; k++) f[k] = pow(1e4, -2.0 * k / P);
    struct both table = both_ints(PAGES, pages), posb = both_ints(T, pos);
    struct both slotb = both_ints(T, slot);
    c.freq = both_bytes(f, sizeof f), c.angles = both_new((size_t)(T * P) * 4);
    EACH_SIDE(s) {
        c.b[s] = (struct kbatch){T, 0, at + T, posb.p[s], posb.p[s], slotb.p[s], NULL};
        c.q[s] = (struct kseqs){1, PAGES, 16, table.p[s], NULL, NULL, NULL, NULL};
    }
    return c;
}

static void fill_cache(const struct kdims *d, struct kcache *cache, int n) {
    bool look = false;
    struct chain c = chain_new(n, 0, false);
    struct both kv = both_floats((int64_t)n * (R + P), 2), ik = both_floats((int64_t)n * J, 1);
    struct both gain = both_floats(R, 1);
    EACH_SIDE(s) {
        size_t cells = (size_t)(PAGES * K_PAGE);
        cache[s].latent = side[s].k->alloc(side[s].c, cells * side[s].k->latent_bytes(d));
        cache[s].index = side[s].k->alloc(side[s].c, cells * side[s].k->index_bytes(d));
        RUN(s, angles, &(struct kop_angles){&c.b[s], c.freq.p[s], c.angles.p[s], P / 2});
        RUN(s, attn_prep,
            &(struct kop_attn_prep){&c.b[s], &c.q[s], d, &cache[s], c.angles.p[s], NULL, NULL,
                                    kv.p[s], gain.p[s], ik.p[s], gain.p[s], gain.p[s]});
    }
}

static void attention(int T, int heads, int at, int type, bool look) {
    struct kdims d = dims_new(heads);
    struct kcache cache[SIDES];
    begin("attention, %d rows at %d, %d heads, %s%s", T, at, heads, ktype_name(type),
          look ? ", looked at" : "");
    fill_cache(&d, cache, at);
    struct chain c = chain_new(T, at, true);
    const int64_t HV = heads * V;
    struct kmat_both q_a = mat_new(type, 1, Q, D), kv_a = mat_new(type, 1, R + P, D);
    struct kmat_both ikw = mat_new(KT_Q8_0, 1, J, D), iw = mat_new(KT_F32, 1, I, D);
    struct kmat_both q_b = mat_new(type, 1, heads * (N + P), Q), o = mat_new(type, 1, D, HV);
    struct kmat_both k_b = mat_new(KT_Q8_0, heads, R, N), v_b = mat_new(type, heads, V, R);
    /* small gains: scores of a hundred would make of a last bit of a query another attention */
    struct both h = both_floats((int64_t)T * D, 1), gain = both_floats(4096, 0.1f);
    struct both x = both_new((size_t)(T * D) * 4), qa = both_new((size_t)(T * Q) * 4);
    struct both kv = both_new((size_t)(T * (R + P)) * 4), ik = both_new((size_t)(T * J) * 4);
    struct both w = both_new((size_t)(T * I) * 4), q = both_new((size_t)(T * heads * (N + P)) * 4);
    struct both qk = both_new((size_t)(T * heads * (R + P)) * 4);
    struct both ol = both_new((size_t)(T * heads * R) * 4),
                ov = both_new((size_t)T * (size_t)HV * 4);
    struct both y = both_new((size_t)(T * D) * 4);
    struct kbounds bounds = {T, 1, at + T, 16};
    EACH_SIDE(s) {
        dptr scratch = side[s].k->alloc(side[s].c, side[s].k->scratch_bytes(&d, &bounds));
        RUN(s, angles, &(struct kop_angles){&c.b[s], c.freq.p[s], c.angles.p[s], P / 2});
        RUN(s, norm, &(struct kop_norm){T, D, h.p[s], NULL, gain.p[s], 1e-5f, x.p[s]});
        struct kop_matmul down[] = {{&q_a.m[s], x.p[s], qa.p[s], D, Q, T},
                                    {&kv_a.m[s], x.p[s], kv.p[s], D, R + P, T},
                                    {&ikw.m[s], x.p[s], ik.p[s], D, J, T},
                                    {&iw.m[s], x.p[s], w.p[s], D, I, T}};
        RUN(s, matmul, down, 4);
        RUN(s, attn_prep,
            &(struct kop_attn_prep){&c.b[s], &c.q[s], &d, &cache[s], c.angles.p[s], qa.p[s],
                                    gain.p[s], kv.p[s], gain.p[s], ik.p[s], gain.p[s], gain.p[s]});
        RUN(s, matmul, &(struct kop_matmul){&q_b.m[s], qa.p[s], q.p[s], Q, heads * (N + P), T}, 1);
        RUN(s, head_matmul,
            &(struct kop_head_matmul){&k_b.m[s], q.p[s], qk.p[s], heads * (N + P), N + P,
                                      heads * (R + P), R + P, T});
        RUN(s, rope, &(struct kop_rope){&c.b[s], &d, c.angles.p[s], q.p[s], qk.p[s], NULL});
        RUN(s, attend,
            &(struct kop_attend){&c.b[s], &c.q[s], &d, &cache[s], qk.p[s], NULL, NULL, ol.p[s],
                                 scratch});
        RUN(s, head_matmul,
            &(struct kop_head_matmul){&v_b.m[s], ol.p[s], ov.p[s], heads * R, R, HV, V, T});
        RUN(s, matmul, &(struct kop_matmul){&o.m[s], ov.p[s], y.p[s], HV, D, T}, 1);
        side[s].k->sync(side[s].c);
        side[s].k->free(side[s].c, scratch);
    }
    compare_rows("x", &x, T, D, c.slot, 1e-6);
    compare_rows("w", &w, T, I, c.slot, 1e-4);
    compare_rows("y", &y, T, D, c.slot, 5e-3);
    EACH_SIDE(s) {
        side[s].k->free(side[s].c, cache[s].latent);
        side[s].k->free(side[s].c, cache[s].index);
    }
    both_free_all();
}

struct widths {
    int F, Fs, gate, down, shared;
};

static void experts(int T, const struct widths *m, bool look) {
    struct kdims d = dims_new(H);
    begin("experts, %d rows, widths %d and %d, %s %s %s%s", T, m->F, m->Fs, ktype_name(m->gate),
          ktype_name(m->down), ktype_name(m->shared), look ? ", looked at" : "");
    struct chain c = chain_new(T, 3, true);
    const int F = m->F, Fs = m->Fs;
    struct kmat_both gate = mat_new(m->shared, 1, Fs, D), up = mat_new(m->shared, 1, Fs, D);
    struct kmat_both router = mat_new(KT_F32, 1, EXPERTS, D), down = mat_new(m->shared, 1, D, Fs);
    struct kmat_both ge = mat_new(m->gate, EXPERTS, F, D), ue = mat_new(m->gate, EXPERTS, F, D);
    struct kmat_both de = mat_new(m->down, EXPERTS, D, F);
    struct both h = both_floats((int64_t)T * D, 1), add = both_floats((int64_t)T * D, 1);
    struct both gain = both_floats(D, 1), bias = both_floats(EXPERTS, 1);
    struct both x = both_new((size_t)(T * D) * 4), y = both_new((size_t)(T * D) * 4);
    struct both g = both_new((size_t)(T * Fs) * 4), u = both_new((size_t)(T * Fs) * 4);
    struct both logits = both_new((size_t)(T * EXPERTS) * 4);
    struct both ids = both_new((size_t)(T * USED) * 4), weights = both_new((size_t)(T * USED) * 4);
    struct both act = both_new((size_t)(T * USED * F) * 4), dense = both_new((size_t)(T * D) * 4);
    struct kbounds bounds = {T, 1, 64, 16};
    EACH_SIDE(s) {
        dptr scratch = side[s].k->alloc(side[s].c, side[s].k->scratch_bytes(&d, &bounds));
        RUN(s, norm, &(struct kop_norm){T, D, h.p[s], add.p[s], gain.p[s], 1e-5f, x.p[s]});
        struct kop_matmul in[] = {{&gate.m[s], x.p[s], g.p[s], D, Fs, T},
                                  {&up.m[s], x.p[s], u.p[s], D, Fs, T},
                                  {&router.m[s], x.p[s], logits.p[s], D, EXPERTS, T}};
        RUN(s, matmul, in, 3);
        RUN(s, swiglu, &(struct kop_swiglu){T, Fs, g.p[s], u.p[s], g.p[s]});
        RUN(s, experts_up,
            &(struct kop_experts_up){&c.b[s], &d, logits.p[s], bias.p[s], &ge.m[s], &ue.m[s],
                                     x.p[s], ids.p[s], weights.p[s], act.p[s], scratch, 0});
        RUN(s, experts_down,
            &(struct kop_experts_down){&c.b[s], &d, ids.p[s], weights.p[s], &de.m[s], act.p[s],
                                       &down.m[s], g.p[s], y.p[s], scratch, 0});
        RUN(s, matmul, in, 2); /* once more, as a dense layer */
        RUN(s, swiglu, &(struct kop_swiglu){T, Fs, g.p[s], u.p[s], g.p[s]});
        RUN(s, matmul, &(struct kop_matmul){&down.m[s], g.p[s], dense.p[s], Fs, D, T}, 1);
        side[s].k->sync(side[s].c);
        side[s].k->free(side[s].c, scratch);
    }
    compare_ints("ids", &ids, T * USED);
    compare_rows("y", &y, T, D, c.slot, 2e-4);
    compare_rows("dense", &dense, T, D, c.slot, 2e-4);
    both_free_all();
}

void check_chains(void) {
    static const int T[] = {1, 2, 3, 7, 19};
    static const struct widths shapes[] = {
        {256, 256, KT_Q4_K, KT_Q5_K, KT_Q8_0},
        {2048, 2048, KT_Q4_K, KT_Q5_K, KT_Q8_0},
        {96, 160, KT_Q6_K, KT_Q4_1, KT_Q5_0},
        {512, 256, KT_IQ4_XS, KT_Q3_K, KT_Q6_K},
    };
    for (int i = 0; i < 5; i++)
        for (int look = 0; look < 2; look++) {
            attention(T[i], 8, 300, KT_Q8_0, look);
            attention(T[i], 5, 33, KT_Q4_K, look);
            attention(T[i], 64, 70, KT_Q5_K, look);
            for (int k = 0; k < 4; k++) experts(T[i], &shapes[k], look);
        }
    report("chains");
}
