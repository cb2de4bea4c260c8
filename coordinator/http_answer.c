/* coordinator/http_answer.c: the answer half of an exchange.
 *
 * Owns: nothing; bytes go into the connection's buffers.  Called by: handlers (API files), http.c.
 * Fails how: a connection that cannot take more is doomed and cut off from the loop, never from in
 * here, so a caller in the midst of its own work is not called back.
 * Limits: LIMIT_WRITE_BACKLOG_BYTES.  Tested by: tests/unit/test_http.c
 */
#include "coordinator/http_conn.h"

#include <stdlib.h>
#include <string.h>

static const char *reason(int status) {
    switch (status) {
    case 200:
        return "OK";
    case 204:
        return "No Content";
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 404:
        return "Not Found";
    case 405:
        return "Method Not Allowed";
    case 408:
        return "Request Timeout";
    case 411:
        return "Length Required";
    case 413:
        return "Content Too Large";
    case 414:
        return "URI Too Long";
    case 415:
        return "Unsupported Media Type";
    case 417:
        return "Expectation Failed";
    case 429:
        return "Too Many Requests";
    case 431:
        return "Request Header Fields Too Large";
    case 500:
        return "Internal Server Error";
    case 501:
        return "Not Implemented";
    case 503:
        return "Service Unavailable";
    case 505:
        return "HTTP Version Not Supported";
    default:
        return "Status";
    }
}

enum http_verb http_verb(const struct http_exchange *x) {
    switch (conn_of(x)->parse.llhttp.method) {
    case HTTP_GET:
        return HTTP_VERB_GET;
    case HTTP_HEAD:
        return HTTP_VERB_HEAD;
    case HTTP_POST:
        return HTTP_VERB_POST;
    case HTTP_OPTIONS:
        return HTTP_VERB_OPTIONS;
    default:
        return HTTP_VERB_OTHER;
    }
}

const char *http_path(const struct http_exchange *x) {
    return conn_of(x)->parse.path;
}

const char *http_tail(const struct http_exchange *x) {
    return x->tail ? x->tail : "";
}

const char *http_header(const struct http_exchange *x, const char *lower_name) {
    return http_parse_header(&conn_of(x)->parse, lower_name);
}

const char *http_body(const struct http_exchange *x, size_t *n) {
    const struct http_buf *b = &conn_of(x)->parse.body;
    *n = b->n;
    return b->p ? b->p : "";
}

char *http_take_body(struct http_exchange *x, size_t *n) {
    struct http_buf *b = &conn_of(x)->parse.body;
    char *p = b->p ? b->p : calloc(1, 1);
    *n = b->n;
    *b = (struct http_buf){0};
    return p;
}

void *http_user(const struct http_exchange *x) {
    return conn_of(x)->server->o.user;
}

void http_on_gone(struct http_exchange *x, void (*gone)(void *user), void *user) {
    assert(x->active);
    x->gone = gone;
    x->gone_user = user;
}

/* Everything up to the lines that say how long the body is. */
static void put_head(struct http_exchange *x, struct http_buf *b, int status,
                     const char *content_type, const char *extra) {
    struct conn *c = conn_of(x);
    if (c->server->draining) x->close = true;
    http_buf_printf(b,
                    "HTTP/1.1 %d %s\r\nDate: %s\r\nServer: octavo\r\n"
                    "Access-Control-Allow-Origin: *\r\n",
                    status, reason(status), c->server->date);
    if (content_type) http_buf_printf(b, "Content-Type: %s\r\n", content_type);
    if (x->close)
        http_buf_puts(b, "Connection: close\r\n");
    else if (c->parse.minor == 0)
        http_buf_puts(b, "Connection: keep-alive\r\n");
    http_buf_puts(b, extra);
}

static void finish(struct http_exchange *x) {
    x->active = false;
    x->gone = NULL;
    conn_answered(conn_of(x));
}

void http_answer(struct http_exchange *x, int status, const char *content_type, const char *extra,
                 const char *body, size_t n) {
    struct conn *c = conn_of(x);
    assert(x->active && !x->headed);
    struct http_buf *b = &c->out[c->filling];
    put_head(x, b, status, status == 204 ? NULL : content_type, extra);
    if (status != 204) http_buf_printf(b, "Content-Length: %zu\r\n", n);
    http_buf_puts(b, "\r\n");
    if (status != 204 && !x->head_only) http_buf_put(b, body, n);
    if (b->failed) conn_doom(c);
    conn_flush(c);
    finish(x);
}

void http_answer_error(struct http_exchange *x, int status, const char *type, const char *param,
                       const char *code, const char *extra, const char *message) {
    struct http_buf b = {0};
    http_buf_puts(&b, "{\"error\":{\"message\":");
    http_buf_json(&b, message, strlen(message));
    http_buf_puts(&b, ",\"type\":");
    http_buf_json(&b, type, strlen(type));
    http_buf_puts(&b, ",\"param\":");
    param ? http_buf_json(&b, param, strlen(param)) : http_buf_puts(&b, "null");
    http_buf_puts(&b, ",\"code\":");
    code ? http_buf_json(&b, code, strlen(code)) : http_buf_puts(&b, "null");
    http_buf_puts(&b, "}}");
    http_answer(x, status, "application/json", extra, b.p ? b.p : "", b.n);
    http_buf_deinit(&b);
}

void http_stream_begin(struct http_exchange *x, int status, const char *content_type) {
    struct conn *c = conn_of(x);
    assert(x->active && !x->headed);
    x->headed = true;
    x->chunked = c->parse.minor >= 1;
    if (!x->chunked) x->close = true; /* HTTP/1.0: the end of the connection ends the answer */
    struct http_buf *b = &c->out[c->filling];
    put_head(x, b, status, content_type, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
    if (x->chunked) http_buf_puts(b, "Transfer-Encoding: chunked\r\n");
    http_buf_puts(b, "\r\n");
}

int http_stream_write(struct http_exchange *x, const char *p, size_t n) {
    struct conn *c = conn_of(x);
    assert(x->active && x->headed);
    if (c->doomed) return ERR_CLOSED;
    if (!n || x->head_only) return OK; /* an empty chunk would end the stream */
    struct http_buf *b = &c->out[c->filling];
    if (x->chunked) http_buf_printf(b, "%zx\r\n", n);
    http_buf_put(b, p, n);
    if (x->chunked) http_buf_puts(b, "\r\n");
    conn_flush(c);
    if (b->failed || conn_unsent(c) > LIMIT_WRITE_BACKLOG_BYTES) conn_doom(c);
    return c->doomed ? ERR_CLOSED : OK;
}

void http_stream_end(struct http_exchange *x) {
    struct conn *c = conn_of(x);
    assert(x->active && x->headed);
    if (x->chunked && !x->head_only) http_buf_puts(&c->out[c->filling], "0\r\n\r\n");
    conn_flush(c);
    finish(x);
}

void http_stream_break(struct http_exchange *x) {
    struct conn *c = conn_of(x);
    assert(x->active && x->headed);
    x->close = true; /* no last chunk: the client can tell that something is missing */
    conn_flush(c);
    finish(x);
}
