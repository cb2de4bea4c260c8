/* worker/copy.c: cache pages from one rank to those that lack them. See copy.h.
 *
 * Owns: nothing.  Called by: main.c.  Fails how: see copy.h.
 * Limits: LIMIT_COPY_RUNS; pieces are as large as the residual of the largest step.
 * Tested by: tests/unit/test_step.c, tests/faults/test_rank_restart.py
 *
 * The latent and the index cache are not split: every rank holds the same bits, so any survivor can
 * give them. They travel by the broadcast of the present generation, whatever carries it, in runs
 * of neighbouring pages, because what costs is the meeting and not the bytes. A rank that needs
 * nothing takes part with the residual's scratch as its sink: its own pages stay untouched, even
 * when the generation is aborted in the middle and what a broadcast left may be rubbish.
 */
#include "worker/copy.h"

static int check(const struct model *m, const struct msg_copy *c, struct err_text *err) {
    if (c->root < 0 || c->root >= m->world || c->needs >> m->world || c->needs >> c->root & 1)
        return err_set(err, ERR_FORMAT,
                       "copy: expected a rank of %d and others that need it, found %d and %x",
                       m->world, c->root, c->needs);
    for (int i = 0; i < c->n_runs; i++)
        if (c->runs[i].first < 0 || c->runs[i].count < 1 ||
            (int64_t)c->runs[i].first + c->runs[i].count > m->n_pages)
            return err_set(err, ERR_FORMAT, "copy: expected pages below %lld, found %d from %d on",
                           (long long)m->n_pages, c->runs[i].count, c->runs[i].first);
    return OK;
}

/* One buffer's part of a run. cache: [pages, page_bytes]. */
static int copy_run(struct model *m, struct coll *coll, const struct msg_copy *c, dptr cache,
                    size_t page_bytes, const struct msg_run *run) {
    int64_t most = (int64_t)m->max_rows * m->hp.dims.d_model * (int64_t)sizeof *m->s.h;
    int64_t bytes = (int64_t)page_bytes * run->count;
    bool mine = m->rank == c->root || c->needs >> m->rank & 1;
    char *at = (char *)cache + page_bytes * (size_t)run->first;
    for (int64_t done = 0; done < bytes; done += most)
        TRY(coll_broadcast(coll, mine ? (void *)(at + done) : m->s.h, MIN(most, bytes - done),
                           c->root));
    return OK;
}

int copy_pages(struct model *m, struct coll *coll, const struct msg_copy *c, struct err_text *err) {
    TRY(check(m, c, err));
    size_t latent = K_PAGE * m->k->latent_bytes(&m->hp.dims);
    size_t index = K_PAGE * m->k->index_bytes(&m->hp.dims);
    for (int i = 0; i < c->n_runs; i++)
        for (int l = 0; l < m->hp.n_layers; l++) {
            const struct kcache *cache = &m->layers[l].cache;
            TRY(copy_run(m, coll, c, cache->latent, latent, &c->runs[i]));
            if (m->layers[l].has_index) TRY(copy_run(m, coll, c, cache->index, index, &c->runs[i]));
        }
    m->k->sync(m->ctx);
    return coll_check(coll);
}
