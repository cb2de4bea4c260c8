/* worker/cut.h: which part of a tensor a rank holds.
 *
 * Owns: nothing; pure.  Called by: load.c.
 * Fails how: ERR_SETUP with tensor, expected, found, when ranks cannot share it.
 * Tested by: tests/kernels/test_cuts.c, tests/unit/test_worker.c
 */
#ifndef OCTAVO_WORKER_CUT_H
#define OCTAVO_WORKER_CUT_H

#include "worker/weights.h"

/* Fills in cols, rows, count and first of it from it->need, whose cut it may change from rows or
 * columns to whole experts. uneven: the backend takes shares of different sizes. */
int cut_share(struct plan_item *it, int rank, int world, bool uneven, struct err_text *err);

#endif
