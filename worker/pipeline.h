/* worker/pipeline.h: pieces filled by a few threads, taken in order by one.
 *
 * Owns: the threads, the ring of staging slots; both live for one call.
 * Called by: weights.c, shard.c, on the loading thread.
 * Fails how: the first negative code of fill or take, ERR_NOMEM or ERR_SYS with a sentence.
 * Limits: PIPELINE_THREADS_MAX, PIPELINE_SLOTS_MAX.  Tested by: tests/unit/test_load.c
 */
#ifndef OCTAVO_WORKER_PIPELINE_H
#define OCTAVO_WORKER_PIPELINE_H

#include <stdatomic.h>

#include "proto/base.h"

#define PIPELINE_THREADS_MAX 16
#define PIPELINE_SLOTS_MAX   32
#define PIPELINE_ALIGN       4096 /* of slots and bounce buffers */

struct pipeline {
    int64_t n_pieces;
    size_t slot_bytes;   /* of the largest piece */
    size_t bounce_bytes; /* a buffer of each thread's own; 0: none */
    int n_threads, n_slots;
    /* On any of the threads, several pieces at once. A long wait must end soon after *stop. */
    int (*fill)(void *user, int64_t piece, uint8_t *slot, uint8_t *bounce, const atomic_bool *stop,
                struct err_text *err);
    /* On the caller's thread, in order of the pieces; the slot is reused afterwards. */
    int (*take)(void *user, int64_t piece, const uint8_t *slot, struct err_text *err);
    void *user;
    /* Memory of the slots; NULL: ordinary memory. */
    void *(*slots_alloc)(void *from, size_t bytes);
    void (*slots_free)(void *from, void *p);
    void *from;
};

/* Returns when every piece has been taken, or after the first failure; no thread is left. */
int pipeline_run(const struct pipeline *p, struct err_text *err);

#endif
