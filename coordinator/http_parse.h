/* coordinator/http_parse.h: bytes of a connection to requests.
 *
 * Wraps llhttp: keeps the head (target, header lines) and the body of one request at a time, holds
 * the limits, and turns the target into one normal path, so that a path has one spelling by the
 * time anybody compares it.
 *
 * Owns: head and body memory.  Called by: http.c; tests and the fuzzer.  Pure.
 * Fails how: HTTP_PARSE_BAD with the status that says why; the connection cannot go on.
 * Limits: LIMIT_HEADER_BYTES, LIMIT_HEADERS, LIMIT_URL_BYTES, LIMIT_BODY_BYTES.
 * Tested by: tests/unit/test_http.c, tests/fuzz/fuzz_http.c
 */
#ifndef OCTAVO_COORDINATOR_HTTP_PARSE_H
#define OCTAVO_COORDINATOR_HTTP_PARSE_H

#include <llhttp.h>

#include "coordinator/http_buf.h"
#include "proto/limits.h"

enum http_parse_event {
    HTTP_PARSE_MORE, /* all bytes used, nothing to report */
    HTTP_PARSE_HEAD, /* the head is complete: look at it, set discard if the body is unwanted */
    HTTP_PARSE_DONE, /* the request is complete; http_parse_next before going on */
    HTTP_PARSE_BAD,  /* status and why are set */
};

enum http_parse_phase { HTTP_PHASE_IDLE, HTTP_PHASE_HEAD, HTTP_PHASE_BODY, HTTP_PHASE_DONE };

struct http_parse {
    llhttp_t llhttp;
    enum http_parse_phase phase;
    int event;  /* noted by a callback, reported by http_parse */
    int status; /* of HTTP_PARSE_BAD */
    const char *why;
    bool discard;  /* throw body bytes away */
    bool in_value; /* the last header callback was a value */
    /* the head, as offsets into text; strings are NUL-terminated, names in lower case */
    struct http_buf text;
    size_t url_bytes, head_bytes;
    size_t raw_body_bytes; /* with chunk framing */
    int n_fields;
    struct {
        uint32_t name, value;
    } fields[LIMIT_HEADERS];
    /* valid from HTTP_PARSE_HEAD on */
    int minor; /* HTTP/1.minor */
    bool keep_alive, has_length, chunked;
    uint64_t content_length;
    char *path; /* decoded, normalised: "/", "/v1/models"; "*" for OPTIONS * */
    struct http_buf body;
};

void http_parse_init(struct http_parse *p);
void http_parse_deinit(struct http_parse *p);

/* Reads from data; *used bytes were taken. Call again until it says MORE: after HEAD or DONE there
 * may be an event to come even with n 0. */
enum http_parse_event http_parse(struct http_parse *p, const char *data, size_t n, size_t *used);
void http_parse_next(struct http_parse *p);

const char *http_parse_header(const struct http_parse *p, const char *lower_name); /* or NULL */

/* Decodes and normalises a request target of n bytes into dst (room for n + 2). ERR_FORMAT. */
int http_parse_target(const char *target, size_t n, char *dst);

#endif
