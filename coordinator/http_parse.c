/* coordinator/http_parse.c: bytes of a connection to requests.
 *
 * Owns: the head and body of the request being read.  Called by: http.c.  Fails how: a status.
 * Limits: every accumulation is checked before it is stored.
 * Tested by: tests/unit/test_http.c, tests/fuzz/fuzz_http.c
 *
 * llhttp's callbacks only take notes and pause the parser; http_parse reports what was noted, and
 * http.c decides with no parser frame below it on the stack. llhttp is kept strict: a message with
 * both a length and a transfer coding, bare line feeds, or two lengths, is refused, because two
 * readers of such a message can disagree on where it ends.
 */
#include "coordinator/http_parse.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static struct http_parse *self(llhttp_t *l) {
    return l->data;
}

static int refuse(struct http_parse *p, int status, const char *why) {
    p->status = status;
    p->why = why;
    return -1;
}

static int on_begin(llhttp_t *l) {
    self(l)->phase = HTTP_PHASE_HEAD;
    return 0;
}

static int on_url(llhttp_t *l, const char *s, size_t n) {
    struct http_parse *p = self(l);
    p->phase = HTTP_PHASE_HEAD;
    if (p->url_bytes + n > LIMIT_URL_BYTES)
        return refuse(p, 414, "The request target is too long.");
    http_buf_put(&p->text, s, n);
    p->url_bytes += n;
    return 0;
}

static int count_head(struct http_parse *p, size_t n) {
    p->head_bytes += n;
    if (p->head_bytes > LIMIT_HEADER_BYTES)
        return refuse(p, 431, "The request's header lines are too large.");
    return 0;
}

static int on_field(llhttp_t *l, const char *s, size_t n) {
    struct http_parse *p = self(l);
    if (count_head(p, n)) return -1;
    if (p->phase != HTTP_PHASE_HEAD) return 0; /* a trailer: counted, not kept */
    if (p->n_fields == 0 || p->in_value) {
        if (p->n_fields == LIMIT_HEADERS)
            return refuse(p, 431, "The request has too many header lines.");
        http_buf_put(&p->text, "", 1);
        p->fields[p->n_fields++].name = (uint32_t)p->text.n;
        p->in_value = false;
    }
    size_t at = p->text.n;
    http_buf_put(&p->text, s, n);
    for (; at < p->text.n; at++)
        if (p->text.p[at] >= 'A' && p->text.p[at] <= 'Z') p->text.p[at] += 'a' - 'A';
    return 0;
}

static int on_value(llhttp_t *l, const char *s, size_t n) {
    struct http_parse *p = self(l);
    if (count_head(p, n)) return -1;
    if (p->phase != HTTP_PHASE_HEAD) return 0;
    assert(p->n_fields > 0);
    if (!p->in_value) {
        http_buf_put(&p->text, "", 1);
        p->fields[p->n_fields - 1].value = (uint32_t)p->text.n;
        p->in_value = true;
    }
    http_buf_put(&p->text, s, n);
    return 0;
}

static int on_headers(llhttp_t *l) {
    struct http_parse *p = self(l);
    p->event = HTTP_PARSE_HEAD;
    p->phase = HTTP_PHASE_BODY;
    p->minor = llhttp_get_http_minor(l);
    p->keep_alive = llhttp_should_keep_alive(l);
    l->upgrade = 0; /* no other protocol is spoken: an offer to upgrade is passed over */
    return HPE_PAUSED;
}

static int on_body(llhttp_t *l, const char *s, size_t n) {
    struct http_parse *p = self(l);
    if (p->discard) return 0;
    if (p->body.n + n > LIMIT_BODY_BYTES) return refuse(p, 413, "The request body is too large.");
    http_buf_put(&p->body, s, n);
    return 0;
}

static int on_complete(llhttp_t *l) {
    struct http_parse *p = self(l);
    p->event = HTTP_PARSE_DONE;
    p->phase = HTTP_PHASE_DONE;
    return HPE_PAUSED;
}

static const llhttp_settings_t *settings(void) {
    static llhttp_settings_t s;
    static bool ready;
    if (!ready) {
        llhttp_settings_init(&s);
        s.on_message_begin = on_begin;
        s.on_url = on_url;
        s.on_header_field = on_field;
        s.on_header_value = on_value;
        s.on_headers_complete = on_headers;
        s.on_body = on_body;
        s.on_message_complete = on_complete;
        ready = true;
    }
    return &s;
}

void http_parse_init(struct http_parse *p) {
    memset(p, 0, sizeof *p);
    llhttp_init(&p->llhttp, HTTP_REQUEST, settings());
    p->llhttp.data = p;
}

void http_parse_deinit(struct http_parse *p) {
    http_buf_deinit(&p->text);
    http_buf_deinit(&p->body);
    free(p->path);
    p->path = NULL;
}

void http_parse_next(struct http_parse *p) {
    assert(p->phase == HTTP_PHASE_DONE);
    http_buf_clear(&p->text);
    http_buf_clear(&p->body);
    free(p->path);
    p->path = NULL;
    p->phase = HTTP_PHASE_IDLE;
    p->discard = p->in_value = false;
    p->url_bytes = p->head_bytes = p->raw_body_bytes = 0;
    p->n_fields = 0;
    p->has_length = p->chunked = false;
    p->content_length = 0;
}

const char *http_parse_header(const struct http_parse *p, const char *lower_name) {
    for (int i = 0; i < p->n_fields; i++)
        if (!strcmp(p->text.p + p->fields[i].name, lower_name))
            return p->fields[i].value ? p->text.p + p->fields[i].value : "";
    return NULL;
}

static int count_header(const struct http_parse *p, const char *lower_name) {
    int n = 0;
    for (int i = 0; i < p->n_fields; i++) n += !strcmp(p->text.p + p->fields[i].name, lower_name);
    return n;
}

static int hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* Empty and "." segments vanish, ".." takes the one before it away, a slash at the end vanishes. In
 * place: the output is never longer than what was read. */
static void normalise(char *path) {
    size_t to = 0;
    for (const char *s = path; *s;) {
        while (*s == '/') s++;
        const char *end = strchrnul(s, '/');
        size_t n = (size_t)(end - s);
        if (n == 2 && s[0] == '.' && s[1] == '.') {
            while (to && path[--to] != '/') {
            }
        } else if (n && !(n == 1 && s[0] == '.')) {
            path[to++] = '/';
            memmove(path + to, s, n);
            to += n;
        }
        s = end;
    }
    if (!to) path[to++] = '/';
    path[to] = 0;
}

int http_parse_target(const char *t, size_t n, char *dst) {
    if (n == 1 && t[0] == '*') {
        strcpy(dst, "*");
        return OK;
    }
    const char *end = t + n;
    if (n && t[0] != '/') { /* absolute form: what stands after the authority */
        size_t scheme = n >= 7 && !strncasecmp(t, "http://", 7)    ? 7
                        : n >= 8 && !strncasecmp(t, "https://", 8) ? 8
                                                                   : 0;
        if (!scheme) return ERR_FORMAT;
        for (t += scheme; t < end && *t != '/' && *t != '?' && *t != '#'; t++) {
        }
    }
    size_t to = 0;
    dst[to++] = '/';
    for (; t < end && *t != '?' && *t != '#'; t++) {
        char c = *t;
        if (c == '%') {
            if (end - t < 3 || hex(t[1]) < 0 || hex(t[2]) < 0) return ERR_FORMAT;
            c = (char)(hex(t[1]) * 16 + hex(t[2]));
            t += 2;
        }
        if ((unsigned char)c < 0x20 || c == 0x7f) return ERR_FORMAT;
        dst[to++] = c;
    }
    dst[to] = 0;
    normalise(dst);
    return OK;
}

/* What is asked of every request, whatever its route. Returns false with status and why. */
static bool check_head(struct http_parse *p) {
    http_buf_put(&p->text, "", 1);
    if (p->text.failed) return refuse(p, 503, "Out of memory."), false;
    if (llhttp_get_http_major(&p->llhttp) != 1)
        return refuse(p, 505, "Only HTTP/1.0 and HTTP/1.1 are spoken here."), false;
    p->path = malloc(p->url_bytes + 2);
    if (!p->path) return refuse(p, 503, "Out of memory."), false;
    if (http_parse_target(p->text.p, p->url_bytes, p->path))
        return refuse(p, 400, "The request target is malformed."), false;
    if (count_header(p, "host") > 1 || (p->minor >= 1 && !count_header(p, "host")))
        return refuse(p, 400, "A request needs exactly one Host header."), false;
    const char *coding = http_parse_header(p, "transfer-encoding");
    const char *length = http_parse_header(p, "content-length");
    if (coding && length)
        return refuse(p, 400, "Content-Length and Transfer-Encoding exclude each other."), false;
    if (coding && (strcasecmp(coding, "chunked") || count_header(p, "transfer-encoding") > 1))
        return refuse(p, 501, "The only transfer coding spoken here is chunked."), false;
    if (coding && p->minor == 0) return refuse(p, 400, "HTTP/1.0 has no transfer codings."), false;
    p->chunked = coding != NULL;
    p->has_length = length != NULL;
    p->content_length = length ? strtoull(length, NULL, 10) : 0;
    if (p->content_length > LIMIT_BODY_BYTES)
        return refuse(p, 413, "The request body is too large."), false;
    return true;
}

enum http_parse_event http_parse(struct http_parse *p, const char *data, size_t n, size_t *used) {
    p->event = HTTP_PARSE_MORE;
    p->status = 0;
    *used = 0;
    llhttp_errno_t rc = llhttp_get_errno(&p->llhttp);
    if (rc == HPE_PAUSED) llhttp_resume(&p->llhttp);
    rc = llhttp_execute(&p->llhttp, data, n);
    *used = rc == HPE_OK ? n : (size_t)(llhttp_get_error_pos(&p->llhttp) - data);
    if (*used > n) *used = n;
    if (p->phase == HTTP_PHASE_BODY || p->phase == HTTP_PHASE_DONE) {
        p->raw_body_bytes += *used;
        if (p->raw_body_bytes > 8ull * LIMIT_BODY_BYTES) {
            refuse(p, 413, "The request body has too much framing.");
            return HTTP_PARSE_BAD;
        }
    }
    if (p->text.failed || p->body.failed) {
        refuse(p, 503, "Out of memory.");
        return HTTP_PARSE_BAD;
    }
    if (rc == HPE_OK) return HTTP_PARSE_MORE;
    if (rc == HPE_PAUSED && p->event == HTTP_PARSE_HEAD)
        return check_head(p) ? HTTP_PARSE_HEAD : HTTP_PARSE_BAD;
    if (rc == HPE_PAUSED && p->event == HTTP_PARSE_DONE) return HTTP_PARSE_DONE;
    if (!p->status) refuse(p, 400, "The bytes sent are not an HTTP/1.1 request.");
    return HTTP_PARSE_BAD;
}
