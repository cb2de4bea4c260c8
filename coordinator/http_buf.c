/* coordinator/http_buf.c: a growing byte buffer that knows how to write JSON strings.
 *
 * Owns: the buffers' memory.  Called by: http.c, the API files.  Fails how: the failed flag.
 * Limits: none of its own; callers bound what they write.  Tested by: tests/unit/test_http.c
 *
 * Why not jansson for output: it builds a tree per token and allocates for each node, and its
 * escaping of a delta is a few lines here.
 */
#include "coordinator/http_buf.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KEEP_BYTES = 64 << 10 };

void http_buf_deinit(struct http_buf *b) {
    free(b->p);
    *b = (struct http_buf){0};
}

void http_buf_clear(struct http_buf *b) {
    if (b->cap > KEEP_BYTES) http_buf_deinit(b);
    b->n = 0;
    b->failed = false;
    if (b->p) b->p[0] = 0;
}

static bool reserve(struct http_buf *b, size_t more) {
    if (b->failed) return false;
    size_t need = b->n + more + 1;
    if (need <= b->cap) return true;
    size_t cap = b->cap ? b->cap : 256;
    while (cap < need) cap *= 2;
    char *p = realloc(b->p, cap);
    if (!p) {
        b->failed = true;
        return false;
    }
    b->p = p;
    b->cap = cap;
    return true;
}

void http_buf_put(struct http_buf *b, const char *p, size_t n) {
    if (!reserve(b, n)) return;
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = 0;
}

void http_buf_puts(struct http_buf *b, const char *s) {
    http_buf_put(b, s, strlen(s));
}

void http_buf_printf(struct http_buf *b, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    va_list again;
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    assert(n >= 0);
    if (reserve(b, (size_t)n)) {
        vsnprintf(b->p + b->n, (size_t)n + 1, fmt, again);
        b->n += (size_t)n;
    }
    va_end(again);
}

void http_buf_json(struct http_buf *b, const char *p, size_t n) {
    http_buf_put(b, "\"", 1);
    size_t from = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        http_buf_put(b, p + from, i - from);
        from = i + 1;
        switch (c) {
        case '"':
            http_buf_put(b, "\\\"", 2);
            break;
        case '\\':
            http_buf_put(b, "\\\\", 2);
            break;
        case '\n':
            http_buf_put(b, "\\n", 2);
            break;
        case '\r':
            http_buf_put(b, "\\r", 2);
            break;
        case '\t':
            http_buf_put(b, "\\t", 2);
            break;
        default:
            http_buf_printf(b, "\\u%04x", c);
        }
    }
    http_buf_put(b, p + from, n - from);
    http_buf_put(b, "\"", 1);
}

void http_buf_number(struct http_buf *b, double v) {
    if (!isfinite(v)) v = -9999.0;
    http_buf_printf(b, "%.9g", v);
}
