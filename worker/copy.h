/* worker/copy.h: cache pages from one rank to those that lack them.
 *
 * Owns: nothing.  Called by: the step thread (main.c).
 * Fails how: ERR_ABORTED, after which the pages of a rank that lacks them may be half filled;
 * ERR_FORMAT with a sentence for pages or ranks that there are not.
 * Tested by: tests/unit/test_step.c, tests/faults/test_rank_restart.py
 */
#ifndef OCTAVO_WORKER_COPY_H
#define OCTAVO_WORKER_COPY_H

#include "proto/msg.h"
#include "worker/coll.h"
#include "worker/model.h"

/* Every rank calls it with the same message. Pages of ranks not named in c->needs are not written.
 */
int copy_pages(struct model *m, struct coll *coll, const struct msg_copy *c, struct err_text *err);

#endif
