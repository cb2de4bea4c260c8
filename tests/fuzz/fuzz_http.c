/* tests/fuzz/fuzz_http.c: any bytes, cut anywhere, read as the same requests, and a path that comes
 * out is in its normal form.
 *
 * The first byte of an input says in how large pieces the rest is fed the second time.
 * Built as a fuzzer with clang, and always as a replay of tests/fuzz/corpus/http (see replay.c).
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/http_parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void check_path(const struct http_parse *p) {
    if (!strcmp(p->path, "*")) return;
    assert(p->path[0] == '/' && !strstr(p->path, "//"));
    assert(!strstr(p->path, "/../") && !strstr(p->path, "/./"));
    size_t n = strlen(p->path);
    assert(n == 1 || p->path[n - 1] != '/');
}

/* What was read, as a text to compare: paths, header counts, bodies, and how it ended. */
static void read_all(struct http_buf *told, const char *data, size_t n, size_t piece) {
    struct http_parse *p = malloc(sizeof *p);
    http_parse_init(p);
    bool bad = false;
    for (size_t at = 0; at < n && !bad;) {
        size_t part = MIN(piece, n - at), from = 0;
        for (;;) {
            size_t used;
            enum http_parse_event ev = http_parse(p, data + at + from, part - from, &used);
            assert(used <= part - from);
            from += used;
            if (ev == HTTP_PARSE_MORE) break;
            if (ev == HTTP_PARSE_BAD) {
                assert(p->status >= 400 && p->why);
                http_buf_puts(told, "bad\n"); /* of two faults, the cut says which is met first */
                bad = true;
                break;
            }
            if (ev == HTTP_PARSE_HEAD) {
                check_path(p);
                http_buf_printf(told, "head %s %d %d\n", p->path, p->n_fields, p->keep_alive);
            } else {
                http_buf_printf(told, "body %zu ", p->body.n);
                http_buf_put(told, p->body.p ? p->body.p : "", p->body.n);
                http_parse_next(p);
            }
        }
        assert(bad || from == part);
        at += part;
    }
    http_parse_deinit(p);
    free(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (size < 2) return 0;
    struct http_buf whole = {0}, cut = {0};
    const char *data = (const char *)bytes + 1;
    read_all(&whole, data, size - 1, size);
    read_all(&cut, data, size - 1, 1 + bytes[0] % 64);
    assert(whole.n == cut.n && (!whole.n || !memcmp(whole.p, cut.p, whole.n)));
    http_buf_deinit(&whole);
    http_buf_deinit(&cut);
    return 0;
}
