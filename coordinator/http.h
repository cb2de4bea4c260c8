/* coordinator/http.h: an HTTP/1.1 server for one loop: requests in, whole or streamed answers out.
 *
 * A request is handed to its route's handler when its body is complete; the handler answers at once
 * or later, on the loop thread. One exchange at a time per connection: pipelined requests wait in
 * the read buffer. While an answer is owed the connection goes on being read, so that a client that
 * leaves is noticed at once.
 *
 * Owns: the listening socket, connections, exchanges.  Called by: the API files.
 * Fails how: a bad request is answered and its connection closed; a client that leaves, or does not
 * read, loses its exchange (on_gone). Nothing a client sends ends the server.
 * Limits: LIMIT_CONNECTIONS, LIMIT_HEADER_BYTES, LIMIT_URL_BYTES, LIMIT_BODY_BYTES,
 * LIMIT_WRITE_BACKLOG_BYTES, LIMIT_*_SECONDS.
 * Tested by: tests/unit/test_http.c, tests/fuzz/fuzz_http.c
 */
#ifndef OCTAVO_COORDINATOR_HTTP_H
#define OCTAVO_COORDINATOR_HTTP_H

#include <uv.h>

#include "proto/base.h"

struct http_server;
struct http_exchange; /* one request and its answer */

enum http_verb { /* bits, for http_route.verbs */
                 HTTP_VERB_OTHER = 0,
                 HTTP_VERB_GET = 1,
                 HTTP_VERB_HEAD = 2, /* wherever GET is; the body is left out by the server */
                 HTTP_VERB_POST = 4,
                 HTTP_VERB_OPTIONS = 8,
};

typedef void http_handler(struct http_exchange *x, void *user);

struct http_route {
    const char *path; /* "/v1/models", or "/v1/models/+" for anything non-empty below it */
    unsigned verbs;   /* HTTP_VERB_GET or HTTP_VERB_POST */
    http_handler *handle;
    bool open; /* no key needed */
};

struct http_options {
    const char *host;                /* "127.0.0.1", "::1", "localhost", "0.0.0.0" */
    int port;                        /* 0: any free one, see http_port */
    const struct http_route *routes; /* must outlive the server */
    int n_routes;
    /* Called when the headers are in, before the body is read. r is NULL for a path that no route
     * has. true: go on; false: it has answered. NULL: everybody is let in. */
    bool (*guard)(struct http_exchange *x, const struct http_route *r, void *user);
    void *user;
};

/* Listens. ERR_SETUP with a sentence (address in use, unknown host). */
int http_listen(struct http_server **out, uv_loop_t *loop, const struct http_options *o,
                struct err_text *err);
int http_port(const struct http_server *s);
int http_connections(const struct http_server *s);
int http_owed(const struct http_server *s); /* of these, such as may still get an answer */

/* Keep-alive ends: every connection is closed after its present answer, idle ones once they
 * have been idle for a second. New connections are still taken, answered once and closed. */
void http_drain(struct http_server *s);

/* Closes the listening socket; connections go on. */
void http_stop_accepting(struct http_server *s);

/* Abandons every exchange (on_gone is called), closes everything and then calls closed, after which
 * s is freed. closed may be NULL. */
void http_close(struct http_server *s, void (*closed)(void *user), void *user);

/* ---- the request; pointers live as long as the exchange ---------------------------------------
 */

enum http_verb http_verb(const struct http_exchange *x);
const char *http_path(const struct http_exchange *x); /* percent-decoded, normalised */
const char *http_tail(const struct http_exchange *x); /* what "+" stood for, else "" */
const char *http_header(const struct http_exchange *x, const char *lower_name); /* NULL: absent */
const char *http_body(const struct http_exchange *x, size_t *n); /* NUL-terminated besides */
/* Hands the body over: the caller frees it, http_body is empty from then on. */
char *http_take_body(struct http_exchange *x, size_t *n);
void *http_user(const struct http_exchange *x); /* as given to http_listen */

/* ---- the answer ------------------------------------------------------------------------------
 * Exactly one of: http_answer; or http_stream_begin, http_stream_write…, http_stream_end. After
 * http_answer or http_stream_end the exchange is gone. */

/* gone is called once, from the loop and never from inside an http_ call, if the client leaves or
 * is cut off before the answer is complete. The exchange must not be touched after it. */
void http_on_gone(struct http_exchange *x, void (*gone)(void *user), void *user);

/* extra: whole header lines, each ending in "\r\n", or "". */
void http_answer(struct http_exchange *x, int status, const char *content_type, const char *extra,
                 const char *body, size_t n);

/* The same with an error object of the OpenAI shape; param and code may be NULL, all UTF-8. */
void http_answer_error(struct http_exchange *x, int status, const char *type, const char *param,
                       const char *code, const char *extra, const char *message);

void http_stream_begin(struct http_exchange *x, int status, const char *content_type);
/* Copies. ERR_CLOSED: the client is leaving or read too slowly; gone will be called. */
int http_stream_write(struct http_exchange *x, const char *p, size_t n);
void http_stream_end(struct http_exchange *x);
/* Ends the stream without its proper end, so that the client sees that it is broken. */
void http_stream_break(struct http_exchange *x);

#endif
