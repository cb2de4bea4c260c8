/* tests/fuzz/fuzz_gguf.c: any bytes are refused or give tables that lie inside them.
 *
 * Owns: nothing.  Built as a fuzzer with clang, and always as a replay of tests/fuzz/corpus/gguf
 * (see replay.c).
 */
#include <stdlib.h>
#include <string.h>

#include "proto/gguf.h"
#include "proto/gguf_part.h"

static volatile uint64_t sink; /* so that reads are not optimised away */

static void touch(const void *p, uint64_t n) {
    const uint8_t *b = p;
    if (n) sink += b[0] + b[n - 1];
}

static void walk_kv(const struct gguf *g, const struct gguf_kv *kv) {
    struct gguf_cursor c = {0};
    struct gguf_str s;
    uint64_t n = 0;
    int64_t v;
    touch(kv->key.p, kv->key.n);
    touch(kv->data, kv->data_bytes);
    while (gguf_next_str(kv, &c, &s)) {
        touch(s.p, s.n);
        n++;
    }
    if (kv->type == GGUF_ARRAY && kv->elem_type == GGUF_STRING) {
        assert(n == kv->count);
        assert(c.at == kv->data_bytes);
    }
    if (kv->count) gguf_array_i64(kv, kv->count - 1, &v);

    char key[64];
    struct err_text err;
    double f;
    bool flag;
    if (kv->key.n >= sizeof key) return;
    memcpy(key, kv->key.p, kv->key.n);
    key[kv->key.n] = 0;
    assert(gguf_find(g, key) == kv);
    gguf_get_u64(g, key, &n, &err);
    gguf_get_f64(g, key, &f, &err);
    gguf_get_bool(g, key, &flag, &err);
    gguf_get_str(g, key, &s, &err);
}

/* The way files are read: a growing piece of the header at a time. Must agree with all at once. */
static void parse_in_pieces(const uint8_t *bytes, size_t size, int expected) {
    struct gguf_part p = {.fd = -1, .bytes = bytes, .size = size, .path = strdup("piece")};
    uint64_t have = MIN(size, (size_t)24), need = 0;
    int rc;
    for (;;) {
        uint8_t *piece = malloc(have + 1);
        memcpy(piece, bytes, have);
        rc = gguf_part_parse(&p, piece, have, &need, NULL);
        free(piece);
        if (rc != ERR_AGAIN) break;
        assert(need > have && need <= size);
        have = MAX(need, MIN((uint64_t)size, have + have / 2));
    }
    if (expected == OK) assert(rc == OK);
    gguf_part_deinit(&p);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    struct gguf *g = NULL;
    struct err_text err = {{0}};
    int rc = gguf_parse(&g, bytes, size, "fuzz.gguf", &err);
    if (size) parse_in_pieces(bytes, size, rc);
    if (rc < 0) {
        assert(strstr(err.text, "expected"));
        return 0;
    }
    for (uint64_t i = 0; i < gguf_n_kv(g); i++) walk_kv(g, gguf_kv_at(g, i));
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        assert(gguf_tensor_find(g, t->name) == t);
        assert(t->offset <= size && t->bytes <= size - t->offset && t->data == bytes + t->offset);
        assert(t->row_bytes * t->ne[1] * t->ne[2] * t->ne[3] == t->bytes);
        touch(t->data, t->bytes);
    }
    gguf_close(g);
    return 0;
}
