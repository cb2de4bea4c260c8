/* tests/gpu/check_model.c: the demonstration model on whatever backend this program is linked with.
 *
 * check_model MODEL GOLDEN LOGITS: runs every golden prompt, and all of them joined to one long one,
 * in three ways (whole, eight rows at a time, one at a time); compares best tokens and greedy
 * answers with the golden values; writes the logits of the whole run to LOGITS.
 * check_model --compare A B: mean and largest Kullback-Leibler divergence between two such files.
 *
 * Linked twice, with the CPU and with the CUDA backend; run both on the machine with the GPU.
 */
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "worker/step.h"
#include "worker/switches.h"

#define CASES_MAX 32
#define PROMPT_MAX  1500
#define TOLERANCE 0.02 /* best tokens may differ where the golden margin in logits is below */

struct prompt {
    const char *name;
    int n, n_greedy;
    int32_t ids[PROMPT_MAX], argmax[PROMPT_MAX], greedy[128];
    double logprob[PROMPT_MAX], margin[128];
};

static struct prompt prompts[CASES_MAX + 1];
static int n_prompts;
static struct model m;
static struct stepper *st;
static struct coll *coll;
static struct msg_step step;
static struct msg_tokens out;
static uint32_t generation;
static int next_page;
static double worst_logprob;
static int64_t differ, excused, seen;

static void die(const char *what, const char *why) {
    fprintf(stderr, "check_model: %s: %s\n", what, why);
    exit(2);
}

static void read_golden(const char *path) {
    json_error_t why;
    json_t *all = json_load_file(path, JSON_ALLOW_NUL, &why), *cases;
    if (!all) die(path, why.text);
    cases = json_object_get(all, "cases");
    struct prompt *joined = &prompts[CASES_MAX];
    joined->name = "joined";
    for (size_t i = 0; i < json_array_size(cases) && n_prompts < CASES_MAX; i++) {
        json_t *c = json_array_get(cases, i), *ids = json_object_get(c, "ids");
        json_t *greedy = json_object_get(c, "greedy");
        struct prompt *p = &prompts[n_prompts++];
        p->name = json_string_value(json_object_get(c, "name"));
        p->n = (int)json_array_size(ids);
        p->n_greedy = (int)json_array_size(greedy) < 128 ? (int)json_array_size(greedy) : 128;
        if (p->n > PROMPT_MAX) die(p->name, "longer than expected");
        for (int k = 0; k < p->n; k++) {
            size_t at = (size_t)k;
            p->ids[k] = (int32_t)json_integer_value(json_array_get(ids, at));
            p->argmax[k] =
                (int32_t)json_integer_value(json_array_get(json_object_get(c, "argmax"), at));
            p->logprob[k] =
                json_number_value(json_array_get(json_object_get(c, "argmax_logprob"), at));
        }
        for (int k = 0; k < p->n_greedy; k++) {
            json_t *g = json_array_get(greedy, (size_t)k);
            p->greedy[k] = (int32_t)json_integer_value(json_array_get(g, 0));
            p->margin[k] = json_number_value(json_array_get(g, 2));
        }
    }
    while (joined->n < PROMPT_MAX)
        for (int i = 0; i < n_prompts; i++)
            for (int k = 0; k < prompts[i].n && joined->n < PROMPT_MAX; k++)
                joined->ids[joined->n++] = prompts[i].ids[k];
}

static void admit(int n_prompt) {
    static struct msg_admit a;
    struct err_text err = {0};
    memset(&a, 0, sizeof a);
    a.slot_generation = ++generation;
    a.n_prompt = n_prompt;
    a.sampling.top_p = a.sampling.repetition = 1;
    next_page = 0;
    if (stepper_admit(st, &a, &err) < 0) die("admit", err.text);
}

/* count tokens from pos on, sampled after each of them; tokens NULL: the one sampled last. */
static void feed(int pos, int count, const int32_t *tokens) {
    struct err_text err = {0};
    step.n_entries = 1;
    step.n_tokens = step.n_pages = 0;
    step.id++;
    step.generation = 1;
    struct msg_entry *e = &step.entries[0];
    *e = (struct msg_entry){.slot_generation = generation, .pos = pos, .count = count,
                            .samples = count, .token_at = tokens ? 0 : -1,
                            .page_first = next_page};
    for (int i = 0; tokens && i < count; i++) step.tokens[step.n_tokens++] = tokens[i];
    while (next_page * K_PAGE < pos + count) {
        step.pages[step.n_pages++] = next_page++;
        e->n_pages++;
    }
    if (stepper_run(st, coll, &step, &out, NULL, &err) < 0) die("step", err.text);
}

static double log_sum(const float *l, int n) {
    double most = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) most = fmax(most, (double)l[i]);
    for (int i = 0; i < n; i++) sum += exp((double)l[i] - most);
    return most + log(sum);
}

/* Feeds a prompt `chunk` tokens at a time; logits of all positions to `keep` if given. */
static void run_prompt(const struct prompt *p, int chunk, FILE *keep) {
    int W = (int)m.output.rows, used = (int)m.hp.vocab_used;
    float *l = malloc((size_t)chunk * (size_t)W * sizeof *l);
    admit(p->n);
    for (int pos = 0; pos < p->n; pos += chunk) {
        int n = p->n - pos < chunk ? p->n - pos : chunk;
        feed(pos, n, p->ids + pos);
        m.k->get(m.ctx, l, m.s.logits, (size_t)n * (size_t)W * sizeof *l);
        for (int i = 0; i < n; i++) {
            const float *row = l + (size_t)i * (size_t)W;
            if (keep) fwrite(row, sizeof *row, (size_t)used, keep);
            if (p == &prompts[CASES_MAX]) continue;
            double norm = log_sum(row, used), off;
            int best = p->argmax[pos + i], found = out.tokens[i].token;
            off = fabs((double)row[best] - norm - p->logprob[pos + i]);
            worst_logprob = fmax(worst_logprob, off);
            seen++;
            if (found == best) continue;
            if ((double)row[found] - (double)row[best] < TOLERANCE) excused++;
            else {
                differ++;
                printf("  %s position %d: expected %d, found %d, better by %.4f\n", p->name,
                       pos + i, best, found, (double)row[found] - (double)row[best]);
            }
        }
    }
    free(l);
}

static int greedy_matches(const struct prompt *p) {
    admit(p->n);
    int32_t token = -1;
    for (int pos = 0; pos < p->n; pos += LIMIT_STEP_SAMPLES) {
        int n = p->n - pos < LIMIT_STEP_SAMPLES ? p->n - pos : LIMIT_STEP_SAMPLES;
        feed(pos, n, p->ids + pos);
        token = out.tokens[n - 1].token;
    }
    for (int i = 0; i < p->n_greedy; i++) {
        if (i > 0) {
            feed(p->n + i - 1, 1, NULL);
            token = out.tokens[0].token;
        }
        if (token != p->greedy[i]) {
            printf("  %s greedy %d: expected %d (margin %.4f), found %d\n", p->name, i,
                   p->greedy[i], p->margin[i], token);
            return p->margin[i] < TOLERANCE ? 1 : 0; /* what follows is another text */
        }
    }
    return 1;
}

static int compare_files(const char *a, const char *b, int used) {
    FILE *f[2] = {fopen(a, "rb"), fopen(b, "rb")};
    if (!f[0] || !f[1]) die(a, "expected two files of logits");
    float *x = malloc((size_t)used * 4), *y = malloc((size_t)used * 4);
    double sum = 0, worst = 0, off = 0;
    int64_t n = 0, same = 0;
    while (fread(x, 4, (size_t)used, f[0]) == (size_t)used &&
           fread(y, 4, (size_t)used, f[1]) == (size_t)used) {
        double nx = log_sum(x, used), ny = log_sum(y, used), kl = 0;
        int bx = 0, by = 0;
        for (int i = 0; i < used; i++) {
            double px = (double)x[i] - nx, py = (double)y[i] - ny;
            kl += exp(px) * (px - py);
            off = fmax(off, fabs((double)x[i] - (double)y[i]));
            if (x[i] > x[bx]) bx = i;
            if (y[i] > y[by]) by = i;
        }
        sum += kl;
        worst = fmax(worst, kl);
        same += bx == by;
        n++;
    }
    if (n == 0) die(a, "expected logits, found none");
    printf("%s %lld positions: mean KL %.3e, largest %.3e, largest logit difference %.4f, same best "
           "token at %.2f %%\n", sum / (double)n < 1e-3 ? "PASS" : "FAIL", (long long)n,
           sum / (double)n, worst, off, 100.0 * (double)same / (double)n);
    return sum / (double)n < 1e-3 ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "--compare") == 0)
        return compare_files(argv[2], argv[3], 4053);
    if (argc != 4) die("usage", "check_model MODEL GOLDEN LOGITS | --compare A B");
    struct gguf *file;
    struct err_text err = {0};
    read_golden(argv[2]);
    if (gguf_open(&file, argv[1], &err) < 0) die(argv[1], err.text);
    struct model_options o = {.world = 1, .max_slots = 4, .max_rows = 256,
                              .max_outs = LIMIT_STEP_SAMPLES};
    if (switches_set(kernels_table(), getenv("OCTAVO_SWITCH"), &err) < 0) die("switch", err.text);
    if (model_load(&m, file, &o, (struct load_progress){0}, &err) < 0) die("load", err.text);
    if (model_alloc_caches(&m, 64, &err) < 0) die("caches", err.text);
    if (stepper_new(&st, &m) < 0 || coll_open_none(&coll) < 0) die("start", "no memory");
    FILE *keep = fopen(argv[3], "wb");
    if (!keep) die(argv[3], "cannot be written");
    static const int chunks[] = {LIMIT_STEP_SAMPLES, 8, 1};
    int failed = 0;
    for (int c = 0; c < 3; c++) {
        worst_logprob = 0;
        differ = excused = seen = 0;
        for (int i = 0; i < n_prompts; i++) run_prompt(&prompts[i], chunks[c], keep);
        run_prompt(&prompts[CASES_MAX], chunks[c], keep);
        printf("%s %s, %d rows at a time: %lld positions, %lld best tokens differ (%lld more within "
               "%.2f), largest log-probability difference %.5f\n", differ ? "FAIL" : "PASS",
               m.k->name, chunks[c], (long long)seen, (long long)differ, (long long)excused,
               TOLERANCE, worst_logprob);
        failed += differ > 0;
    }
    fclose(keep);
    int matches = 0;
    for (int i = 0; i < n_prompts; i++) matches += greedy_matches(&prompts[i]);
    printf("%s %s: %d of %d greedy answers as expected\n",
           matches == n_prompts ? "PASS" : "FAIL", m.k->name, matches, n_prompts);
    return failed || matches != n_prompts;
}
