/* proto/wire.c: ZeroMQ sockets that never block, never drop silently and never hang at close.
 *
 * Owns: a context with one I/O thread, one socket, a packing buffer.
 * Called by: fleet.c, worker/control.c, worker/main.c.
 * Fails how: ERR_FULL, ERR_CLOSED, ERR_AGAIN, ERR_FORMAT as the header says, ERR_SYS for the rest.
 * Limits: LIMIT_WIRE_QUEUE messages each way and peer, LIMIT_MESSAGE_BYTES (a peer that sends a
 * longer one is disconnected).  Tested by: tests/unit/test_wire.c
 *
 * Choices that are not the defaults: LINGER 0, so that closing never waits for a dead peer
 * (wire_close_within is for the last words); ROUTER_MANDATORY, so that a full or unknown peer is an
 * answer and not silence; handover stays off, so that nobody can take over a living identity. An
 * abstract socket has no file and so no permissions: only processes of this user may connect.
 *
 * ZMQ_IMMEDIATE stays off on the worker's side: HELLO is sent before the connection is up and waits
 * for it in the queue. If the coordinator is gone for good the queue fills to LIMIT_WIRE_QUEUE and
 * then says ERR_FULL; nothing waits, and the parent-death signal ends the worker.
 */
#include "proto/wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#define IDENTITY_BYTES 32

struct wire {
    void *context, *socket;
    int fd;
    bool router;
    struct msg_buf buf;
};

static int format_identity(char *to, struct wire_peer p) {
    return snprintf(to, IDENTITY_BYTES, "%d.%u.%c", p.rank, p.incarnation, p.channel);
}

static bool good_peer(struct wire_peer p) {
    return p.rank >= 0 && p.rank < LIMIT_RANKS && (p.channel == 'c' || p.channel == 's');
}

/* Strict: only what format_identity writes. */
static bool parse_identity(const void *bytes, size_t n, struct wire_peer *out) {
    char text[IDENTITY_BYTES], again[IDENTITY_BYTES];
    struct wire_peer p;
    if (n >= sizeof text) return false;
    memcpy(text, bytes, n);
    text[n] = 0;
    if (sscanf(text, "%9d.%10u.%c", &p.rank, &p.incarnation, &p.channel) != 3) return false;
    if (!good_peer(p) || format_identity(again, p) != (int)n) return false;
    *out = p;
    return memcmp(text, again, n) == 0;
}

static int set_int(struct wire *w, int option, int value) {
    return zmq_setsockopt(w->socket, option, &value, sizeof value);
}

static int set_options(struct wire *w, const char *endpoint) {
    int rc = set_int(w, ZMQ_LINGER, 0);
    rc |= set_int(w, ZMQ_SNDHWM, LIMIT_WIRE_QUEUE);
    rc |= set_int(w, ZMQ_RCVHWM, LIMIT_WIRE_QUEUE);
    rc |= set_int(w, ZMQ_RECONNECT_IVL, 50);
    rc |= set_int(w, ZMQ_RECONNECT_IVL_MAX, 1000);
    rc |= set_int(w, ZMQ_TCP_KEEPALIVE, 1);
    int64_t bytes = LIMIT_MESSAGE_BYTES;
    rc |= zmq_setsockopt(w->socket, ZMQ_MAXMSGSIZE, &bytes, sizeof bytes);
    if (!w->router) return rc;
    rc |= set_int(w, ZMQ_ROUTER_MANDATORY, 1);
#ifdef ZMQ_IPC_FILTER_UID
    uid_t uid = geteuid();
    if (!strncmp(endpoint, "ipc:", 4))
        rc |= zmq_setsockopt(w->socket, ZMQ_IPC_FILTER_UID, &uid, sizeof uid);
#endif
    return rc;
}

static int wire_open(struct wire **out, int type, const char *endpoint, const char *identity,
                     struct err_text *err) {
    struct wire *w = calloc(1, sizeof *w);
    if (!w) return err_set(err, ERR_NOMEM, "%.200s: expected memory for a socket, found none",
                           endpoint);
    const char *what = "open a socket";
    size_t size = sizeof w->fd;
    w->router = type == ZMQ_ROUTER;
    w->context = zmq_ctx_new();
    w->socket = w->context ? zmq_socket(w->context, type) : NULL;
    if (!w->socket) goto fail;
    what = "set up a socket";
    if (set_options(w, endpoint)) goto fail;
    if (identity && zmq_setsockopt(w->socket, ZMQ_ROUTING_ID, identity, strlen(identity)))
        goto fail;
    if (zmq_getsockopt(w->socket, ZMQ_FD, &w->fd, &size)) goto fail;
    what = w->router ? "listen" : "connect";
    if ((w->router ? zmq_bind : zmq_connect)(w->socket, endpoint)) goto fail;
    *out = w;
    return OK;
fail:
    err_set(err, ERR_SYS, "%.200s: expected to %s there, found: %s", endpoint, what,
            zmq_strerror(errno));
    wire_close(w);
    return ERR_SYS;
}

int wire_bind(struct wire **out, const char *endpoint, struct err_text *err) {
    return wire_open(out, ZMQ_ROUTER, endpoint, NULL, err);
}

int wire_connect(struct wire **out, const char *endpoint, struct wire_peer self,
                 struct err_text *err) {
    char identity[IDENTITY_BYTES];
    assert(good_peer(self));
    format_identity(identity, self);
    return wire_open(out, ZMQ_DEALER, endpoint, identity, err);
}

void wire_close_within(struct wire *w, int timeout_ms) {
    if (!w) return;
    assert(timeout_ms >= 0);
    if (w->socket) {
        set_int(w, ZMQ_LINGER, timeout_ms);
        zmq_close(w->socket);
    }
    while (w->context && zmq_ctx_term(w->context) && errno == EINTR) continue;
    msg_buf_deinit(&w->buf);
    free(w);
}

void wire_close(struct wire *w) {
    wire_close_within(w, 0);
}

int wire_fd(const struct wire *w) {
    return w->fd;
}

static int send_error(void) {
    switch (errno) {
    case EAGAIN: return ERR_FULL;
    case EHOSTUNREACH: return ERR_CLOSED;
    default: return ERR_SYS;
    }
}

/* EINTR comes only before anything was queued: the call is simply made again. */
static int send_frame(struct wire *w, const void *p, size_t n, int flags) {
    while (zmq_send(w->socket, p, n, flags | ZMQ_DONTWAIT) < 0)
        if (errno != EINTR) return send_error();
    return OK;
}

int wire_send(struct wire *w, struct wire_peer peer, const struct msg *m) {
    TRY(msg_pack(&w->buf, m));
    if (w->router) {
        char identity[IDENTITY_BYTES];
        assert(good_peer(peer));
        size_t n = (size_t)format_identity(identity, peer);
        TRY(send_frame(w, identity, n, ZMQ_SNDMORE));
    }
    return send_frame(w, w->buf.p, w->buf.n, 0);
}

/* One whole message without waiting: all its frames are there once the first is. */
static int receive_now(struct wire *w, struct wire_peer *peer, struct msg *m) {
    int n_frames = 0, wanted = w->router ? 2 : 1, rc = OK;
    struct wire_peer from = {0};
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    do {
        int n = zmq_msg_recv(&frame, w->socket, ZMQ_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            rc = errno == EAGAIN ? ERR_AGAIN : ERR_SYS;
            break;
        }
        n_frames++;
        const void *bytes = zmq_msg_data(&frame);
        if (rc < 0 || n_frames > wanted) rc = ERR_FORMAT; /* read on to the last frame */
        else if (n_frames < wanted) rc = parse_identity(bytes, (size_t)n, &from) ? OK : ERR_FORMAT;
        else rc = msg_unpack(m, bytes, (size_t)n);
    } while (n_frames == 0 || zmq_msg_more(&frame));
    zmq_msg_close(&frame);
    if (rc == OK && n_frames < wanted) rc = ERR_FORMAT;
    if (peer && n_frames) *peer = from;
    return rc == ERR_LIMIT ? ERR_FORMAT : rc;
}

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int wire_recv(struct wire *w, struct wire_peer *peer, struct msg *m, int timeout_ms) {
    int64_t end = timeout_ms > 0 ? now_ms() + timeout_ms : 0;
    for (;;) {
        int rc = receive_now(w, peer, m);
        if (rc != ERR_AGAIN || timeout_ms == 0) return rc;
        int64_t wait = timeout_ms < 0 ? -1 : end - now_ms();
        if (timeout_ms > 0 && wait <= 0) return ERR_AGAIN;
        zmq_pollitem_t item = {.socket = w->socket, .events = ZMQ_POLLIN};
        if (zmq_poll(&item, 1, (long)wait) < 0) return errno == EINTR ? ERR_AGAIN : ERR_SYS;
    }
}
