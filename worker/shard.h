/* worker/shard.h: this rank's weights as they lie on the device, kept in a file for the next start.
 *
 *   DIR/<digest>-<rank>-of-<world>.shard: header · layouts, checksums · the weights' arena
 *
 * The digest covers everything that the bytes depend on: sizes, times and header of the model's
 * files, rank and world, backend, plan, and the backend's layouts as a probe finds them.
 *
 * Owns: nothing between calls.  Called by: load.c.
 * Fails how: shard_read says why the file is not used, shard_write why there is none; neither keeps
 * the rank from loading.  Limits: none of its own.  Tested by: tests/unit/test_shard.c
 */
#ifndef OCTAVO_WORKER_SHARD_H
#define OCTAVO_WORKER_SHARD_H

#include "worker/weights.h"

struct shard {
    const struct model *m;
    const struct plan *plan;
    uint64_t digest;
    char path[512];
};

/* The plan is pointed and in file order. */
void shard_init(struct shard *s, const struct model *m, const struct gguf *g,
                const struct plan *plan, const char *dir);

/* OK: all weights are on the device, and m, the shard's own, says what was asked and staged.
 * ERR_NOT_FOUND: there is no file. Anything else: it does not fit or is damaged, and the weights'
 * memory holds rubbish. */
int shard_read(const struct shard *s, struct load_progress progress, struct model *m,
               struct err_text *err);

/* Writes the loaded weights; the file appears whole or not at all. */
int shard_write(const struct shard *s, struct err_text *err);

#endif
