/* worker/control.h: the control thread and the mailbox between it and the step thread.
 *
 * The control thread owns the control socket and the probes (probe.h). It beats, answers probes,
 * relays what the step thread posts, and hears JOIN, ABORT and STOP even while the step thread is
 * busy, loading or stuck: ABORT reaches the communicator at once, from here. It never touches the
 * model and never enters a collective.
 *
 * Owns: the control socket, the thread, both halves of the mailbox.
 * Called by: the step thread (main.c), which is the only caller of these functions.
 * Fails how: control_start with a sentence. Afterwards the thread ends the process itself when the
 * parent is gone, or when the step thread does not follow a STOP within a bound.
 * Limits: CONTROL_NOTES pending each way (more is a bug of one side and ends the process).
 * Tested by: tests/unit/test_worker.c
 */
#ifndef OCTAVO_WORKER_CONTROL_H
#define OCTAVO_WORKER_CONTROL_H

#include "proto/msg.h"
#include "worker/coll.h"
#include "worker/probe.h"

#define CONTROL_NOTES 64

struct control;

struct control_options {
    const char *endpoint;
    int32_t rank;
    uint32_t incarnation;
    int32_t world;
    int64_t parent_pid; /* 0: none, the worker was started by hand */
    struct msg_hello hello;
    struct probe *probe;   /* the control thread's from now on; NULL: none */
    uint32_t step_limit_s; /* for a step of one row, to be called stuck; 0: never */
};

/* A small message on its way between the threads. */
struct note {
    enum msg_type type;
    union {
        struct msg_progress progress;
        struct msg_loaded loaded;
        struct msg_join join;
        struct msg_generation generation; /* JOINED, ABORT, ABORTED */
        struct msg_failed failed;
    };
};

/* The probe is closed in any case, now or by control_stop. */
int control_start(struct control **out, const struct control_options *o, struct err_text *err);

/* Sends what is still posted, closes the socket, joins the thread, frees. */
void control_stop(struct control *c);

/* To the coordinator. Never blocks. */
void control_post(struct control *c, const struct note *n);

/* From the coordinator: the next JOIN, ABORT or STOP; false when there is none. */
bool control_next(struct control *c, struct note *out);
int control_fd(const struct control *c); /* readable when control_next may have something */
bool control_has_next(struct control *c); /* it has */

/* The communicator that an ABORT shall hit; NULL before closing it. A generation that was aborted
 * before it was opened is aborted here. */
void control_set_coll(struct control *c, struct coll *coll);

/* HELLO goes out before the device is opened, and again with its name. */
void control_name_device(struct control *c, const char *name);

/* What the beats say. */
void control_set_state(struct control *c, enum worker_state state);
void control_set_memory(struct control *c, uint64_t used_bytes, uint64_t free_bytes);
void control_set_graphs(struct control *c, int graphs, uint64_t bytes, double seconds);
void control_step_begin(struct control *c, int rows); /* until control_step_done or _left */
void control_step_left(struct control *c);            /* without having completed it */
void control_step_done(struct control *c, uint64_t step_id);

#endif
