/* worker/coll_open_cpu.c: the collectives of the CPU worker: none or shared memory.
 *
 * Owns: nothing to speak of.  Called by: main.c of octavo-worker.
 * Fails how: ERR_SETUP for a collective that only devices have.
 * Limits: none.  Tested by: tests/unit/test_worker.c
 */
#include <stdlib.h>
#include <string.h>

#include "worker/coll_open.h"

struct coll_maker {
    int world;
};

int coll_maker_new(struct coll_maker **out, const struct kernels *k, struct kctx *ctx, int rank,
                   int world, const char *collective, struct err_text *err) {
    UNUSED(k), UNUSED(ctx), UNUSED(rank);
    if (strcmp(collective, "auto") != 0 && strcmp(collective, "shm") != 0)
        return err_set(err, ERR_SETUP, "--collective: expected auto or shm on the CPU, found %s",
                       collective);
    struct coll_maker *m = calloc(1, sizeof *m);
    if (!m) return err_set(err, ERR_NOMEM, "--collective: expected memory, found none");
    m->world = world;
    *out = m;
    return OK;
}

void coll_maker_free(struct coll_maker *m) {
    free(m);
}

int coll_maker_open(struct coll **out, struct coll_maker *m, struct coll *shm, uint32_t generation,
                    struct err_text *err) {
    if (m->world > 1) {
        *out = shm;
        return OK;
    }
    if (coll_open_none(out) < 0)
        return err_set(err, ERR_NOMEM, "--collective: expected memory, found none");
    (*out)->generation = generation;
    return OK;
}
