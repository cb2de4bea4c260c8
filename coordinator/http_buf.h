/* coordinator/http_buf.h: a growing byte buffer that knows how to write JSON strings.
 *
 * Answers are written straight into one of these and the buffer is kept for the next, so that a
 * token on its way out allocates nothing once the buffer has its size.
 *
 * Owns: its memory; {0} is empty.  Called by: http.c and the API files.  Pure.
 * Fails how: `failed` is set when memory is refused and further writes do nothing; asked once, at
 * the end.  Tested by: tests/unit/test_http.c
 */
#ifndef OCTAVO_COORDINATOR_HTTP_BUF_H
#define OCTAVO_COORDINATOR_HTTP_BUF_H

#include "proto/base.h"

struct http_buf {
    char *p; /* NUL-terminated once anything was written */
    size_t n, cap;
    bool failed;
};

void http_buf_deinit(struct http_buf *b);
void http_buf_clear(struct http_buf *b); /* keeps small memory, gives large memory back */
void http_buf_put(struct http_buf *b, const char *p, size_t n);
void http_buf_puts(struct http_buf *b, const char *s);
void http_buf_printf(struct http_buf *b, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* A JSON string with its quotes; p is valid UTF-8. */
void http_buf_json(struct http_buf *b, const char *p, size_t n);
/* A finite JSON number; what is not finite becomes -9999 (a log-probability of nothing). */
void http_buf_number(struct http_buf *b, double v);

#endif
