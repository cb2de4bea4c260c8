/* coordinator/http_conn.h: what http.c (connections) and http_answer.c (answers) share.
 *
 *            head and body in                answer given
 *   READING ------------------> ANSWERING ------------------> READING   (keep-alive)
 *      |                            |                |
 *      | end of file, idle          | client left    | last answer
 *      v                            v                v
 *   CLOSING <------------------- CLOSING <------- LINGERING (bytes are thrown away until the client
 *                                                            closes or the time is up)
 *
 * Owns: nothing.  Called by: http.c, http_answer.c, nobody else.
 */
#ifndef OCTAVO_COORDINATOR_HTTP_CONN_H
#define OCTAVO_COORDINATOR_HTTP_CONN_H

#include "coordinator/http.h"
#include "coordinator/http_parse.h"

enum conn_state { CONN_READING, CONN_ANSWERING, CONN_LINGERING, CONN_CLOSING };

struct http_exchange {
    bool active; /* an answer is owed */
    bool headed; /* the status line of a stream is out */
    bool chunked, head_only;
    bool close; /* the connection ends with this answer */
    const char *tail;
    void (*gone)(void *user);
    void *gone_user;
};

struct conn {
    uv_tcp_t tcp; /* first: handle and connection are one address */
    uv_write_t write;
    uv_shutdown_t shutdown;
    struct http_server *server;
    struct conn *prev, *next;
    struct conn *todo_next;
    bool in_todo;

    enum conn_state state;
    struct http_parse parse;
    struct http_exchange x;

    bool reading; /* uv_read_start is on */
    bool pumping; /* conn_pump is on the stack */
    bool doomed;  /* to be cut off at the next look at the to-do list */
    bool eof;     /* the client sends no more */
    bool writing; /* a uv_write is in flight, from out[!filling] */
    bool shut;    /* uv_shutdown was asked for */
    int filling;  /* which of out[] is appended to */
    struct http_buf out[2];
    struct http_buf ahead; /* bytes read while an answer was owed */

    enum http_parse_phase phase_seen;
    uint64_t since_ms;    /* start of the phase or of lingering */
    uint64_t progress_ms; /* last time that unsent bytes shrank */
    size_t unsent_seen;
    size_t body_counted; /* of server->body_bytes */
};

struct http_server {
    uv_loop_t *loop;
    uv_tcp_t listener;
    uv_timer_t timer;
    uv_idle_t idle; /* runs while there is a to-do list */
    int open_handles;
    bool accepting, draining, closing;
    struct http_options o;
    int port;
    struct conn *conns;
    int n_conns, conns_max;
    struct conn *todo;
    size_t body_bytes;
    char date[40];
    uint64_t accept_failures;
    void (*closed)(void *user);
    void *closed_user;
    char read_buf[64 << 10]; /* one loop, one read at a time */
};

static inline struct conn *conn_of(const struct http_exchange *x) {
    return (struct conn *)((char *)(uintptr_t)x - offsetof(struct conn, x));
}

size_t conn_unsent(const struct conn *c);
void conn_flush(struct conn *c);
void conn_todo(struct conn *c);     /* look at it again from the loop */
void conn_doom(struct conn *c);     /* cut it off, from the loop */
void conn_answered(struct conn *c); /* the answer is complete: next request, or linger */

#endif
