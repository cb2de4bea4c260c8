/* worker/convoy.h: the ranks of one host walk through the file together.
 *
 * A position is a number of bytes of needed tensors in file order, the same for every rank. Nobody
 * reads further than a window ahead of the slowest, so that what one rank has brought from the
 * device is still in the page cache when the last one wants it: each byte is read once per host.
 *
 * Owns: the mapping of the shared page.  Called by: weights.c.
 * Fails how: convoy_open with ERR_SETUP and a sentence; waits are bounded: a peer that does not
 * move for CONVOY_PATIENCE_US is left behind until it moves again.
 * Limits: LIMIT_RANKS.  Tested by: tests/unit/test_load.c
 */
#ifndef OCTAVO_WORKER_CONVOY_H
#define OCTAVO_WORKER_CONVOY_H

#include <stdatomic.h>

#include "proto/base.h"

#define CONVOY_WINDOW_BYTES (512ull << 20)
#define CONVOY_PATIENCE_US  10000000
#define CONVOY_SHARE_BYTES  4096 /* of the shared file, all zero before the first rank opens it */

struct convoy;

struct convoy_options {
    const char *path;      /* the shared file; NULL: alone */
    int rank, world;
    uint64_t window_bytes; /* 0: CONVOY_WINDOW_BYTES */
    uint64_t patience_us;  /* 0: CONVOY_PATIENCE_US */
};

int convoy_open(struct convoy **out, const struct convoy_options *o, struct err_text *err);

/* Says that this rank has come so far; positions never fall. */
void convoy_move(struct convoy *c, uint64_t position);

/* Waits until `position` is within the window; false: *stop was set first. Any thread. */
bool convoy_wait(struct convoy *c, uint64_t position, const atomic_bool *stop);

/* True if bringing piece n from the device falls to this rank. */
bool convoy_is_mine(const struct convoy *c, uint64_t n);

/* Marks this rank as done, or gone: nobody waits for it any more. */
void convoy_close(struct convoy *c);

#endif
