/* coordinator/cmd_plan.c: `octavo plan FILE`: would this model fit those devices, and how fast?
 *
 *   octavo plan --device rtx-pro-6000 --tp 8 glm-5-00001-of-00011.gguf
 *   octavo plan --device other --memory 141 --bandwidth 4800 --tp 4 --json glm-5.gguf
 * Only the header is read. Exit code: 0 it fits · 1 it does not · 2 asked wrongly, or no model.
 *
 * Owns: the mapping while it runs.  Called by: main.c.  Fails how: see above.
 * Limits: none.  Tested by: tests/serve/test_plan.py, tests/unit/test_plan.c
 */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/cacheplan.h"
#include "coordinator/cmd.h"
#include "coordinator/plan.h"
#include "proto/base.h"
#include "proto/opt.h"

#define GIB (1024.0 * 1024 * 1024)

/* Memory in GiB as the driver reports it, bandwidth in GB/s as the maker states it. */
static const struct kind {
    const char *name;
    bool cuda, nvlink;
    double memory_gib, bandwidth_gb;
} kinds[] = {
    {"rtx-pro-6000", true, false, 95.6, 1792}, {"rtx-5090", true, false, 31.8, 1792},
    {"rtx-4090", true, false, 23.9, 1008},     {"l40s", true, false, 45.0, 864},
    {"a100-80", true, true, 80.0, 2039},       {"h100", true, true, 79.6, 3350},
    {"h200", true, true, 140.4, 4800},         {"b200", true, true, 179.1, 8000},
    {"cpu", false, false, 0, 20},              {"other", true, false, 0, 0},
};
#define KIND_NAMES "rtx-pro-6000|rtx-5090|rtx-4090|l40s|a100-80|h100|h200|b200|cpu|other"

struct planning {
    const char *device;
    int64_t tp, devices, ctx, depth, max_seqs, max_step_tokens;
    double memory_gib, bandwidth_gb;
    bool json;
    const struct kind *kind;
};

static int read_options(struct planning *o, int argc, char **argv, struct err_text *err) {
    const struct opt rows[] = {
        {.name = "device", .value = "KIND", .kind = OPT_CHOICE, .out = &o->device,
         .choices = KIND_NAMES, .shown = "rtx-pro-6000",
         .help = "Kind of device; other needs --memory and --bandwidth."},
        {.name = "tp", .value = "N", .kind = OPT_INT, .out = &o->tp, .min = 1, .max = LIMIT_RANKS,
         .shown = "8", .help = "Ranks."},
        {.name = "devices", .value = "N", .kind = OPT_INT, .out = &o->devices, .min = 1,
         .max = LIMIT_RANKS, .shown = "one for each rank", .help = "Devices that they share."},
        {.name = "memory", .value = "GIB", .kind = OPT_FLOAT, .out = &o->memory_gib,
         .shown = "the kind's; cpu: what this host has free", .help = "Memory of a device."},
        {.name = "bandwidth", .value = "GB/S", .kind = OPT_FLOAT, .out = &o->bandwidth_gb,
         .shown = "the kind's", .help = "What a device reads of its memory in a second."},
        {.name = "ctx", .value = "TOKENS", .kind = OPT_INT, .out = &o->ctx, .min = 1,
         .max = LIMIT_CONTEXT_TOKENS, .shown = "the model's", .help = "Longest sequence."},
        {.name = "depth", .value = "TOKENS", .kind = OPT_INT, .out = &o->depth, .min = 1,
         .max = LIMIT_CONTEXT_TOKENS, .shown = "1024",
         .help = "How long sequences are where speed is estimated."},
        {.name = "max-seqs", .value = "N", .kind = OPT_INT, .out = &o->max_seqs, .min = 1,
         .max = LIMIT_SLOTS, .shown = "64", .help = "Sequences that run at once."},
        {.name = "max-step-tokens", .value = "N", .kind = OPT_INT, .out = &o->max_step_tokens,
         .min = 1, .max = LIMIT_STEP_ROWS, .shown = "512", .help = "Tokens fed in one step."},
        {.name = "json", .kind = OPT_FLAG, .out = &o->json, .help = "Print one JSON object."},
    };
    *o = (struct planning){
        .device = "rtx-pro-6000", .tp = 8, .max_seqs = 64, .max_step_tokens = 512,
        .memory_gib = NAN, .bandwidth_gb = NAN};
    int n = opt_parse(rows, ARRAY_LEN(rows), argc, argv, 1,
                      "usage: octavo plan [OPTION…] FILE\n"
                      "Says from a model's header what it needs of which devices, and how fast it "
                      "would be.\nExit code: 0 it fits, 1 it does not, 2 asked wrongly.",
                      err);
    if (n < 0) return n;
    if (n == 0) return err_set(err, ERR_SETUP, "expected the path of a GGUF file, found none");
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (strcmp(o->device, kinds[i].name) == 0) o->kind = &kinds[i];
    return OK;
}

static int make_ask(const struct planning *o, struct plan_ask *a, struct err_text *err) {
    const struct kind *k = o->kind;
    double memory = (isnan(o->memory_gib) ? k->memory_gib : o->memory_gib) * GIB;
    double bandwidth = isnan(o->bandwidth_gb) ? k->bandwidth_gb : o->bandwidth_gb;
    if (!k->cuda && isnan(o->memory_gib)) memory = (double)cache_host_available();
    if (memory <= 0 || memory > 1e18 || bandwidth < 1e-3 || bandwidth > 1e9)
        return err_set(err, ERR_SETUP,
                       "--device %s: expected --memory in GiB and --bandwidth in GB/s, found %g "
                       "and %g",
                       k->name, memory / GIB, bandwidth);
    *a = (struct plan_ask){.ranks = (int)o->tp,
                           .devices = (int)(!k->cuda ? 1 : o->devices ? o->devices : o->tp),
                           .cuda = k->cuda,
                           .nvlink = k->nvlink,
                           .memory_bytes = (uint64_t)memory,
                           .bytes_per_s = bandwidth * 1e9,
                           .context = o->ctx,
                           .depth = o->depth,
                           .max_seqs = (int)o->max_seqs,
                           .max_rows = (int)o->max_step_tokens};
    return OK;
}

/* ---- as text ----------------------------------------------------------------------------- */

static void print_bytes(const char *what, uint64_t bytes, const char *more) {
    bool small = (double)bytes < GIB / 4;
    printf("  %-16s %10.2f %s%s\n", what, (double)bytes / (small ? GIB / 1024 : GIB),
           small ? "MiB" : "GiB", more);
}

static void print_memory(const struct plan *p, const char *device) {
    const struct plan_ask *a = &p->ask;
    printf("memory of the fullest of %d ranks, %d x %s of %.1f GiB\n", a->ranks, a->devices, device,
           (double)a->memory_bytes / GIB);
    for (int i = 0; i < PLAN_PARTS; i++)
        if (p->part_bytes[i]) print_bytes(plan_part_names[i], p->part_bytes[i], "");
    print_bytes("all weights", p->weight_bytes, "");
    char more[80];
    snprintf(more, sizeof more, "  %d rows, %d sequences, context %" PRId64, a->max_rows,
             a->max_seqs, a->context);
    print_bytes("scratch", p->scratch_bytes, more);
    if (p->reserve_bytes)
        print_bytes("context, graphs", p->reserve_bytes, "  a rule of thumb");
    print_bytes(a->cuda ? "on one device" : "on this host", p->device_bytes, "");
    printf("  %-16s %10" PRIu64 " B for each token of a sequence\n", "cache",
           p->page_bytes / LIMIT_PAGE_TOKENS);
    printf("  %-16s %10" PRId64 " tokens, %" PRId64 " sequences of %" PRId64 "\n", "room for",
           p->pages * LIMIT_PAGE_TOKENS, p->batch_at_context, a->context);
}

static void print_speed(const struct plan *p) {
    printf("speed at %" PRId64 " tokens a sequence, %.0f GB/s a device\n", p->ask.depth,
           p->ask.bytes_per_s / 1e9);
    printf("  %5s %12s %10s %10s %10s %14s\n", "batch", "GB read", "floor ms", "step ms", "tokens/s",
           "longest each");
    for (int i = 0; i < PLAN_BATCHES; i++) {
        const struct plan_batch *b = &p->batches[i];
        printf("  %5d %12.3f %10.2f %10.2f %10.0f %14" PRId64 "\n", b->batch,
               (double)b->read_bytes / 1e9, b->floor_s * 1e3, b->step_s * 1e3, b->batch / b->step_s,
               b->context);
    }
}

static void print_notes(const struct plan *p) {
    for (int i = 0; i < p->n_notes; i++) {
        const struct plan_note *n = &p->notes[i];
        printf("%s %s", n->refused ? "refused:" : "note:", n->tensor);
        if (n->tensors > 1) printf(" and %d like it", n->tensors - 1);
        printf(": %s\n", n->why);
    }
    if (p->unread_tensors)
        printf("note: %d tensors of the file, %.2f GiB, are not loaded (blocks that predict, shared "
               "indexers, unknown names)\n",
               p->unread_tensors, (double)p->unread_bytes / GIB);
}

static void print_text(const struct plan *p, const struct gguf *g, const char *device) {
    const struct plan_dims *d = &p->dims;
    printf("%s: %s, %" PRId64 " layers (%" PRId64 " dense), %" PRId64 " experts, %" PRId64
           " used, context %" PRId64 ", %.2f GiB in %d file%s\n",
           gguf_part_path(g, 0), d->arch, d->layers, d->dense, d->experts, d->used, d->context,
           (double)gguf_total_bytes(g) / GIB, gguf_parts(g), gguf_parts(g) == 1 ? "" : "s");
    print_memory(p, device);
    print_speed(p);
    print_notes(p);
    puts(p->fits ? "it fits" : "it does not fit");
}

/* ---- as JSON ----------------------------------------------------------------------------- */

static json_t *speed_json(const struct plan *p) {
    json_t *all = json_array();
    for (int i = 0; i < PLAN_BATCHES; i++) {
        const struct plan_batch *b = &p->batches[i];
        json_array_append_new(
            all, json_pack("{s:i, s:I, s:I, s:f, s:f, s:f}", "batch", b->batch, "context_max",
                           (json_int_t)b->context, "read_bytes", (json_int_t)b->read_bytes,
                           "floor_ms", b->floor_s * 1e3, "step_ms", b->step_s * 1e3,
                           "tokens_per_s", b->batch / b->step_s));
    }
    return all;
}

static json_t *notes_json(const struct plan *p) {
    json_t *all = json_array();
    for (int i = 0; i < p->n_notes; i++) {
        const struct plan_note *n = &p->notes[i];
        json_array_append_new(all, json_pack("{s:s, s:i, s:b, s:s}", "tensor", n->tensor, "tensors",
                                             n->tensors, "refused", n->refused, "why", n->why));
    }
    return all;
}

static void print_json(const struct plan *p, const char *device) {
    json_t *parts = json_object();
    for (int i = 0; i < PLAN_PARTS; i++)
        json_object_set_new(parts, plan_part_names[i],
                            json_integer((json_int_t)p->part_bytes[i]));
    json_t *all = json_pack(
        "{s:b, s:s, s:i, s:i, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o}", "fits",
        p->fits, "device", device, "ranks", p->ask.ranks, "devices", p->ask.devices, "context",
        (json_int_t)p->ask.context, "memory_bytes", (json_int_t)p->ask.memory_bytes, "parts", parts,
        "weight_bytes", (json_int_t)p->weight_bytes, "scratch_bytes", (json_int_t)p->scratch_bytes,
        "reserve_bytes", (json_int_t)p->reserve_bytes, "device_bytes", (json_int_t)p->device_bytes,
        "page_bytes", (json_int_t)p->page_bytes, "pages", (json_int_t)p->pages,
        "sequences_at_context", (json_int_t)p->batch_at_context, "batches", speed_json(p), "notes",
        notes_json(p));
    assert(all);
    json_dumpf(all, stdout, JSON_INDENT(1));
    putchar('\n');
    json_decref(all);
}

int cmd_plan(int argc, char **argv) {
    struct planning o;
    struct plan_ask ask;
    struct err_text err = {0};
    struct gguf *g = NULL;
    struct plan *p = calloc(1, sizeof *p);
    int rc = p ? read_options(&o, argc, argv, &err) : err_set(&err, ERR_NOMEM, "no memory");
    if (rc == OK) rc = make_ask(&o, &ask, &err);
    if (rc == OK) rc = gguf_open(&g, argv[1], &err);
    if (rc == OK) rc = plan_make(p, g, &ask, &err);
    if (rc == OK && o.json) print_json(p, o.device);
    if (rc == OK && !o.json) print_text(p, g, o.device);
    bool fits = rc == OK && p->fits;
    gguf_close(g);
    free(p);
    if (rc == ERR_CLOSED) return EXIT_ASKED;
    if (rc < 0) fprintf(stderr, "octavo plan: %s\n", err.text);
    return rc < 0 ? EXIT_SETUP : fits ? EXIT_ASKED : EXIT_FAILED;
}
