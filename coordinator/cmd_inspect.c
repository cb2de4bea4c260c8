/* coordinator/cmd_inspect.c: `octavo inspect PATH`: what is in a GGUF file.
 *
 * Prints the metadata, then the tensors by type and one by one; nothing of the weights is read.
 * With --check it reads all of them and prints what is damaged instead; exit 2 if something is.
 *
 * Owns: the mapping while it runs.  Called by: main.c.
 * Fails how: one sentence and exit code 2.  Tested by: tests/serve/test_inspect.py
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/cmd.h"
#include "coordinator/inspect_check.h"
#include "proto/base.h"
#include "proto/gguf.h"
#include "proto/opt.h"

#define SHOWN_BYTES 100 /* of a string */
#define SHOWN_ELEMS 8   /* of an array */
#define TYPES_MAX   256

static void print_text(struct gguf_str s) {
    size_t n = MIN(s.n, SHOWN_BYTES);
    putchar('"');
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s.p[i];
        if (c == '\n')
            fputs("\\n", stdout);
        else if (c < 32 || c == 127)
            printf("\\x%02x", c);
        else
            putchar(c);
    }
    fputs(n < s.n ? "\"…" : "\"", stdout);
}

static void print_array(const struct gguf_kv *kv) {
    struct gguf_cursor c = {0};
    struct gguf_str s;
    int64_t v;
    printf("[%" PRIu64 "] ", kv->count);
    for (uint64_t i = 0; i < MIN(kv->count, SHOWN_ELEMS); i++) {
        if (i) fputs(", ", stdout);
        if (kv->elem_type == GGUF_STRING && gguf_next_str(kv, &c, &s))
            print_text(s);
        else if (gguf_array_i64(kv, i, &v) == OK)
            printf("%" PRId64, v);
        else
            putchar('?');
    }
    if (kv->count > SHOWN_ELEMS) fputs(", …", stdout);
}

static void print_value(const struct gguf *g, const struct gguf_kv *kv, const char *key) {
    struct gguf_str s;
    uint64_t u;
    double d;
    bool b;
    if (kv->type == GGUF_ARRAY)
        print_array(kv);
    else if (kv->type == GGUF_STRING && gguf_get_str(g, key, &s, NULL) == OK)
        print_text(s);
    else if (kv->type == GGUF_BOOL && gguf_get_bool(g, key, &b, NULL) == OK)
        fputs(b ? "true" : "false", stdout);
    else if (gguf_get_u64(g, key, &u, NULL) == OK)
        printf("%" PRIu64, u);
    else if (gguf_get_f64(g, key, &d, NULL) == OK)
        printf("%g", d);
    else
        putchar('?');
}

static void print_metadata(const struct gguf *g) {
    printf("metadata: %" PRIu64 " keys\n", gguf_n_kv(g));
    for (uint64_t i = 0; i < gguf_n_kv(g); i++) {
        const struct gguf_kv *kv = gguf_kv_at(g, i);
        char *key = strndup(kv->key.p, kv->key.n);
        if (!key) return;
        printf("  %s = ", key);
        print_value(g, kv, key);
        putchar('\n');
        free(key);
    }
}

static void print_types(const struct gguf *g) {
    static uint64_t count[TYPES_MAX], bytes[TYPES_MAX];
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        if (t->type >= TYPES_MAX) continue;
        count[t->type]++;
        bytes[t->type] += t->bytes;
    }
    printf("tensors: %" PRIu64 ", %" PRIu64 " bytes in %d file%s\n", gguf_n_tensors(g),
           gguf_total_bytes(g), gguf_parts(g), gguf_parts(g) == 1 ? "" : "s");
    for (uint32_t t = 0; t < TYPES_MAX; t++)
        if (count[t])
            printf("  %-8s %6" PRIu64 " tensors %16" PRIu64 " bytes\n", gguf_type_info(t)->name,
                   count[t], bytes[t]);
}

static void print_tensors(const struct gguf *g) {
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        char shape[96];
        int n = 0;
        for (int d = 0; d < t->n_dims; d++)
            n += snprintf(shape + n, sizeof shape - (size_t)n, "%s%" PRIu64, d ? " x " : "",
                          t->ne[d]);
        printf("  %-40s %-8s %s\n", t->name, gguf_type_info(t->type)->name, shape);
    }
}

static int print_all(const struct gguf *g) {
    print_metadata(g);
    print_types(g);
    print_tensors(g);
    return OK;
}

int cmd_inspect(int argc, char **argv) {
    struct err_text err = {0};
    struct gguf *g;
    bool check = false;
    uint64_t bad = 0;
    const struct opt rows[] = {
        {.name = "check", .kind = OPT_FLAG, .out = &check,
         .help = "Read all weights instead, and say which scales are infinite or NaN."},
    };
    int n = opt_parse(rows, ARRAY_LEN(rows), argc, argv, 1,
                      "usage: octavo inspect [--check] PATH\nPrints what is in a GGUF file.", &err);
    if (n == ERR_CLOSED) return EXIT_ASKED;
    if (n == 0) n = err_set(&err, ERR_SETUP, "expected the path of a GGUF file, found none");
    if (n < 0 || gguf_open(&g, argv[1], &err) < 0) {
        fprintf(stderr, "octavo inspect: %s\n", err.text);
        return EXIT_SETUP;
    }
    n = check ? inspect_check(g, &bad, &err) : print_all(g);
    gguf_close(g);
    if (n < 0) fprintf(stderr, "octavo inspect: %s\n", err.text);
    return n < 0 || bad ? EXIT_SETUP : EXIT_ASKED;
}
