/* worker/probe.c: plain HTTP answers about this one worker. See probe.h.
 *
 * Owns: the sockets.  Called by: control.c.  Fails how: see probe.h.  Limits: see probe.h.
 * Tested by: tests/unit/test_probe.c, tests/faults/test_probe.py
 *
 * The control thread must turn whatever a client does, so nothing here waits: every descriptor is
 * non-blocking, a connection has a place of fixed size and a time after which it is closed, and when
 * all places are taken the oldest gives way, so that those who hang cannot keep out those who ask.
 * The request is read to its empty line, and of it only the first line counts; every answer ends the
 * connection. What the client may still be sending is read and dropped first: closing with unread
 * bytes would reset the connection and take the answer with it.
 */
#include "worker/probe.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define ANSWER_BYTES 4096
#define BACKLOG      64
#define ACCEPTS_MAX  32     /* in one turn */
#define REST_US      200000 /* without a free descriptor, accepting again at once would spin */

enum phase { CLIENT_NONE, CLIENT_READING, CLIENT_WRITING, CLIENT_LEAVING };

struct client {
    enum phase phase;
    int fd;
    uint64_t since_us;
    size_t n_in, n_out, sent;
    char in[PROBE_REQUEST_BYTES + 1];
    char out[ANSWER_BYTES];
};

struct probe {
    int listen[2];         /* -1: none */
    uint64_t rest_until_us; /* no descriptors left: not accepting before; 0: accepting */
    char path[sizeof ((struct sockaddr_un *)0)->sun_path]; /* to be removed; "" if abstract */
    struct client clients[PROBE_CLIENTS];
};

/* ---- life ------------------------------------------------------------------------------------ */

static int listen_on(int family, const struct sockaddr *address, socklen_t n) {
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    if (fd < 0) return -1;
    if (family == AF_INET) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, address, n) == 0 && listen(fd, BACKLOG) == 0) return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* A file that nobody listens on is a dead worker's, and in the way. */
static void remove_stale(const struct sockaddr_un *a, socklen_t n) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    if (connect(fd, (const struct sockaddr *)a, n) < 0 && errno == ECONNREFUSED)
        unlink(a->sun_path);
    close(fd);
}

static int open_unix(struct probe *p, const char *name, struct err_text *err) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(name);
    if (n < 2 || n >= sizeof a.sun_path)
        return err_set(err, ERR_SETUP, "--probe-socket: expected 2 to %zu bytes, found %zu",
                       sizeof a.sun_path - 1, n);
    memcpy(a.sun_path, name, n);
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    if (name[0] == '@') a.sun_path[0] = 0;
    else remove_stale(&a, size);
    p->listen[0] = listen_on(AF_UNIX, (struct sockaddr *)&a, size);
    if (p->listen[0] < 0)
        return err_set(err, ERR_SETUP, "probe socket %s: expected to listen there, found: %s", name,
                       strerror(errno));
    if (name[0] != '@') strcpy(p->path, a.sun_path);
    return OK;
}

static int open_tcp(struct probe *p, int port, struct err_text *err) {
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    p->listen[1] = listen_on(AF_INET, (struct sockaddr *)&a, sizeof a);
    if (p->listen[1] >= 0) return OK;
    return err_set(err, ERR_SETUP, "probe port 127.0.0.1:%d: expected to listen there, found: %s",
                   port, strerror(errno));
}

int probe_open(struct probe **out, const struct probe_options *o, struct err_text *err) {
    struct probe *p = calloc(1, sizeof *p);
    if (!p) return err_set(err, ERR_NOMEM, "probe: expected memory, found none");
    p->listen[0] = p->listen[1] = -1;
    int rc = o->socket ? open_unix(p, o->socket, err) : OK;
    if (rc == OK && o->port) rc = open_tcp(p, o->port, err);
    if (rc == OK) *out = p;
    else probe_close(p);
    return rc;
}

static void client_close(struct client *c) {
    close(c->fd);
    c->phase = CLIENT_NONE;
}

void probe_close(struct probe *p) {
    if (!p) return;
    for (int i = 0; i < PROBE_CLIENTS; i++)
        if (p->clients[i].phase) client_close(&p->clients[i]);
    for (size_t i = 0; i < ARRAY_LEN(p->listen); i++)
        if (p->listen[i] >= 0) close(p->listen[i]);
    if (p->path[0]) unlink(p->path);
    free(p);
}

int probe_fds(const struct probe *p, struct pollfd *out) {
    int n = 0;
    for (size_t i = 0; i < ARRAY_LEN(p->listen); i++)
        if (p->listen[i] >= 0 && !p->rest_until_us)
            out[n++] = (struct pollfd){.fd = p->listen[i], .events = POLLIN};
    for (int i = 0; i < PROBE_CLIENTS; i++) {
        const struct client *c = &p->clients[i];
        if (c->phase)
            out[n++] = (struct pollfd){.fd = c->fd,
                                       .events = c->phase == CLIENT_WRITING ? POLLOUT : POLLIN};
    }
    return n;
}

/* ---- what is answered ------------------------------------------------------------------------ */

static bool is_ready(const struct probe_status *s) {
    return s->beat.state == WORKER_READY || s->beat.state == WORKER_STEPPING;
}

static bool is_stuck(const struct probe_status *s, uint64_t now_us) {
    return s->step_began_us && s->step_bound_us && now_us > s->step_began_us &&
           now_us - s->step_began_us > s->step_bound_us;
}

struct text {
    char *p;
    size_t n, cap;
};

static void put(struct text *t, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void put(struct text *t, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(t->p + t->n, t->cap - t->n, fmt, ap);
    va_end(ap);
    if (n > 0) t->n = MIN(t->n + (size_t)n, t->cap - 1);
}

/* Printable ASCII as it is, all else as '?': a probe's reader wants the words. */
static void put_string(struct text *t, const char *s) {
    put(t, "\"");
    for (; *s; s++) {
        bool plain = *s >= 32 && *s < 127;
        if (*s == '"' || *s == '\\') put(t, "\\%c", *s);
        else put(t, "%c", plain ? *s : '?');
    }
    put(t, "\"");
}

static void put_age(struct text *t, const char *name, uint64_t at_us, uint64_t now_us) {
    if (at_us == 0) put(t, ",\"%s\":null", name);
    else put(t, ",\"%s\":%" PRIu64, name, now_us > at_us ? (now_us - at_us) / 1000 : 0);
}

static void put_status(struct text *t, const struct probe_status *s, uint64_t now_us) {
    const struct msg_beat *b = &s->beat;
    put(t, "{\"rank\":%d,\"world\":%d,\"pid\":%" PRId64 ",\"start_time\":%" PRIu64 ",\"state\":\"%s\"",
        s->rank, s->world, s->pid, s->start_time,
        worker_state_name((enum worker_state)b->state));
    put(t, ",\"ready\":%s,\"stuck\":%s,\"device\":", is_ready(s) ? "true" : "false",
        is_stuck(s, now_us) ? "true" : "false");
    put_string(t, s->device);
    put(t, ",\"generation\":%u,\"last_step\":%" PRIu64, s->generation, b->last_step);
    put_age(t, "age_ms", s->last_step_at_us, now_us);
    put_age(t, "step_ms", s->step_began_us, now_us);
    put(t, ",\"graphs\":%d,\"graph_bytes\":%" PRIu64 ",\"graph_seconds\":%.3f", s->graphs, s->graph_bytes,
        s->graph_seconds);
    put(t, ",\"load_bytes\":%" PRIu64 ",\"load_total\":%" PRIu64 ",\"memory_used_bytes\":%" PRIu64
        ",\"memory_free_bytes\":%" PRIu64 ",\"last_error\":",
        b->load_bytes, b->load_total, b->memory_used_bytes, b->memory_free_bytes);
    if (s->last_error[0]) put_string(t, s->last_error);
    else put(t, "null");
    put(t, "}\n");
}

static void answer(struct client *c, int status, const char *type, const char *body, bool head) {
    const char *reason = status == 200   ? "OK"
                         : status == 503 ? "Service Unavailable"
                         : status == 404 ? "Not Found"
                         : status == 405 ? "Method Not Allowed"
                         : status == 431 ? "Request Header Fields Too Large"
                                         : "Bad Request";
    struct text t = {c->out, 0, sizeof c->out};
    put(&t,
        "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nCache-Control: no-store\r\n"
        "%sConnection: close\r\n\r\n%s",
        status, reason, type, strlen(body), status == 405 ? "Allow: GET, HEAD\r\n" : "",
        head ? "" : body);
    c->n_out = t.n;
    c->sent = 0;
    c->phase = CLIENT_WRITING;
}

static void answer_word(struct client *c, int status, const char *word, bool head) {
    char body[64];
    snprintf(body, sizeof body, "%s\n", word);
    answer(c, status, "text/plain", body, head);
}

static void route(struct client *c, const char *path, bool head, const struct probe_status *s,
                  uint64_t now_us) {
    const char *state = worker_state_name((enum worker_state)s->beat.state);
    bool stuck = is_stuck(s, now_us);
    if (!strcmp(path, "/live")) answer_word(c, 200, stuck ? "stuck" : state, head);
    else if (!strcmp(path, "/ready")) answer_word(c, is_ready(s) ? 200 : 503, state, head);
    else if (!strcmp(path, "/progress"))
        answer_word(c, stuck ? 503 : 200, stuck ? "stuck" : state, head);
    else if (!strcmp(path, "/status")) {
        char body[ANSWER_BYTES - 512];
        struct text t = {body, 0, sizeof body};
        put_status(&t, s, now_us);
        answer(c, 200, "application/json", body, head);
    } else answer_word(c, 404, "unknown", head);
}

/* Of "GET /path?query HTTP/1.1", which ends at an empty line, makes an answer. */
static void answer_request(struct client *c, const struct probe_status *s, uint64_t now_us) {
    char *line = c->in, *save = NULL;
    while (*line == '\r' || *line == '\n') line++;
    line[strcspn(line, "\r\n")] = 0;
    const char *method = strtok_r(line, " ", &save), *path = strtok_r(NULL, " ", &save),
               *version = strtok_r(NULL, " ", &save), *more = strtok_r(NULL, " ", &save);
    if (!method || !path || !version || more || *path != '/' || strncmp(version, "HTTP/1.", 7)) {
        answer_word(c, 400, "bad", false);
        return;
    }
    bool head = !strcmp(method, "HEAD");
    if (!head && strcmp(method, "GET")) {
        answer_word(c, 405, "method", false);
        return;
    }
    char *query = strchr(path, '?');
    if (query) *query = 0;
    route(c, path, head, s, now_us);
}

/* ---- the turn -------------------------------------------------------------------------------- */

static bool would_block(void) {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

static void client_read(struct client *c, const struct probe_status *s, uint64_t now_us) {
    ssize_t n = recv(c->fd, c->in + c->n_in, PROBE_REQUEST_BYTES - c->n_in, 0);
    if (n <= 0) {
        if (n == 0 || !would_block()) client_close(c);
        return;
    }
    c->n_in += (size_t)n;
    c->in[c->n_in] = 0;
    if (memchr(c->in, 0, c->n_in)) answer_word(c, 400, "bad", false);
    else if (strstr(c->in, "\r\n\r\n") || strstr(c->in, "\n\n")) answer_request(c, s, now_us);
    else if (c->n_in == PROBE_REQUEST_BYTES) answer_word(c, 431, "long", false);
}

static void client_write(struct client *c) {
    ssize_t n = send(c->fd, c->out + c->sent, c->n_out - c->sent, MSG_NOSIGNAL);
    if (n < 0) {
        if (!would_block()) client_close(c);
        return;
    }
    c->sent += (size_t)n;
    if (c->sent < c->n_out) return;
    shutdown(c->fd, SHUT_WR);
    c->phase = CLIENT_LEAVING;
}

/* Drops what still comes, a bounded part at a time, until the client has closed too. */
static void client_leave(struct client *c) {
    for (int i = 0; i < 4; i++) {
        ssize_t n = recv(c->fd, c->in, PROBE_REQUEST_BYTES, 0);
        if (n > 0) continue;
        if (n == 0 || !would_block()) client_close(c);
        return;
    }
}

static void client_turn(struct client *c, const struct probe_status *s, uint64_t now_us) {
    if (c->phase == CLIENT_READING) client_read(c, s, now_us);
    if (c->phase == CLIENT_WRITING) client_write(c);
    if (c->phase == CLIENT_LEAVING) client_leave(c);
    if (c->phase && now_us - c->since_us > PROBE_PATIENCE_US) client_close(c);
}

/* A free place, else that of the longest there; who has his answer goes first. */
static struct client *place(struct probe *p) {
    struct client *oldest = NULL;
    for (int i = 0; i < PROBE_CLIENTS; i++) {
        struct client *c = &p->clients[i];
        if (!c->phase) return c;
        bool leaving = c->phase == CLIENT_LEAVING;
        if (!oldest || (leaving && oldest->phase != CLIENT_LEAVING) ||
            (leaving == (oldest->phase == CLIENT_LEAVING) && c->since_us < oldest->since_us))
            oldest = c;
    }
    client_close(oldest);
    return oldest;
}

static void accept_all(struct probe *p, int listener, const struct probe_status *s,
                       uint64_t now_us) {
    for (int i = 0; i < ACCEPTS_MAX; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE) p->rest_until_us = now_us + REST_US;
            return;
        }
        struct client *c = place(p);
        c->phase = CLIENT_READING;
        c->fd = fd;
        c->since_us = now_us;
        c->n_in = c->n_out = c->sent = 0;
        client_turn(c, s, now_us); /* most have sent their request already */
    }
}

void probe_turn(struct probe *p, const struct probe_status *s, uint64_t now_us) {
    for (int i = 0; i < PROBE_CLIENTS; i++)
        if (p->clients[i].phase) client_turn(&p->clients[i], s, now_us);
    if (now_us < p->rest_until_us) return;
    p->rest_until_us = 0;
    for (size_t i = 0; i < ARRAY_LEN(p->listen); i++)
        if (p->listen[i] >= 0) accept_all(p, p->listen[i], s, now_us);
}
