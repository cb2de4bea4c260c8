/* coordinator/http.c: connections: accept, read, write, time out, close.
 *
 * Owns: the listener, every connection and its buffers, one timer.
 * Called by: api_server.c (http_listen…), libuv.
 * Fails how: whatever a client does ends at most that client's connection.
 * Limits: LIMIT_CONNECTIONS, LIMIT_DESCRIPTORS_KEPT, LIMIT_PIPELINE_BYTES, LIMIT_BODIES_BYTES,
 * LIMIT_*_SECONDS. Tested by: tests/unit/test_http.c
 *
 * Reading never stops while an answer is owed (until LIMIT_PIPELINE_BYTES lie ahead): it is how a
 * client that leaves is noticed at once. A client that sends its end of file while it waits for an
 * answer has left; nobody who wants an answer closes its sending side in practice.
 *
 * What an http_ call of a handler cannot do safely (call the handler of the next pipelined request,
 * tell it that the client is gone) is put on a to-do list that an idle handle works off in the same
 * turn of the loop. One timer looks over all connections once a second: with thousands of
 * connections that is cheaper, and simpler to reason about, than a timer for each.
 *
 * The last answer of a connection is followed by lingering: the sending side is shut and what the
 * client still sends is thrown away for a moment. Closing at once with unread bytes would reset the
 * connection and could take the answer away from the client before it is read.
 */
#include "coordinator/http_conn.h"

#include <netdb.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "proto/log.h"

#define BACKLOG       1024
#define DRAIN_IDLE_MS 1000 /* idle for less, a request may be on its way: it gets its answer */

static void on_todo(uv_idle_t *idle);
static void conn_close(struct conn *c);
static void server_closed_one(struct http_server *s);
static void conn_resume(struct conn *c);

/* ---- writing ----------------------------------------------------------------------------------
 */

size_t conn_unsent(const struct conn *c) {
    return c->out[c->filling].n + uv_stream_get_write_queue_size((const uv_stream_t *)&c->tcp);
}

void conn_todo(struct conn *c) {
    if (c->in_todo || c->state == CONN_CLOSING) return;
    c->in_todo = true;
    c->todo_next = c->server->todo;
    c->server->todo = c;
    uv_idle_start(&c->server->idle, on_todo); /* nothing happens if it runs already */
}

void conn_doom(struct conn *c) {
    c->doomed = true;
    conn_todo(c);
}

static void on_shutdown(uv_shutdown_t *req, int status) {
    UNUSED(req);
    UNUSED(status);
}

/* Everything is sent: what a connection does then depends on its state. */
static void conn_drained(struct conn *c) {
    if (c->state == CONN_LINGERING && !c->shut) {
        c->shut = true;
        c->since_ms = uv_now(c->server->loop);
        if (c->eof || uv_shutdown(&c->shutdown, (uv_stream_t *)&c->tcp, on_shutdown)) conn_doom(c);
    }
    if (c->state == CONN_READING && (c->ahead.n || !c->reading)) conn_todo(c);
}

static void on_written(uv_write_t *req, int status) {
    struct conn *c = req->data;
    c->writing = false;
    http_buf_clear(&c->out[!c->filling]);
    if (c->state == CONN_CLOSING) return;
    if (status < 0)
        conn_doom(c);
    else
        conn_flush(c);
}

/* At most one write is in flight; what is written meanwhile gathers in the other buffer. */
void conn_flush(struct conn *c) {
    if (c->writing || c->doomed || c->state == CONN_CLOSING) return;
    struct http_buf *b = &c->out[c->filling];
    if (!b->n) {
        conn_drained(c);
        return;
    }
    uv_buf_t v = uv_buf_init(b->p, (unsigned)b->n);
    int sent = uv_try_write((uv_stream_t *)&c->tcp, &v, 1);
    if (sent == UV_EAGAIN) sent = 0;
    if (sent < 0) {
        conn_doom(c);
        return;
    }
    c->progress_ms = uv_now(c->server->loop);
    if ((size_t)sent == b->n) {
        http_buf_clear(b);
        conn_drained(c);
        return;
    }
    v = uv_buf_init(b->p + sent, (unsigned)(b->n - (size_t)sent));
    c->filling = !c->filling;
    c->writing = true;
    c->write.data = c;
    if (uv_write(&c->write, (uv_stream_t *)&c->tcp, &v, 1, on_written)) {
        c->writing = false;
        conn_doom(c);
    }
}

/* ---- one request ------------------------------------------------------------------------------
 */

static void conn_linger(struct conn *c) {
    c->state = CONN_LINGERING;
    c->since_ms = uv_now(c->server->loop);
    http_buf_deinit(&c->ahead);
    conn_flush(c);
    conn_resume(c);
}

void conn_answered(struct conn *c) {
    if (c->state == CONN_CLOSING) return;
    if (c->x.close || c->eof) {
        conn_linger(c);
        return;
    }
    c->state = CONN_READING;
    if (c->parse.phase == HTTP_PHASE_DONE)
        http_parse_next(&c->parse);
    else
        c->parse.discard = true; /* answered before the body was in */
    c->phase_seen = c->parse.phase;
    c->since_ms = uv_now(c->server->loop);
    if (!c->pumping) conn_todo(c);
}

/* A fault of the request itself: its end cannot be trusted, so the connection ends too. */
static void conn_refuse(struct conn *c, int status, const char *why) {
    if (c->parse.discard) { /* it has its answer already */
        conn_linger(c);
        return;
    }
    c->x = (struct http_exchange){.active = true, .close = true};
    c->state = CONN_ANSWERING;
    http_answer_error(&c->x, status, status < 500 ? "invalid_request_error" : "server_error", NULL,
                      NULL, "", why);
}

static const struct http_route *find_route(struct conn *c) {
    const char *path = c->parse.path;
    for (int i = 0; i < c->server->o.n_routes; i++) {
        const struct http_route *r = &c->server->o.routes[i];
        size_t n = strlen(r->path);
        if (!strcmp(path, r->path)) return r;
        if (r->path[n - 1] == '+' && !strncmp(path, r->path, n - 1) && path[n - 1]) {
            c->x.tail = path + n - 1;
            return r;
        }
    }
    return NULL;
}

static void answer_options(struct conn *c, const struct http_route *r, bool wrong_verb) {
    unsigned verbs = r ? r->verbs : HTTP_VERB_GET | HTTP_VERB_POST;
    char lines[256];
    snprintf(lines, sizeof lines,
             "Allow: %s%sOPTIONS\r\nAccess-Control-Allow-Methods: GET, POST, OPTIONS\r\n"
             "Access-Control-Allow-Headers: *, Authorization, Content-Type\r\n"
             "Access-Control-Max-Age: 600\r\n",
             verbs & HTTP_VERB_GET ? "GET, HEAD, " : "", verbs & HTTP_VERB_POST ? "POST, " : "");
    if (wrong_verb)
        http_answer_error(&c->x, 405, "invalid_request_error", NULL, NULL, lines,
                          "This route does not take that method.");
    else
        http_answer(&c->x, 204, NULL, lines, "", 0);
}

/* The head is in: everything that can be decided without the body. */
static void conn_head(struct conn *c) {
    struct http_exchange *x = &c->x;
    *x = (struct http_exchange){.active = true};
    enum http_verb verb = http_verb(x);
    x->head_only = verb == HTTP_VERB_HEAD;
    x->close = !c->parse.keep_alive || c->server->draining;
    const char *expect = http_header(x, "expect");
    const char *coding = http_header(x, "content-encoding");
    bool has_body = c->parse.chunked || c->parse.content_length > 0;
    bool waits = expect && has_body;
    bool keep = !x->close;
    if (waits) x->close = true; /* if refused now, the body may come or not: nobody can tell */

    const struct http_route *r = find_route(c);
    if (verb == HTTP_VERB_OPTIONS && http_header(x, "access-control-request-method")) {
        answer_options(c, r, false);
        return;
    }
    if (c->server->o.guard && !c->server->o.guard(x, r, c->server->o.user)) return;
    unsigned asked = verb == HTTP_VERB_HEAD ? HTTP_VERB_GET : verb;
    if (verb == HTTP_VERB_OPTIONS && (r || !strcmp(c->parse.path, "*")))
        answer_options(c, r, false);
    else if (!r)
        http_answer_error(x, 404, "invalid_request_error", NULL, "not_found", "",
                          "There is no such route here.");
    else if (!(r->verbs & asked))
        answer_options(c, r, true);
    else if (verb == HTTP_VERB_POST && !c->parse.chunked && !c->parse.has_length)
        http_answer_error(x, 411, "invalid_request_error", NULL, NULL, "",
                          "A POST needs a Content-Length or chunked coding.");
    else if (coding && strcasecmp(coding, "identity"))
        http_answer_error(x, 415, "invalid_request_error", NULL, NULL, "",
                          "Request bodies are taken without content coding only.");
    else if (expect && strcasecmp(expect, "100-continue"))
        http_answer_error(x, 417, "invalid_request_error", NULL, NULL, "",
                          "The only expectation met here is 100-continue.");
    else {
        x->close = !keep;
        c->state = CONN_READING;
        if (waits && c->parse.minor >= 1) {
            http_buf_puts(&c->out[c->filling], "HTTP/1.1 100 Continue\r\n\r\n");
            conn_flush(c);
        }
    }
}

/* token path 1/9: a whole request is in; its route's handler (api_chat.c) takes it from here. */
static void conn_dispatch(struct conn *c) {
    if (!c->x.active) { /* answered at its head already */
        http_parse_next(&c->parse);
        return;
    }
    c->state = CONN_ANSWERING;
    const struct http_route *r = find_route(c);
    assert(r);
    r->handle(&c->x, c->server->o.user);
}

static void count_body(struct conn *c) {
    struct http_server *s = c->server;
    s->body_bytes += c->parse.body.cap - c->body_counted;
    c->body_counted = c->parse.body.cap;
}

static void note_phase(struct conn *c) {
    if (c->parse.phase == c->phase_seen) return;
    c->phase_seen = c->parse.phase;
    c->since_ms = uv_now(c->server->loop);
}

/* Feeds bytes to the parser and acts on what it reports, until the bytes are used up or an answer
 * is owed. The rest waits in `ahead`. */
static void conn_pump(struct conn *c, const char *p, size_t n) {
    c->pumping = true;
    while (c->state == CONN_READING && !c->doomed && conn_unsent(c) <= LIMIT_PIPELINE_BYTES) {
        size_t used;
        enum http_parse_event ev = http_parse(&c->parse, p, n, &used);
        p += used;
        n -= used;
        count_body(c);
        note_phase(c);
        if (ev == HTTP_PARSE_MORE) break;
        if (ev == HTTP_PARSE_BAD)
            conn_refuse(c, c->parse.status, c->parse.why);
        else if (ev == HTTP_PARSE_HEAD)
            conn_head(c);
        else
            conn_dispatch(c);
        if (c->server->body_bytes > LIMIT_BODIES_BYTES && c->state == CONN_READING &&
            c->parse.body.n)
            conn_refuse(c, 503, "Too many request bodies are in memory; try again.");
        count_body(c);
        note_phase(c);
    }
    c->pumping = false;
    if (n && (c->state == CONN_ANSWERING || c->state == CONN_READING)) {
        http_buf_put(&c->ahead, p, n);
        if (c->ahead.failed) conn_doom(c);
    }
}

/* ---- reading ----------------------------------------------------------------------------------
 */

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf) {
    UNUSED(suggested);
    struct conn *c = (struct conn *)h;
    size_t room = sizeof c->server->read_buf;
    if (c->state == CONN_ANSWERING || c->ahead.n) room = LIMIT_PIPELINE_BYTES - c->ahead.n;
    *buf = uv_buf_init(c->server->read_buf, (unsigned)MIN(room, sizeof c->server->read_buf));
}

static void conn_eof(struct conn *c) {
    c->eof = true;
    uv_read_stop((uv_stream_t *)&c->tcp);
    c->reading = false;
    if (c->state == CONN_ANSWERING || !(c->writing || c->out[c->filling].n))
        conn_close(c);
    else
        conn_linger(c); /* answers already given are still owed to the wire */
}

static void on_read(uv_stream_t *h, ssize_t n, const uv_buf_t *buf) {
    struct conn *c = (struct conn *)h;
    if (n == 0) return;
    if (n == UV_EOF) {
        conn_eof(c);
        return;
    }
    if (n < 0) {
        conn_close(c);
        return;
    }
    if (c->state == CONN_LINGERING) return;
    if (c->state == CONN_READING && !c->ahead.n && !c->doomed) {
        conn_pump(c, buf->base, (size_t)n);
    } else {
        http_buf_put(&c->ahead, buf->base, (size_t)n);
        if (c->ahead.failed) conn_doom(c);
    }
    if (c->ahead.n >= LIMIT_PIPELINE_BYTES && c->state != CONN_CLOSING) {
        uv_read_stop(h);
        c->reading = false;
    }
}

static void conn_resume(struct conn *c) {
    if (c->reading || c->eof || c->state == CONN_CLOSING) return;
    if (c->ahead.n >= LIMIT_PIPELINE_BYTES) return;
    if (uv_read_start((uv_stream_t *)&c->tcp, on_alloc, on_read))
        conn_doom(c);
    else
        c->reading = true;
}

static void on_todo(uv_idle_t *idle) {
    struct http_server *s = idle->data;
    struct conn *list = s->todo, *c;
    s->todo = NULL;
    while ((c = list)) {
        list = c->todo_next;
        c->in_todo = false;
        if (c->state == CONN_CLOSING) continue;
        if (c->doomed) {
            conn_close(c);
            continue;
        }
        if (c->state == CONN_READING && c->ahead.n) {
            struct http_buf a = c->ahead;
            c->ahead = (struct http_buf){0};
            conn_pump(c, a.p, a.n);
            http_buf_deinit(&a);
        }
        conn_resume(c);
    }
    if (!s->todo) uv_idle_stop(idle);
}

/* ---- life of a connection ---------------------------------------------------------------------
 */

static void on_conn_closed(uv_handle_t *h) {
    struct conn *c = (struct conn *)h;
    struct http_server *s = c->server;
    s->body_bytes -= c->body_counted;
    http_parse_deinit(&c->parse);
    http_buf_deinit(&c->out[0]);
    http_buf_deinit(&c->out[1]);
    http_buf_deinit(&c->ahead);
    free(c);
    server_closed_one(s);
}

static void conn_close(struct conn *c) {
    if (c->state == CONN_CLOSING) return;
    struct http_server *s = c->server;
    c->state = CONN_CLOSING;
    if (c->prev) c->prev->next = c->next;
    if (c->next) c->next->prev = c->prev;
    if (s->conns == c) s->conns = c->next;
    s->n_conns--;
    if (c->in_todo) { /* on_conn_closed may come before the list is worked off */
        for (struct conn **at = &s->todo; *at; at = &(*at)->todo_next)
            if (*at == c) {
                *at = c->todo_next;
                break;
            }
    }
    if (c->x.active && c->x.gone) {
        c->x.active = false;
        c->x.gone(c->x.gone_user);
    }
    /* Cut off with bytes unsent: a reset gives the kernel's buffer back at once. */
    if (!(c->doomed && !c->shut && !uv_tcp_close_reset(&c->tcp, on_conn_closed)))
        uv_close((uv_handle_t *)&c->tcp, on_conn_closed);
}

/* fd: accepted by ourselves; -1: libuv has it. */
static void take_connection(struct http_server *s, int fd) {
    struct conn *c = calloc(1, sizeof *c);
    if (!c || uv_tcp_init(s->loop, &c->tcp)) {
        free(c);
        if (fd >= 0) close(fd);
        log_warn("http-accept-failed", "error=nomem");
        return;
    }
    c->server = s;
    s->open_handles++;
    http_parse_init(&c->parse);
    c->next = s->conns;
    if (c->next) c->next->prev = c;
    s->conns = c;
    s->n_conns++;
    c->since_ms = c->progress_ms = uv_now(s->loop);
    if (fd >= 0 ? uv_tcp_open(&c->tcp, fd)
                : uv_accept((uv_stream_t *)&s->listener, (uv_stream_t *)&c->tcp)) {
        if (fd >= 0) close(fd);
        conn_close(c);
        return;
    }
    uv_tcp_nodelay(&c->tcp, 1);
    conn_resume(c);
    if (s->n_conns > s->conns_max + s->conns_max / 8)
        conn_close(c); /* so many that they cannot even be told */
    else if (s->n_conns > s->conns_max)
        conn_refuse(c, 503, "Too many connections; try again.");
}

static void on_connection(uv_stream_t *listener, int status) {
    struct http_server *s = listener->data;
    if (status == 0) {
        take_connection(s, -1);
        return;
    }
    /* out of descriptors: libuv has dropped the newcomer, the rest goes on */
    if (!(s->accept_failures++ % 1000))
        log_warn("http-accept-failed", "error=%s count=%llu", uv_err_name(status),
                 (unsigned long long)s->accept_failures);
}

/* Who stands at the door is let in: with the listening socket the kernel resets them. */
static void take_waiting(struct http_server *s) {
    int door, fd;
    if (uv_fileno((uv_handle_t *)&s->listener, &door)) return;
    for (int i = 0; i < BACKLOG; i++) {
        if ((fd = accept4(door, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) < 0) return;
        take_connection(s, fd);
    }
}

/* ---- time -------------------------------------------------------------------------------------
 */

static void set_date(struct http_server *s) {
    time_t now = time(NULL);
    struct tm tm;
    gmtime_r(&now, &tm);
    strftime(s->date, sizeof s->date, "%a, %d %b %Y %H:%M:%S GMT", &tm);
}

static void conn_look(struct conn *c, uint64_t now) {
    uint64_t age = now - c->since_ms;
    size_t unsent = conn_unsent(c);
    if (unsent < c->unsent_seen || !unsent) c->progress_ms = now;
    c->unsent_seen = unsent;
    if (unsent && now - c->progress_ms > LIMIT_STALL_SECONDS * 1000u) {
        c->doomed = true;
        conn_close(c);
    } else if (c->state == CONN_LINGERING) {
        if (c->shut && age > LIMIT_LINGER_SECONDS * 1000u) conn_close(c);
    } else if (c->state == CONN_READING) {
        if (c->parse.phase == HTTP_PHASE_IDLE) {
            if (c->server->draining && age > DRAIN_IDLE_MS) conn_linger(c);
            else if (age > LIMIT_IDLE_SECONDS * 1000u) conn_close(c);
        } else if (c->parse.phase == HTTP_PHASE_HEAD) {
            if (age > LIMIT_HEADER_SECONDS * 1000u) conn_refuse(c, 408, "The head took too long.");
        } else if (age > LIMIT_BODY_SECONDS * 1000u) {
            c->x.active ? conn_refuse(c, 408, "The body took too long.") : conn_close(c);
        }
    }
}

static void on_second(uv_timer_t *t) {
    struct http_server *s = t->data;
    set_date(s);
    uint64_t now = uv_now(s->loop);
    for (struct conn *c = s->conns, *next; c; c = next) {
        next = c->next;
        conn_look(c, now);
    }
}

/* ---- the server -------------------------------------------------------------------------------
 */

static void server_closed_one(struct http_server *s) {
    if (--s->open_handles || !s->closing) return;
    void (*closed)(void *) = s->closed;
    void *user = s->closed_user;
    free(s);
    if (closed) closed(user);
}

static void on_handle_closed(uv_handle_t *h) {
    server_closed_one(h->data);
}

static int bind_listener(struct http_server *s, const struct http_options *o,
                         struct err_text *err) {
    char port[16];
    snprintf(port, sizeof port, "%d", o->port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    char host[256]; /* "[::1]" is how an address looks in a URL; taken too */
    size_t n = strlen(o->host);
    bool bracketed = n > 2 && o->host[0] == '[' && o->host[n - 1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(bracketed ? n - 2 : n), o->host + bracketed);
    int rc = getaddrinfo(*host ? host : NULL, port, &hints, &list);
    if (rc)
        return err_set(err, ERR_SETUP,
                       "--host %s: expected a name or address of this machine, found: %s", o->host,
                       gai_strerror(rc));
    rc = uv_tcp_bind(&s->listener, list->ai_addr, 0);
    freeaddrinfo(list);
    if (!rc) rc = uv_listen((uv_stream_t *)&s->listener, BACKLOG, on_connection);
    if (rc)
        return err_set(err, ERR_SETUP, "HTTP on %s port %d: expected to listen, found: %s", o->host,
                       o->port, uv_strerror(rc));
    struct sockaddr_storage at;
    int at_bytes = sizeof at;
    uv_tcp_getsockname(&s->listener, (struct sockaddr *)&at, &at_bytes);
    s->port = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&at)->sin6_port
                                             : ((struct sockaddr_in *)&at)->sin_port);
    return OK;
}

/* A client must never get the descriptor that a worker's restart needs. */
static int room_for_connections(void) {
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l) < 0) return LIMIT_CONNECTIONS;
    rlim_t kept = MIN((rlim_t)LIMIT_DESCRIPTORS_KEPT, l.rlim_cur / 2);
    return (int)MIN((rlim_t)LIMIT_CONNECTIONS, l.rlim_cur - kept);
}

int http_listen(struct http_server **out, uv_loop_t *loop, const struct http_options *o,
                struct err_text *err) {
    signal(SIGPIPE, SIG_IGN); /* a client that left is an error code, not a signal */
    struct http_server *s = calloc(1, sizeof *s);
    if (!s) return err_set(err, ERR_NOMEM, "HTTP server: expected %zu bytes", sizeof *s);
    s->loop = loop;
    s->o = *o;
    s->listener.data = s->timer.data = s->idle.data = s;
    uv_tcp_init(loop, &s->listener);
    uv_timer_init(loop, &s->timer);
    uv_idle_init(loop, &s->idle);
    s->listener.data = s->timer.data = s->idle.data = s;
    s->open_handles = 3;
    s->accepting = true;
    s->conns_max = room_for_connections();
    set_date(s);
    int rc = bind_listener(s, o, err);
    if (rc < 0) {
        http_close(s, NULL, NULL);
        return rc;
    }
    uv_timer_start(&s->timer, on_second, 1000, 1000);
    *out = s;
    return OK;
}

int http_port(const struct http_server *s) {
    return s->port;
}

int http_connections(const struct http_server *s) {
    return s->n_conns;
}

int http_owed(const struct http_server *s) {
    int n = 0;
    for (const struct conn *c = s->conns; c; c = c->next)
        n += c->state != CONN_LINGERING && !c->doomed;
    return n;
}

void http_drain(struct http_server *s) {
    uint64_t now = uv_now(s->loop);
    s->draining = true;
    for (struct conn *c = s->conns, *next; c; c = next) {
        next = c->next;
        c->x.close = true;
        if (c->state == CONN_READING && c->parse.phase == HTTP_PHASE_IDLE && !c->ahead.n &&
            now - c->since_ms > DRAIN_IDLE_MS)
            conn_linger(c);
    }
}

void http_stop_accepting(struct http_server *s) {
    if (!s->accepting) return;
    s->accepting = false;
    if (!s->closing) take_waiting(s);
    uv_close((uv_handle_t *)&s->listener, on_handle_closed);
}

void http_close(struct http_server *s, void (*closed)(void *user), void *user) {
    assert(!s->closing);
    s->closing = true;
    s->closed = closed;
    s->closed_user = user;
    http_stop_accepting(s);
    uv_close((uv_handle_t *)&s->timer, on_handle_closed);
    uv_close((uv_handle_t *)&s->idle, on_handle_closed);
    while (s->conns) conn_close(s->conns);
}
