/* worker/weights.h: this rank's weights from the file to the device.
 *
 * Owns: the readers, the staging memory, while weights_read runs.  Called by: load.c, shard.c.
 * Fails how: ERR_SYS, ERR_FORMAT (the file was cut meanwhile), ERR_NOMEM with a sentence.
 * Limits: none of its own.  Tested by: tests/unit/test_load.c
 */
#ifndef OCTAVO_WORKER_WEIGHTS_H
#define OCTAVO_WORKER_WEIGHTS_H

#include "worker/pipeline.h"
#include "worker/tensors.h"

#define ARENA_ALIGN 256 /* of every tensor in the weights' arena */

/* One tensor, this rank's share. */
struct plan_item {
    struct tensor_need need;
    int64_t cols, rows, count; /* of the share */
    int64_t first;             /* column, row or matrix that the share begins with */
    uint64_t offset, bytes;    /* in the weights' arena */
    struct kmat *mat;          /* where it goes, once pointed; or */
    float *vector;
};

struct plan {
    struct plan_item *items;
    int n_items, cap_items;
};

/* Says how far loading has come, at most every 50 ms and at the end. */
struct load_meter {
    struct load_progress progress;
    uint64_t done, total, reported_us;
};
void load_meter_add(struct load_meter *m, uint64_t bytes);

/* Where pieces wait between file and device: the device's host memory, or ordinary memory when it
 * gives none; in use while a pipeline runs. */
struct staging {
    const struct model *m;
    bool pinned;
    uint64_t bytes; /* how much it was */
};
void staging_use(struct staging *s, const struct model *m, struct pipeline *p);

void weights_sort(struct plan *plan); /* into file order */

/* Reads every item's share and packs it. *asked: bytes requested of the file by this rank. */
int weights_read(struct model *m, const struct gguf *g, const struct plan *plan,
                 const struct model_options *o, struct load_progress progress, uint64_t *asked,
                 struct err_text *err);

/* Tells the other ranks of this host not to wait: these weights came from elsewhere. */
void weights_skip(const struct model *m, const struct model_options *o);

#endif
