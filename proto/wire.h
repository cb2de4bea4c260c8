/* proto/wire.h: ZeroMQ as the rest of the program wants to see it.
 *
 * The coordinator binds one ROUTER; each worker connects two DEALERs, "control" (owned by its
 * control thread) and "step" (owned by its step thread). An identity is
 * "RANK.INCARNATION.c|s", so that what was queued for the dead never reaches the newborn.
 *
 * Traps this file knows: the descriptor is edge-triggered and about state, so after any send or
 * receive it must be drained (wire_recv until ERR_AGAIN); a ROUTER drops silently at its
 * high-water mark unless told to refuse, so it is told (ROUTER_MANDATORY) and a full peer is
 * ERR_FULL, an unknown one ERR_CLOSED.
 *
 * Owns: the zmq context and one socket.  Called by: fleet.c, worker/control.c, worker/main.c.
 * Fails how: codes above; ERR_SYS for the rest.  Tested by: tests/unit/test_wire.c
 */
#ifndef OCTAVO_PROTO_WIRE_H
#define OCTAVO_PROTO_WIRE_H

#include "proto/base.h"
#include "proto/msg.h"

struct wire; /* one socket; used by one thread */

struct wire_peer {
    int32_t rank;
    uint32_t incarnation;
    char channel; /* 'c' control, 's' step */
};

/* endpoint: "ipc://@name" (abstract, leaves no file), "ipc:///path" or "tcp://host:port". */
int wire_bind(struct wire **out, const char *endpoint, struct err_text *err);
int wire_connect(struct wire **out, const char *endpoint, struct wire_peer self,
                 struct err_text *err);
void wire_close(struct wire *w); /* at once; what is still queued is dropped. NULL is fine */
void wire_close_within(struct wire *w, int timeout_ms); /* lets queued last words leave first */

int wire_fd(const struct wire *w); /* poll for reading, then drain */

/* Never blocks. peer is ignored on a connected (worker) socket, whose messages wait in its queue
 * until the connection is up. OK, ERR_FULL, ERR_CLOSED, ERR_NOMEM or ERR_SYS. */
int wire_send(struct wire *w, struct wire_peer peer, const struct msg *m);

/* The next message, without waiting (timeout_ms 0) or waiting at most timeout_ms (-1: for ever).
 * A signal ends the wait early with ERR_AGAIN. OK; ERR_AGAIN; ERR_FORMAT for a message or identity
 * that does not parse, ERR_VERSION for a HELLO of another protocol (both already consumed, go on
 * draining); ERR_NOMEM, ERR_SYS. *peer is who sent it, channel 0 if the
 * identity was bad. peer may be NULL. */
int wire_recv(struct wire *w, struct wire_peer *peer, struct msg *m, int timeout_ms);

#endif
