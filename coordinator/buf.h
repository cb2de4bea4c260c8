/* coordinator/buf.h: a byte string that grows.
 *
 * Owns: its bytes.  Called by: chat.c, text.c, toolarg.c.  {0} is empty.
 * Fails how: an allocation that is refused ends the process: these buffers hold pieces of one
 * request, whose size the HTTP limits already bound.  Tested by: the tests of its users
 */
#ifndef OCTAVO_COORDINATOR_BUF_H
#define OCTAVO_COORDINATOR_BUF_H

#include <stdlib.h>
#include <string.h>

#include "proto/base.h"

struct buf {
    char *p; /* NULL until something was added; then a 0 byte follows the n bytes */
    size_t n, cap;
};

static inline void buf_reserve(struct buf *b, size_t extra) {
    if (b->n + extra + 1 <= b->cap) return;
    size_t cap = MAX(b->cap * 2, b->n + extra + 1);
    cap = MAX(cap, (size_t)64);
    char *p = realloc(b->p, cap);
    assert(p);
    b->p = p;
    b->cap = cap;
}

static inline void buf_add(struct buf *b, const char *p, size_t n) {
    buf_reserve(b, n);
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = 0;
}

static inline void buf_add_str(struct buf *b, const char *s) { buf_add(b, s, strlen(s)); }
static inline void buf_add_byte(struct buf *b, char c) { buf_add(b, &c, 1); }

/* Drops the first n bytes. */
static inline void buf_drop(struct buf *b, size_t n) {
    assert(n <= b->n);
    if (n == 0) return;
    memmove(b->p, b->p + n, b->n - n);
    b->n -= n;
    b->p[b->n] = 0;
}

static inline void buf_clear(struct buf *b) {
    b->n = 0;
    if (b->p) b->p[0] = 0;
}

static inline void buf_deinit(struct buf *b) {
    free(b->p);
    *b = (struct buf){0};
}

#endif
