/* worker/pipeline.c: pieces filled by a few threads, taken in order by one. See pipeline.h.
 *
 * Owns: the threads and the ring.  Called by: weights.c, shard.c.
 * Fails how: see pipeline.h.  Limits: PIPELINE_*.  Tested by: tests/unit/test_load.c
 *
 * A piece's slot is its number modulo the ring's size, and a thread may claim a piece only when the
 * piece that had the slot before has been taken. So memory is bounded, order costs nothing, and
 * there is one lock, held for a few instructions per piece of megabytes.
 *
 * Plain pread on threads, and not io_uring or a mapping: it works on every file system and in every
 * container, a file cut short is a short read and not a SIGBUS, and a handful of threads with large
 * reads fills any device we have met.
 */
#include "worker/pipeline.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct ring {
    const struct pipeline *p;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint8_t *slots;
    size_t slot_bytes;
    int64_t next, taken; /* first piece not claimed, first not taken */
    bool filled[PIPELINE_SLOTS_MAX];
    atomic_bool stop;
    int rc; /* the first failure, and its sentence */
    struct err_text err;
};

struct reader {
    struct ring *ring;
    uint8_t *bounce;
    pthread_t thread;
};

static size_t align_up(size_t n) {
    return (n + PIPELINE_ALIGN - 1) / PIPELINE_ALIGN * PIPELINE_ALIGN;
}

static uint8_t *slot_of(const struct ring *r, int64_t piece) {
    return r->slots + (size_t)(piece % r->p->n_slots) * r->slot_bytes;
}

/* With the lock held. */
static void note_failure(struct ring *r, int rc, const struct err_text *err) {
    if (r->rc == OK) {
        r->rc = rc;
        r->err = *err;
    }
    atomic_store(&r->stop, true);
}

static void *read_pieces(void *user) {
    struct reader *me = user;
    struct ring *r = me->ring;
    const struct pipeline *p = r->p;
    pthread_mutex_lock(&r->lock);
    for (;;) {
        while (!atomic_load(&r->stop) && r->next < p->n_pieces && r->next >= r->taken + p->n_slots)
            pthread_cond_wait(&r->changed, &r->lock);
        if (atomic_load(&r->stop) || r->next >= p->n_pieces) break;
        int64_t piece = r->next++;
        pthread_mutex_unlock(&r->lock);
        struct err_text err = {0};
        int rc = p->fill(p->user, piece, slot_of(r, piece), me->bounce, &r->stop, &err);
        pthread_mutex_lock(&r->lock);
        r->filled[piece % p->n_slots] = true;
        if (rc < 0) note_failure(r, rc, &err);
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

static void take_pieces(struct ring *r) {
    const struct pipeline *p = r->p;
    pthread_mutex_lock(&r->lock);
    while (!atomic_load(&r->stop) && r->taken < p->n_pieces) {
        bool *filled = &r->filled[r->taken % p->n_slots];
        if (!*filled) {
            pthread_cond_wait(&r->changed, &r->lock);
            continue;
        }
        *filled = false;
        pthread_mutex_unlock(&r->lock);
        struct err_text err = {0};
        int rc = p->take(p->user, r->taken, slot_of(r, r->taken), &err);
        pthread_mutex_lock(&r->lock);
        r->taken++;
        if (rc < 0) note_failure(r, rc, &err);
        pthread_cond_broadcast(&r->changed);
    }
    pthread_cond_broadcast(&r->changed); /* those who wait for a slot see the stop */
    pthread_mutex_unlock(&r->lock);
}

static int run_threads(struct ring *r, struct reader *readers, struct err_text *err) {
    const struct pipeline *p = r->p;
    int n = 0, failed = 0;
    while (n < p->n_threads && !failed) {
        readers[n].ring = r;
        failed = pthread_create(&readers[n].thread, NULL, read_pieces, &readers[n]);
        n += !failed;
    }
    if (n == 0)
        return err_set(err, ERR_SYS, "loading: expected %d threads, found none: %s", p->n_threads,
                       strerror(failed));
    take_pieces(r);
    for (int i = 0; i < n; i++) pthread_join(readers[i].thread, NULL);
    if (r->rc < 0 && err) *err = r->err;
    return r->rc;
}

int pipeline_run(const struct pipeline *p, struct err_text *err) {
    assert(p->n_threads >= 1 && p->n_threads <= PIPELINE_THREADS_MAX);
    assert(p->n_slots >= 1 && p->n_slots <= PIPELINE_SLOTS_MAX && p->slot_bytes > 0);
    if (p->n_pieces == 0) return OK;
    struct ring r = {.p = p, .slot_bytes = align_up(p->slot_bytes)};
    struct reader readers[PIPELINE_THREADS_MAX] = {0};
    size_t bytes = r.slot_bytes * (size_t)p->n_slots, bounce = align_up(p->bounce_bytes);
    r.slots =
        p->slots_alloc ? p->slots_alloc(p->from, bytes) : aligned_alloc(PIPELINE_ALIGN, bytes);
    uint8_t *bounces = bounce ? aligned_alloc(PIPELINE_ALIGN, bounce * (size_t)p->n_threads) : NULL;
    int rc = OK;
    if (!r.slots || (bounce && !bounces))
        rc = err_set(err, ERR_NOMEM, "loading: expected %zu bytes of staging memory, found none",
                     bytes + bounce * (size_t)p->n_threads);
    for (int i = 0; i < p->n_threads && bounces; i++)
        readers[i].bounce = bounces + (size_t)i * bounce;
    pthread_mutex_init(&r.lock, NULL);
    pthread_cond_init(&r.changed, NULL);
    if (rc == OK) rc = run_threads(&r, readers, err);
    pthread_cond_destroy(&r.changed);
    pthread_mutex_destroy(&r.lock);
    free(bounces);
    if (r.slots && p->slots_alloc)
        p->slots_free(p->from, r.slots);
    else
        free(r.slots);
    return rc;
}
