/* worker/graphs.h: which steps are kept as graphs, and what they cost.
 *
 * A graph replays fixed launches. So decode steps are filled up with padding rows to one of few
 * sizes, the longest context of the rows is rounded up to one of few tiers, and all pairs are
 * captured at the start: no step of a running service waits for a capture. Other steps (prompts)
 * are captured when they come again.
 *
 * Owns: nothing; the graphs are the context's.  Called by: load.c (what will they need), main.c
 * (capture), step.c, forward.c.
 * Fails how: ERR_ABORTED when the generation is aborted meanwhile.
 * Tested by: tests/unit/test_graphs.c
 */
#ifndef OCTAVO_WORKER_GRAPHS_H
#define OCTAVO_WORKER_GRAPHS_H

#include "worker/model.h"

#define GRAPHS_ROWS_MAX 64

/* The smallest bucket (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) that holds so many rows; 0: none.
 */
int graphs_bucket(int rows);

/* The smallest bucket after `bucket`; 0: it is the last. The first is after 0. */
int graphs_next_bucket(int bucket);

/* Rows that a step of the model is filled up to: its bucket if the batch has room for it. */
int graphs_padded(const struct model *m, int rows);

/* The bound that stands for a context: a quarter, a half and all of what attention selects from,
 * then four times as much each; never above the model's longest. */
int graphs_tier(const struct model *m, int context);

/* How many pairs of bucket and tier there are for the model's slots. */
int graphs_count(const struct model *m);

/* Sets m->work_bytes, m->graph_bytes and m->n_graphs; before any memory is allocated. */
void graphs_measure(struct model *m);

struct graphs_report {
    int made; /* 0: all were known */
    double seconds;
    uint64_t bytes; /* of device memory that is gone since */
};

/* Captures what is missing. stop: asked between two graphs; NULL: nobody wants to stop. */
int graphs_capture(struct model *m, struct coll *coll, bool (*stop)(void *user), void *user,
                   struct graphs_report *out);

#endif
