/* coordinator/http_ask.h: one HTTP request from the command line: connects, asks, reads to the end.
 *
 * Owns: the socket while it runs, the body of the answer.  Called by: cmd_probe.c,
 * cmd_restart.c.
 * Fails how: ERR_NOT_FOUND (nobody listens there), ERR_TIMEOUT, ERR_FORMAT (no HTTP), ERR_SYS, each
 * with a sentence.  Limits: HTTP_ASK_BYTES of an answer.
 * Tested by: tests/unit/test_http_ask.c, tests/faults/test_probe.py
 */
#ifndef OCTAVO_COORDINATOR_HTTP_ASK_H
#define OCTAVO_COORDINATOR_HTTP_ASK_H

#include "proto/base.h"

#define HTTP_ASK_BYTES (1u << 20)

struct http_ask {
    const char *socket; /* "@abstract" or a path; NULL: host and port */
    const char *host;
    int port;
    const char *method, *path;
    const char *key;    /* Authorization: Bearer; NULL: none */
    const char *body;   /* JSON; NULL: none */
    int timeout_ms;     /* for all of it */
};

struct http_reply {
    int status;
    char *body;         /* with a terminator; freed by http_reply_deinit */
    size_t n;
};

int http_ask(const struct http_ask *a, struct http_reply *out, struct err_text *err);
void http_reply_deinit(struct http_reply *r);

/* "http://host:port/anything" to host and port (80 if none). ERR_SETUP with a sentence. */
int http_ask_url(const char *url, char *host, size_t n, int *port, struct err_text *err);

/* The first line of `file`, or if that is NULL what OCTAVO_API_KEY says, or "". ERR_SETUP. */
int http_ask_key(char *key, size_t n, const char *file, struct err_text *err);

#endif
