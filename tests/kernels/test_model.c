/* tests/kernels/test_model.c: the whole forward pass of the demonstration model against golden
 * values, with ranks as threads of this process, and against itself: however a sequence is cut
 * into steps and whoever shares them, every logit has the same bits.
 */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "worker/dump.h"
#include "worker/step.h"

#define RANKS_MAX  8
#define SLOTS      8
#define ROWS       512
#define PAGES      128
#define CASES_MAX  16
#define GREEDY_MAX 256
#define PROMPT_MAX 512
#define LAYERS_MAX 8
#define TOLERANCE  2e-3

/* Sanitizers make the arithmetic up to a hundred times slower, and are after memory and races, not
 * after numbers: they get fewer cases and fewer tokens. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LIGHT 1
#else
#define LIGHT 0
#endif

/* ---- golden values ----------------------------------------------------------------------- */

struct golden {
    const char *name;
    int n, n_greedy, n_layers;
    int32_t ids[PROMPT_MAX], argmax[PROMPT_MAX];
    double argmax_logprob[PROMPT_MAX];
    int32_t top_ids[K_TOP_MAX];
    double top_logits[K_TOP_MAX];
    int32_t greedy[GREEDY_MAX];
    double greedy_logprob[GREEDY_MAX], margin[GREEDY_MAX];
    double head[LAYERS_MAX][8], norm[LAYERS_MAX];
};

static json_t *golden_json;
static struct golden golden[CASES_MAX];
static int n_golden;
static struct gguf *file;

static char *source_path(const char *name, char *to, size_t bytes) {
    const char *root = getenv("OCTAVO_SOURCE_ROOT");
    snprintf(to, bytes, "%s/%s", root ? root : ".", name);
    return to;
}

static int32_t int_at(json_t *array, size_t i) {
    return (int32_t)json_integer_value(json_array_get(array, i));
}
static double num_at(json_t *array, size_t i) {
    return json_number_value(json_array_get(array, i));
}

static void read_case(struct golden *g, json_t *c) {
    json_t *greedy = json_object_get(c, "greedy"), *layers = json_object_get(c, "layers");
    g->name = json_string_value(json_object_get(c, "name"));
    g->n = (int)json_array_size(json_object_get(c, "ids"));
    g->n_greedy = (int)json_array_size(greedy);
    g->n_layers = (int)json_array_size(layers);
    assert_true(g->n > 0 && g->n <= PROMPT_MAX && g->n_greedy <= GREEDY_MAX &&
                g->n_layers <= LAYERS_MAX);
    for (int i = 0; i < g->n; i++) {
        g->ids[i] = int_at(json_object_get(c, "ids"), (size_t)i);
        g->argmax[i] = int_at(json_object_get(c, "argmax"), (size_t)i);
        g->argmax_logprob[i] = num_at(json_object_get(c, "argmax_logprob"), (size_t)i);
    }
    for (int i = 0; i < K_TOP_MAX; i++) {
        g->top_ids[i] = int_at(json_object_get(c, "top_ids"), (size_t)i);
        g->top_logits[i] = num_at(json_object_get(c, "top_logits"), (size_t)i);
    }
    for (int i = 0; i < g->n_greedy; i++) {
        g->greedy[i] = int_at(json_array_get(greedy, (size_t)i), 0);
        g->greedy_logprob[i] = num_at(json_array_get(greedy, (size_t)i), 1);
        g->margin[i] = num_at(json_array_get(greedy, (size_t)i), 2);
    }
    for (int l = 0; l < g->n_layers; l++) {
        json_t *state = json_array_get(layers, (size_t)l);
        for (int i = 0; i < 8; i++)
            g->head[l][i] = num_at(json_object_get(state, "head"), (size_t)i);
        g->norm[l] = json_number_value(json_object_get(state, "norm"));
    }
}

static int read_files(void **state) {
    UNUSED(state);
    char path[512];
    json_error_t why;
    struct err_text err;
    golden_json = json_load_file(source_path("tests/golden/golden.json", path, sizeof path),
                                 JSON_ALLOW_NUL, &why);
    if (!golden_json) fail_msg("%s: expected golden values, found: %s", path, why.text);
    json_t *cases = json_object_get(golden_json, "cases");
    n_golden = (int)json_array_size(cases);
    assert_true(n_golden > 0 && n_golden <= CASES_MAX);
    for (int i = 0; i < n_golden; i++) read_case(&golden[i], json_array_get(cases, (size_t)i));
    if (gguf_open(&file, source_path("tests/models/tiny.gguf", path, sizeof path), &err) < 0)
        fail_msg("%s", err.text);
    return 0;
}

static int drop_files(void **state) {
    UNUSED(state);
    gguf_close(file);
    json_decref(golden_json);
    return 0;
}

static const struct golden *golden_named(const char *name) {
    for (int i = 0; i < n_golden; i++)
        if (strcmp(golden[i].name, name) == 0) return &golden[i];
    fail_msg("golden case: expected %s, found none", name);
    return NULL;
}

/* ---- ranks as threads -------------------------------------------------------------------- */

struct rank {
    int rank, world;
    struct model m;
    struct stepper *st;
    struct coll *coll;
    struct msg_step step;
    struct msg_tokens out;
    uint32_t generation[SLOTS];
    int n_pages[SLOTS];
    int next_page;
    struct dump dump;
    /* what the dump hook saw in the last step */
    float *logits; /* [S, world * W] in the order of token ids */
    int n_logits;
    double head[LAYERS_MAX][8], norm[LAYERS_MAX]; /* of the last row */
    uint64_t hash;                                /* over all sums and logits of all steps */
    uint64_t sums;                                /* how many of them */
    uint64_t seed;
    char failure[400];
    pthread_t thread;
    void (*body)(struct rank *);
};

struct group {
    int world, fd;
    struct rank *ranks[RANKS_MAX];
};

static void rank_fails(struct rank *r, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void rank_fails(struct rank *r, const char *fmt, ...) {
    if (r->failure[0]) return;
    int n = snprintf(r->failure, sizeof r->failure, "rank %d of %d: ", r->rank, r->world);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(r->failure + n, sizeof r->failure - (size_t)n, fmt, ap);
    va_end(ap);
}

static void hash_floats(struct rank *r, const float *x, size_t n) {
    const uint32_t *bits = (const uint32_t *)(const void *)x;
    for (size_t i = 0; i < n; i++) r->hash = (r->hash ^ bits[i]) * 1099511628211u;
    r->sums++;
}

static void keep_state(struct rank *r, int layer, const float *last, int width) {
    double sum = 0;
    for (int i = 0; i < 8; i++) r->head[layer][i] = (double)last[i];
    for (int i = 0; i < width; i++) sum += (double)last[i] * (double)last[i];
    r->norm[layer] = sqrt(sum);
}

/* [world, S, W] as gathered to [S, world * W]. */
static void keep_logits(struct rank *r, const float *x, int rows, int width) {
    int S = rows / r->world;
    for (int part = 0; part < r->world; part++)
        for (int s = 0; s < S; s++)
            memcpy(r->logits + ((size_t)s * (size_t)r->world + (size_t)part) * (size_t)width,
                   x + ((size_t)part * (size_t)S + (size_t)s) * (size_t)width,
                   (size_t)width * sizeof *x);
    r->n_logits = S;
}

static void see_tensor(void *user, const char *name, int layer, const float *x, int rows,
                       int width) {
    struct rank *r = user;
    const float *last = x + (size_t)(rows - 1) * (size_t)width;
    if (strcmp(name, "residual") == 0 && layer < r->m.hp.n_layers)
        keep_state(r, layer, last, width);
    else if (strcmp(name, "final") == 0)
        keep_state(r, layer, last, width);
    else if (strcmp(name, "logits") == 0)
        keep_logits(r, x, rows, width);
    if (strcmp(name, "attention") == 0 || strcmp(name, "ffn") == 0 || strcmp(name, "logits") == 0)
        hash_floats(r, x, (size_t)rows * (size_t)width);
}

static struct group *group_new(int world) {
    struct group *g = calloc(1, sizeof *g);
    const uint64_t bytes = coll_shm_bytes(world, ROWS * 256 * sizeof(float));
    char path[64];
    g->world = world;
    g->fd = memfd_create("group", MFD_CLOEXEC);
    assert_int_equal(ftruncate(g->fd, (off_t)bytes), 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", g->fd);
    for (int i = 0; i < world; i++) {
        struct rank *r = g->ranks[i] = calloc(1, sizeof *r);
        const struct model_options o = {.rank = i,
                                        .world = world,
                                        .max_slots = SLOTS,
                                        .max_rows = ROWS,
                                        .max_outs = LIMIT_STEP_SAMPLES,
                                        .context = 0};
        struct err_text err = {0};
        r->rank = i;
        r->world = world;
        r->dump = (struct dump){.tensor = see_tensor, .user = r};
        r->logits = malloc((size_t)LIMIT_STEP_SAMPLES * 4096 * sizeof *r->logits);
        if (model_load(&r->m, file, &o, (struct load_progress){0}, &err) < 0)
            fail_msg("%s", err.text);
        if (model_alloc_caches(&r->m, PAGES, &err) < 0) fail_msg("%s", err.text);
        assert_int_equal(stepper_new(&r->st, &r->m), OK);
        int rc = world == 1 ? coll_open_none(&r->coll)
                            : coll_open_shm(&r->coll, path, bytes, i, world, 1, &err);
        if (rc < 0) fail_msg("%s", err.text);
    }
    return g;
}

static void group_free(struct group *g) {
    for (int i = 0; i < g->world; i++) {
        struct rank *r = g->ranks[i];
        coll_close(r->coll);
        stepper_free(r->st);
        model_unload(&r->m);
        free(r->logits);
        free(r);
    }
    close(g->fd);
    free(g);
}

/* A rank that fails aborts the others, which would wait for it for ever. */
static void *rank_main(void *arg) {
    struct rank *r = arg;
    r->hash = 14695981039346656037u;
    r->sums = 0;
    r->failure[0] = 0;
    r->body(r);
    if (r->failure[0]) coll_abort(r->coll);
    return NULL;
}

static void group_run(struct group *g, void (*body)(struct rank *)) {
    for (int i = 0; i < g->world; i++) {
        g->ranks[i]->body = body;
        assert_int_equal(pthread_create(&g->ranks[i]->thread, NULL, rank_main, g->ranks[i]), 0);
    }
    for (int i = 0; i < g->world; i++) pthread_join(g->ranks[i]->thread, NULL);
    const char *failure = NULL;
    for (int i = 0; i < g->world; i++) {
        const char *f = g->ranks[i]->failure;
        if (f[0] && (!failure || strstr(failure, "found aborted"))) failure = f;
    }
    if (failure) fail_msg("%s", failure);
    for (int i = 1; i < g->world; i++) {
        if (g->ranks[i]->hash != g->ranks[0]->hash)
            fail_msg("rank %d of %d: expected the bits of rank 0 after every sum (hash %llx), "
                     "found %llx",
                     i, g->world, (unsigned long long)g->ranks[0]->hash,
                     (unsigned long long)g->ranks[i]->hash);
    }
}

/* ---- steps ------------------------------------------------------------------------------- */

static bool admit(struct rank *r, int slot, int n_prompt) {
    struct msg_admit *a = calloc(1, sizeof *a);
    struct err_text err = {0};
    a->slot = slot;
    a->slot_generation = ++r->generation[slot];
    a->n_prompt = n_prompt;
    a->sampling.top_p = a->sampling.repetition = 1;
    r->n_pages[slot] = 0;
    int rc = stepper_admit(r->st, a, &err);
    if (rc < 0) rank_fails(r, "admit: expected ok, found %s", err.text);
    free(a);
    return rc == OK;
}

static void step_begin(struct rank *r) {
    r->step.n_entries = r->step.n_tokens = r->step.n_pages = 0;
}

/* tokens NULL: the one sampled last. Pages are dealt out in an order that jumps about. */
static void step_add(struct rank *r, int slot, int pos, int count, int samples,
                     const int32_t *tokens) {
    struct msg_step *s = &r->step;
    struct msg_entry *e = &s->entries[s->n_entries++];
    *e = (struct msg_entry){.slot = slot,
                            .slot_generation = r->generation[slot],
                            .pos = pos,
                            .count = count,
                            .samples = samples,
                            .token_at = tokens ? s->n_tokens : -1,
                            .page_first = r->n_pages[slot],
                            .page_at = s->n_pages};
    for (int i = 0; tokens && i < count; i++) s->tokens[s->n_tokens++] = tokens[i];
    while (r->n_pages[slot] * K_PAGE < pos + count) {
        s->pages[s->n_pages++] = r->next_page++ * 37 % PAGES;
        r->n_pages[slot]++;
        e->n_pages++;
    }
}

static bool step_run(struct rank *r) {
    struct err_text err = {0};
    r->step.id++;
    r->step.generation = 1;
    int rc = stepper_run(r->st, r->coll, &r->step, &r->out, &r->dump, &err);
    if (rc < 0)
        rank_fails(r, "step %d: expected ok, found %s %s", (int)r->step.id, err_name(rc), err.text);
    return rc == OK;
}

static const float *logits_row(const struct rank *r, int row) {
    return r->logits + (size_t)row * 4096;
}

static double logprob_of(const struct rank *r, int row, int32_t token) {
    const float *l = logits_row(r, row);
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < r->m.hp.vocab_used; i++) max = fmax(max, (double)l[i]);
    for (int i = 0; i < r->m.hp.vocab_used; i++) sum += exp((double)l[i] - max);
    return (double)l[token] - max - log(sum);
}

static bool is_close(struct rank *r, const char *name, const char *what, int at, double want,
                     double found) {
    if (fabs(want - found) <= TOLERANCE) return true;
    rank_fails(r, "%s %s at %d: expected %.5f, found %.5f", name, what, at, want, found);
    return false;
}

/* ---- against golden values --------------------------------------------------------------- */

/* The sampled rows of the last step stand for positions pos… of the prompt. */
static void check_positions(struct rank *r, const struct golden *g, int pos, int n) {
    for (int i = 0; i < n && !r->failure[0]; i++) {
        const struct msg_token *t = &r->out.tokens[i];
        is_close(r, g->name, "log-probability", pos + i, g->argmax_logprob[pos + i],
                 logprob_of(r, i, g->argmax[pos + i]));
        is_close(r, g->name, "reported log-probability", pos + i, g->argmax_logprob[pos + i],
                 (double)t->logprob);
        double margin = logprob_of(r, i, t->token) - logprob_of(r, i, g->argmax[pos + i]);
        if (t->token != g->argmax[pos + i] && margin > 2 * TOLERANCE)
            rank_fails(r, "%s argmax at %d: expected %d, found %d, better by %.5f", g->name,
                       pos + i, g->argmax[pos + i], t->token, margin);
    }
}

static void check_last_position(struct rank *r, const struct golden *g, int row) {
    for (int i = 0; i < K_TOP_MAX; i++)
        is_close(r, g->name, "logit", g->top_ids[i], g->top_logits[i],
                 (double)logits_row(r, row)[g->top_ids[i]]);
    for (int l = 0; l < g->n_layers; l++) {
        for (int i = 0; i < 8; i++)
            is_close(r, g->name, "state after layer", l, g->head[l][i], r->head[l][i]);
        is_close(r, g->name, "norm after layer", l, g->norm[l], r->norm[l]);
    }
}

static void check_greedy(struct rank *r, const struct golden *g, int slot) {
    int n = LIGHT ? MIN(g->n_greedy, 3) : g->n_greedy;
    for (int i = 0; i < n && !r->failure[0]; i++) {
        if (i > 0) {
            step_begin(r);
            step_add(r, slot, g->n + i - 1, 1, 1, NULL);
            if (!step_run(r)) return;
        }
        const struct msg_token *t = &r->out.tokens[r->out.n - 1];
        if (t->token != g->greedy[i])
            rank_fails(r, "%s greedy token %d: expected %d (margin %.3f), found %d", g->name, i,
                       g->greedy[i], g->margin[i], t->token);
        is_close(r, g->name, "greedy log-probability", i, g->greedy_logprob[i], (double)t->logprob);
    }
}

static void golden_body(struct rank *r) {
    for (int i = 0; i < n_golden && !r->failure[0]; i++) {
        const struct golden *g = &golden[i];
        if (LIGHT && g->n > 20 && strcmp(g->name, "tool_call") != 0) continue;
        int n = MIN(g->n, LIMIT_STEP_SAMPLES), before = g->n - n;
        if (!admit(r, 0, g->n)) return;
        step_begin(r);
        step_add(r, 0, 0, g->n, n, g->ids);
        if (!step_run(r)) return;
        check_positions(r, g, before, n);
        check_last_position(r, g, n - 1);
        check_greedy(r, g, 0);
        if (before == 0) continue;
        if (!admit(r, 1, g->n)) return;
        step_begin(r);
        step_add(r, 1, 0, before, before, g->ids);
        if (step_run(r)) check_positions(r, g, 0, before);
    }
}

static void run_golden(int world) {
    struct group *g = group_new(world);
    group_run(g, golden_body);
    uint64_t first = g->ranks[0]->hash, sums = g->ranks[0]->sums;
    if (!LIGHT) group_run(g, golden_body); /* other pages, same bits */
    if (g->ranks[0]->hash != first || g->ranks[0]->sums != sums || sums == 0)
        fail_msg("second run: expected the bits of the first over %llu sums (hash %llx), found "
                 "%llu (hash %llx)",
                 (unsigned long long)sums, (unsigned long long)first,
                 (unsigned long long)g->ranks[0]->sums, (unsigned long long)g->ranks[0]->hash);
    group_free(g);
}

static void one_rank_gives_the_golden_values_twice(void **state) {
    UNUSED(state);
    run_golden(1);
}

static void two_ranks_give_the_golden_values_twice(void **state) {
    UNUSED(state);
    run_golden(2);
}

static void four_ranks_give_the_golden_values_twice(void **state) {
    UNUSED(state);
    run_golden(4);
}

static void eight_ranks_give_the_golden_values_twice(void **state) {
    UNUSED(state);
    run_golden(8);
}

/* ---- against itself ---------------------------------------------------------------------- */

static void check_bits(struct rank *r, const char *what, int at, const float *want,
                       const float *found) {
    for (int i = 0; i < 4096; i++)
        if (memcmp(&want[i], &found[i], sizeof *want) != 0) {
            rank_fails(r, "%s at %d, logit %d: expected %a, found %a (seed %llu)", what, at, i,
                       (double)want[i], (double)found[i], (unsigned long long)r->seed);
            return;
        }
}

/* Logits [n, 4096] of every position, from one prefill. */
static float *prefill_all(struct rank *r, const struct golden *g) {
    float *all = malloc((size_t)g->n * 4096 * sizeof *all);
    if (!admit(r, 0, g->n)) return all;
    step_begin(r);
    step_add(r, 0, 0, g->n, g->n, g->ids);
    if (step_run(r)) memcpy(all, r->logits, (size_t)g->n * 4096 * sizeof *all);
    return all;
}

static void split_body(struct rank *r) {
    const char *const names[] = {"capital", "tool_call"};
    for (size_t c = 0; c < (LIGHT ? 1 : ARRAY_LEN(names)); c++) {
        const struct golden *g = golden_named(names[c]);
        float *all = prefill_all(r, g);
        for (int split = 1; split < g->n && !r->failure[0]; split += g->n > 100 ? 19
                                                                     : LIGHT    ? 5
                                                                                : 1) {
            if (!admit(r, 1, g->n)) break;
            step_begin(r);
            step_add(r, 1, 0, split, 1, g->ids);
            if (!step_run(r)) break;
            check_bits(r, "last of the first part", split - 1, all + (size_t)(split - 1) * 4096,
                       logits_row(r, 0));
            step_begin(r);
            step_add(r, 1, split, g->n - split, 1, g->ids + split);
            if (!step_run(r)) break;
            check_bits(r, "last of the second part, cut", split, all + (size_t)(g->n - 1) * 4096,
                       logits_row(r, 0));
        }
        if (!r->failure[0] && admit(r, 2, g->n))
            for (int i = 0; i < g->n && !r->failure[0]; i++) {
                step_begin(r);
                step_add(r, 2, i, 1, 1, g->ids + i);
                if (step_run(r))
                    check_bits(r, "token by token", i, all + (size_t)i * 4096, logits_row(r, 0));
            }
        free(all);
    }
}

static void prefill_equals_decode_at_every_split(void **state) {
    UNUSED(state);
    for (int world = 1; world <= 2; world++) {
        struct group *g = group_new(world);
        group_run(g, split_body);
        group_free(g);
    }
}

static uint64_t next_random(uint64_t *x) {
    uint64_t z = *x += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Several sequences at once, each in chunks of random length and in random company; every sampled
 * row is compared with the prefill of its sequence alone. */
static void crowd_body(struct rank *r) {
    const char *const names[] = {"capital", "photosynthesis", "two_turns", "tool_call",
                                 "tool_result"};
    enum { N = LIGHT ? 3 : ARRAY_LEN(names) };
    const struct golden *g[N];
    float *all[N];
    int at[N] = {0};
    uint64_t random = r->seed = 5;
    for (int i = 0; i < N; i++) {
        g[i] = golden_named(names[i]);
        all[i] = prefill_all(r, g[i]);
    }
    for (int i = 0; i < N && !r->failure[0]; i++) admit(r, 1 + i, g[i]->n);
    for (bool any = true; any && !r->failure[0];) {
        int rows[N], n = 0, who[N];
        any = false;
        step_begin(r);
        for (int i = 0; i < N; i++) {
            int left = g[i]->n - at[i], chunk = (int)(next_random(&random) % 40),
                count = MIN(left, chunk);
            any |= left > 0;
            if (count == 0) continue;
            step_add(r, 1 + i, at[i], count, 1, g[i]->ids + at[i]);
            at[i] += count;
            who[n] = i;
            rows[n++] = at[i] - 1;
        }
        if (n == 0) continue;
        if (!step_run(r)) break;
        for (int i = 0; i < n; i++)
            check_bits(r, names[who[i]], rows[i], all[who[i]] + (size_t)rows[i] * 4096,
                       logits_row(r, i));
    }
    for (int i = 0; i < N; i++) free(all[i]);
}

static void company_in_a_step_changes_no_bit(void **state) {
    UNUSED(state);
    for (int world = 1; world <= 2; world++) {
        struct group *g = group_new(world);
        group_run(g, crowd_body);
        group_free(g);
    }
}

/* ---- dumps ------------------------------------------------------------------------------- */

static int dump_fd;

static void dump_body(struct rank *r) {
    const struct golden *g = golden_named("capital");
    struct dumper *d = NULL;
    struct err_text err = {0};
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", dump_fd);
    if (dumper_open(&d, &r->m, "final,ffn", path, &err) < 0) rank_fails(r, "%s", err.text);
    if (r->failure[0] || !admit(r, 0, g->n)) return;
    r->dump = *dumper_hook(d);
    step_begin(r);
    step_add(r, 0, 0, g->n, 1, g->ids);
    step_run(r);
    dumper_close(d);
}

static void a_dump_holds_the_named_tensors_and_no_others(void **state) {
    UNUSED(state);
    struct group *g = group_new(1);
    const struct golden *want = golden_named("capital");
    char name[16], kind[8], line_end;
    int layer, rows, width, n_ffn = 0;
    dump_fd = memfd_create("dump", MFD_CLOEXEC);
    group_run(g, dump_body);
    FILE *f = fdopen(dump_fd, "rb");
    rewind(f);
    float *x = malloc((size_t)want->n * 256 * sizeof *x);
    while (fscanf(f, "%15s %d %d %d %7s%c", name, &layer, &rows, &width, kind, &line_end) == 6) {
        assert_int_equal(rows, want->n);
        assert_int_equal(width, 256);
        assert_int_equal(fread(x, sizeof *x, (size_t)(rows * width), f), rows * width);
        if (strcmp(name, "ffn") == 0) assert_int_equal(layer, n_ffn++);
    }
    assert_string_equal(name, "final"); /* the last record */
    assert_int_equal(n_ffn, g->ranks[0]->m.hp.n_layers);
    for (int i = 0; i < 8; i++)
        assert_true(fabs((double)x[(want->n - 1) * 256 + i] - want->head[want->n_layers - 1][i]) <
                    TOLERANCE);
    free(x);
    fclose(f);
    group_free(g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_gives_the_golden_values_twice),
        cmocka_unit_test(two_ranks_give_the_golden_values_twice),
        cmocka_unit_test(four_ranks_give_the_golden_values_twice),
        cmocka_unit_test(eight_ranks_give_the_golden_values_twice),
        cmocka_unit_test(prefill_equals_decode_at_every_split),
        cmocka_unit_test(company_in_a_step_changes_no_bit),
        cmocka_unit_test(a_dump_holds_the_named_tensors_and_no_others),
    };
    return cmocka_run_group_tests(tests, read_files, drop_files);
}
