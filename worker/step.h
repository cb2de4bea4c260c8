/* worker/step.h: from a STEP message to device tables and back to a TOKENS message.
 *
 * Keeps the host side of the slots: generation, positions fed so far, page tables; refuses what
 * does not fit (a bug of the coordinator's, so it is an assert-like failure: FAILED and exit 1).
 *
 * Owns: host mirrors of the slot tables and staging buffers.  Called by: the step thread; tests.
 * Tested by: tests/unit/test_step.c, tests/kernels/test_model.c
 */
#ifndef OCTAVO_WORKER_STEP_H
#define OCTAVO_WORKER_STEP_H

#include "proto/msg.h"
#include "worker/coll.h"
#include "worker/model.h"

struct stepper;

int stepper_new(struct stepper **out, struct model *m);
void stepper_free(struct stepper *st);
void stepper_forget(struct stepper *st); /* caches are no longer valid: all slots empty */

/* ADMIT: the slot starts anew with these parameters and generation. */
int stepper_admit(struct stepper *st, const struct msg_admit *a, struct err_text *err);

/* RESTORE: the positions of its entries are in the cache already. Their pages and tokens are
 * remembered and counted for penalties, as if they had been fed; each entry goes on where the slot
 * is. ERR_FORMAT with a sentence. */
int stepper_restore(struct stepper *st, const struct msg_step *s, struct err_text *err);

/* STEP, in two halves, so that the next one can be queued before the last is read: on a device,
 * sampled tokens stay where the next step finds them, and nothing waits in between.
 * submit: OK, ERR_ABORTED, or ERR_FORMAT with a sentence; at most STEPPER_DEPTH may be in flight.
 * collect: waits for the oldest and fills *out (rank 0 sends it, the others send DONE). OK, or
 * ERR_ABORTED: that one and all behind it were in vain, and the slots are where they were before.
 */
#define STEPPER_DEPTH 2

int stepper_submit(struct stepper *st, struct coll *coll, const struct msg_step *s,
                   const struct dump *dump, struct err_text *err);
int stepper_collect(struct stepper *st, struct coll *coll, struct msg_tokens *out);

int stepper_in_flight(const struct stepper *st);
bool stepper_is_done(const struct stepper *st); /* collect would not wait */
void stepper_drop(struct stepper *st);          /* what is in flight, as after an abort */

/* Of the step collected last. Zero where the device has no clock. */
struct step_times {
    float device_us; /* from its first operation to its last */
    float gap_us;    /* from the end of the step before to its start */
    bool ahead;      /* it was queued before that one had been collected */
};
struct step_times stepper_times(const struct stepper *st);

/* Both halves. */
int stepper_run(struct stepper *st, struct coll *coll, const struct msg_step *s,
                struct msg_tokens *out, const struct dump *dump, struct err_text *err);

#endif
