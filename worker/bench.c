/* worker/bench.c: the benchmark: its arguments, and what is measured in which order.
 *
 * Owns: the run.  Called by: worker/main.c (--bench), bench_main.c.
 * Fails how: see bench.h.  Limits: BENCH_LIST values per list.  Tested by: tests/tree/test_bench.py
 *
 * Making weights takes seconds and a large share of a device, so one run measures everything that
 * is wanted of one shape; lists of the command line say what that is.
 */
#include <stdlib.h>
#include <string.h>

#include "worker/bench.h"
#include "worker/graphs.h"
#include "worker/switches.h"

struct request {
    const char *shape, *csv, *switches;
    struct bench_list decode, context, prefill, ops, ops_prompt;
    int prompts, each; /* so many prompts of so many tokens at once; 0: none */
    int64_t device;
    bool graphs; /* make all that a worker makes before it is ready */
};

static int usage(const char *what) {
    fprintf(stderr,
            "bench: %s\n"
            "usage: --bench [--shape full:LAYERS|shard:N[:LAYERS]|tiny] [--device N]\n"
            "         [--csv FILE] [--graphs all|none] [--switch NAME=VALUE,…]\n"
            "         [--decode BATCH,…] [--context TOKENS,…]\n"
            "         [--prefill TOKENS,…] [--prompts N:TOKENS]\n"
            "         [--ops ROWS,…] [--ops-prefill TOKENS,…]\n"
            "The list \"none\" leaves that part out. Defaults: full:5, batches 1,2,4,8,16,32,64\n"
            "at context 512, prompts of 512 and 2048 tokens.\n",
            what);
    return 2;
}

/* Numbers from 1 to most, or "none". */
static bool parse_list(const char *s, int most, struct bench_list *out) {
    out->n = 0;
    if (!strcmp(s, "none")) return true;
    for (char *end;; s = end + 1) {
        long v = strtol(s, &end, 10);
        if (end == s || v < 1 || v > most || out->n == BENCH_LIST) return false;
        out->at[out->n++] = (int)v;
        if (!*end) return true;
        if (*end != ',') return false;
    }
}

static bool parse_prompts(const char *s, struct request *r) {
    r->prompts = r->each = 0;
    if (!strcmp(s, "none")) return true;
    return sscanf(s, "%d:%d", &r->prompts, &r->each) == 2 && r->prompts >= 1 &&
           r->prompts <= 1024 && r->each >= 1 && r->each <= BENCH_ROWS;
}

static bool parse_one(struct request *r, const char *name, const char *value) {
    if (!strcmp(name, "--shape")) return r->shape = value, true;
    if (!strcmp(name, "--csv")) return r->csv = value, true;
    if (!strcmp(name, "--graphs"))
        return r->graphs = !strcmp(value, "all"), r->graphs || !strcmp(value, "none");
    if (!strcmp(name, "--switch")) return r->switches = value, true;
    if (!strcmp(name, "--device")) return r->device = atoi(value), true;
    if (!strcmp(name, "--decode")) return parse_list(value, BENCH_SLOTS, &r->decode);
    if (!strcmp(name, "--context")) return parse_list(value, LIMIT_CONTEXT_TOKENS / 2, &r->context);
    if (!strcmp(name, "--prefill")) return parse_list(value, LIMIT_CONTEXT_TOKENS / 2, &r->prefill);
    if (!strcmp(name, "--prompts")) return parse_prompts(value, r);
    if (!strcmp(name, "--ops")) return parse_list(value, BENCH_SLOTS, &r->ops);
    if (!strcmp(name, "--ops-prefill")) return parse_list(value, BENCH_ROWS, &r->ops_prompt);
    return false;
}

/* ---- what all of it needs ------------------------------------------------------------------- */

static void need(struct bench_size *s, int rows, int slots, int positions) {
    s->max_rows = MAX(s->max_rows, MIN(rows, BENCH_ROWS));
    s->max_context = MAX(s->max_context, positions);
    s->pages = MAX(s->pages, bench_pages_of(slots, positions));
}

static struct bench_size size_of(const struct request *r) {
    struct bench_size s = {.max_rows = BENCH_SLOTS, .max_context = K_PAGE, .pages = BENCH_SLOTS};
    int context = r->context.n ? r->context.at[0] : 1;
    for (int i = 0; i < r->decode.n; i++)
        for (int c = 0; c < r->context.n; c++)
            need(&s, r->decode.at[i], r->decode.at[i], r->context.at[c] + BENCH_GROUP);
    for (int i = 0; i < r->prefill.n; i++) need(&s, r->prefill.at[i], 1, r->prefill.at[i]);
    for (int i = 0; i < r->ops.n; i++) need(&s, r->ops.at[i], r->ops.at[i], context + 1);
    for (int i = 0; i < r->ops_prompt.n; i++) need(&s, r->ops_prompt.at[i], 1, r->ops_prompt.at[i]);
    if (r->prompts)
        need(&s, MIN(r->prompts * r->each, BENCH_ROWS),
             bench_together(r->prompts, r->each, BENCH_ROWS), r->each);
    return s;
}

/* ---- the run --------------------------------------------------------------------------------- */

static void measure_ceilings(struct bench *b) {
    b->bytes_s = bench_read_bandwidth();
    b->flops_s = bench_matrix_rate();
}

static void tell_machine(struct bench *b) {
    struct kdevice_info info;
    b->m.k->info(b->m.ctx, &info);
    printf("%s\nread bandwidth %.0f GB/s, half-precision products %.0f TFLOP/s (0: not measured)\n"
           "%s: %d layers, collectives %s, %lld cache pages, device memory used %.1f GB\n",
           info.name, b->bytes_s / 1e9, b->flops_s / 1e12, b->shape, b->m.hp.n_layers,
           b->coll->ops->name, (long long)b->m.n_pages,
           (double)(info.total_bytes - info.free_bytes) / 1e9);
    if (!b->csv) return;
    fprintf(b->csv, "ceiling,\"read bandwidth\",%s,,,,,,,,,,,%.2f,1,,,,,,\n", b->shape,
            b->bytes_s / 1e9);
    fprintf(b->csv, "ceiling,\"half-precision products\",%s,,,,,,,,,,,,,%.2f,1,,,,\n", b->shape,
            b->flops_s / 1e12);
}

/* Those of all sizes and tiers, as before a rank is ready. */
static void make_graphs(struct bench *b) {
    struct graphs_report g;
    char what[128];
    if (graphs_capture(&b->m, b->coll, NULL, NULL, &g) != OK) exit(1);
    snprintf(what, sizeof what, "%d step graphs captured in %.2f s: %.1f MiB, %.1f MiB set aside",
             g.made, g.seconds, (double)g.bytes / (1 << 20), (double)b->m.graph_bytes / (1 << 20));
    bench_table_note(b, "graphs", BENCH_SLOTS, b->m.max_context, what);
}

static void run(struct bench *b, const struct request *r) {
    int context = r->context.n ? r->context.at[0] : 1;
    if (r->graphs) make_graphs(b);
    for (int i = 0; i < r->ops.n; i++) bench_ops(b, r->ops.at[i], context, false);
    for (int i = 0; i < r->ops_prompt.n; i++) bench_ops(b, r->ops_prompt.at[i], 0, true);
    if (r->decode.n && r->context.n) bench_table_head(b, "decode steps");
    for (int c = 0; c < r->context.n; c++)
        for (int i = 0; i < r->decode.n; i++) bench_decode(b, r->decode.at[i], r->context.at[c]);
    if (r->prefill.n || r->prompts) bench_table_head(b, "prompts");
    for (int i = 0; i < r->prefill.n; i++) bench_prompts(b, 1, r->prefill.at[i]);
    if (r->prompts) bench_prompts(b, r->prompts, r->each);
}

int bench_main(int argc, char **argv) {
    static struct bench b;
    struct request r = {.shape = "full:5",
                        .decode = {7, {1, 2, 4, 8, 16, 32, 64}},
                        .context = {1, {512}},
                        .prefill = {2, {512, 2048}}};
    char err[512] = "";
    struct err_text why = {0};
    for (int i = 0; i < argc; i += 2)
        if (i + 1 == argc || !parse_one(&r, argv[i], argv[i + 1])) return usage(argv[i]);
    b.m.k = kernels_table();
    if (switches_set(b.m.k, r.switches, &why) < 0) return usage(why.text);
    b.m.ctx = b.m.k->open((int)r.device, err, sizeof err);
    if (!b.m.ctx) return usage(err);
    if (!bench_table_open(&b, r.csv)) return 2;
    b.seed = 1;
    measure_ceilings(&b);
    const struct bench_size size = size_of(&r);
    if (!bench_make(&b, r.shape, &size)) return usage(r.shape);
    tell_machine(&b);
    run(&b, &r);
    bench_table_close(&b);
    return 0;
}
