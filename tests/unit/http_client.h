/* tests/unit/http_client.h: a client that shares its thread with the server under test.
 *
 * It turns the server's loop while it waits for bytes, and waits on both descriptors, so no test
 * sleeps and none depends on time; a bound of 20 s turns a hang into a failure.
 */
#ifndef OCTAVO_TESTS_HTTP_CLIENT_H
#define OCTAVO_TESTS_HTTP_CLIENT_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <uv.h>

#include "coordinator/http_buf.h"

struct client {
    int fd;
    uv_loop_t *loop;
    struct http_buf in;
    bool eof, reset;
    bool busy;      /* do not wait for bytes: the test has something else to turn */
    bool head_only; /* answers have no body whatever their lines say */
};

static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void client_open(struct client *c, uv_loop_t *loop, int port) {
    *c = (struct client){.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), .loop = loop};
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(connect(c->fd, (struct sockaddr *)&at, sizeof at), 0);
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static inline void client_close(struct client *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    http_buf_deinit(&c->in);
}

/* The way a killed client goes. */
static inline void client_reset(struct client *c) {
    struct linger l = {.l_onoff = 1};
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &l, sizeof l);
    client_close(c);
}

static inline void client_turn(struct client *c) {
    uv_run(c->loop, UV_RUN_NOWAIT);
    char buf[65536];
    ssize_t n = c->eof ? -1 : recv(c->fd, buf, sizeof buf, MSG_DONTWAIT);
    if (n > 0) {
        http_buf_put(&c->in, buf, (size_t)n);
        return;
    }
    if (n == 0) c->eof = true;
    if (n < 0 && !c->eof && errno == ECONNRESET) c->eof = c->reset = true;
    struct pollfd p[2] = {{.fd = c->eof ? -1 : c->fd, .events = POLLIN},
                          {.fd = uv_backend_fd(c->loop), .events = POLLIN}};
    uv_run(c->loop, UV_RUN_NOWAIT); /* libuv tells the kernel of new watchers when it polls next */
    int timeout = uv_backend_timeout(c->loop);
    if (c->busy) timeout = 0;
    poll(p, 2, timeout < 0 || timeout > 20 ? 20 : timeout);
}

static inline void client_send_n(struct client *c, const char *p, size_t n) {
    while (n) {
        ssize_t sent = send(c->fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) return;
        if (sent < 0) {
            uv_run(c->loop, UV_RUN_NOWAIT);
            continue;
        }
        p += sent;
        n -= (size_t)sent;
    }
}

static inline void client_send(struct client *c, const char *s) {
    client_send_n(c, s, strlen(s));
}

#define CLIENT_WAIT(c, condition)                                                                  \
    do {                                                                                           \
        double end_ = now_s() + 20;                                                                \
        while (!(condition)) {                                                                     \
            if (now_s() > end_)                                                                    \
                fail_msg("expected %s within 20 s, found %zu bytes: %.2000s", #condition,          \
                         (c)->in.n, (c)->in.p ? (c)->in.p : "");                                   \
            client_turn(c);                                                                        \
        }                                                                                          \
    } while (0)

static inline bool client_has(const struct client *c, const char *s) {
    return c->in.p && memmem(c->in.p, c->in.n, s, strlen(s));
}

/* Bytes of the first whole answer in `in`, 0 if it is not complete. */
static inline size_t client_answer(const struct client *c) {
    if (!c->in.p) return 0;
    const char *end = strstr(c->in.p, "\r\n\r\n");
    if (!end) return 0;
    size_t head = (size_t)(end - c->in.p) + 4;
    if (c->head_only) return head;
    const char *length = strcasestr(c->in.p, "\r\nContent-Length: ");
    if (length && length < end) {
        size_t n = head + strtoull(length + 18, NULL, 10);
        return c->in.n >= n ? n : 0;
    }
    const char *coding = strcasestr(c->in.p, "\r\nTransfer-Encoding: chunked");
    if (coding && coding < end) {
        const char *last = memmem(end, c->in.n - head + 4, "\r\n0\r\n\r\n", 7);
        return last ? (size_t)(last - c->in.p) + 7 : 0;
    }
    return head;
}

/* Waits for one whole answer and returns its status; the text is in c->in until client_drop. */
static inline int client_status(struct client *c) {
    CLIENT_WAIT(c, client_answer(c) || c->eof);
    int status = 0;
    if (c->in.n) sscanf(c->in.p, "HTTP/1.1 %d", &status);
    return status;
}

static inline void client_drop(struct client *c) {
    size_t n = client_answer(c);
    assert(n);
    memmove(c->in.p, c->in.p + n, c->in.n - n + 1);
    c->in.n -= n;
}

/* The body of the answer in c->in, chunk framing removed; free it. */
static inline char *client_body(const struct client *c) {
    const char *p = strstr(c->in.p, "\r\n\r\n") + 4;
    size_t n = client_answer(c) - (size_t)(p - c->in.p);
    char *body = calloc(1, n + 1);
    const char *coding = strcasestr(c->in.p, "Transfer-Encoding: chunked");
    if (!coding || coding > p) {
        memcpy(body, p, n);
        return body;
    }
    for (size_t to = 0;;) {
        char *at;
        size_t chunk = strtoull(p, &at, 16);
        if (!chunk) return body;
        memcpy(body + to, at + 2, chunk);
        to += chunk;
        p = at + 2 + chunk + 2;
    }
}

#endif
