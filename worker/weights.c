/* worker/weights.c: this rank's weights from the file to the device. See weights.h.
 *
 *   scout:    advises the kernel of this rank's part of the window ahead ── page cache
 *   readers:  pread of a piece; a cut by columns is gathered           ── ring of slots
 *   caller:   mat_pack, put                                            ── device
 *
 * Owns: the three while they run.  Called by: load.c.
 * Fails how: see weights.h.  Limits: PIECE_BYTES of staging times the slots of the ring.
 * Tested by: tests/unit/test_load.c, tests/kernels/test_model.c
 *
 * The file is walked in its own order, so that ranks that start together want the same bytes at
 * about the same time. Rows and heads are contiguous in the file and each rank reads its own only;
 * a cut by columns is a short run in every row (144 of 1152 bytes at eight ranks), less than any
 * device reads at once, so there whole rows are read by every rank, from the device once and from
 * the page cache by the others (convoy.h bounds how far apart they are).
 */
#include "worker/weights.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "worker/convoy.h"
#include "worker/pipeline.h"

#define READERS           4
#define SLOTS             8
#define PIECE_BYTES       ((size_t)8 << 20)
#define ADVICE_BYTES      ((uint64_t)128 << 10) /* the kernel cuts off longer advice */
#define PROGRESS_EVERY_US 50000

/* So much of an item as is read and packed at once: whole matrices, or a band of rows of one. */
struct piece {
    int item;
    int64_t at, n_mats;   /* matrices of the share */
    int64_t row, n_rows;  /* of each */
    uint64_t asked_bytes; /* of the file */
    uint64_t position;    /* in the convoy; the same for all ranks */
};

struct reading {
    const struct model *m;
    const struct gguf *g;
    const struct plan *plan;
    size_t piece_bytes;
    struct piece *pieces;
    int64_t n_pieces, cap_pieces;
    size_t slot_bytes, bounce_bytes;
    uint64_t end; /* position behind the last tensor */
    float *vector;
    size_t vector_bytes;
    struct convoy *convoy;
    struct load_meter meter;
    atomic_bool scout_stop;
};

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

void load_meter_add(struct load_meter *m, uint64_t bytes) {
    m->done += bytes;
    uint64_t now = now_us();
    if (!m->progress.report || (now - m->reported_us < PROGRESS_EVERY_US && m->done < m->total))
        return;
    m->reported_us = now;
    m->progress.report(m->progress.user, m->done, m->total);
}

/* ---- staging ----------------------------------------------------------------------------- */

/* An accelerator's driver copies ordinary memory through a buffer of its own, piece by piece; what it
 * knows by address goes over the bus in one go. */
static void *staging_alloc(void *from, size_t bytes) {
    struct staging *s = from;
    void *p = s->m->k->host_alloc(s->m->ctx, bytes);
    s->pinned = p != NULL;
    s->bytes = bytes;
    return p ? p : aligned_alloc(PIPELINE_ALIGN, bytes);
}

static void staging_free(void *from, void *p) {
    const struct staging *s = from;
    if (s->pinned)
        s->m->k->host_free(s->m->ctx, p);
    else
        free(p);
}

void staging_use(struct staging *s, const struct model *m, struct pipeline *p) {
    *s = (struct staging){.m = m};
    p->slots_alloc = staging_alloc;
    p->slots_free = staging_free;
    p->from = s;
}

/* ---- cutting the plan into pieces -------------------------------------------------------- */

static int in_file_order(const void *a, const void *b) {
    const struct plan_item *x = a, *y = b;
    const struct gguf_tensor *t = x->need.tensor, *u = y->need.tensor;
    if (t->part != u->part) return t->part < u->part ? -1 : 1;
    if (t->offset != u->offset) return t->offset < u->offset ? -1 : 1;
    return x->offset < y->offset ? -1 : 1; /* tied embeddings stand in the plan twice */
}

static bool same_as_before(const struct plan *p, int i) {
    return i > 0 && p->items[i - 1].need.tensor == p->items[i].need.tensor;
}

static size_t run_bytes(const struct plan_item *it) {
    return (size_t)ktype_row_bytes((int)it->need.tensor->type, it->cols);
}

/* Bytes read for a row of the share. */
static size_t row_asked(const struct plan_item *it) {
    return it->need.cut == CUT_COLS ? (size_t)it->need.tensor->row_bytes : run_bytes(it);
}

static int add_piece(struct reading *r, struct piece p, uint64_t from, struct err_text *err) {
    const struct plan_item *it = &r->plan->items[p.item];
    if (r->n_pieces == r->cap_pieces) {
        int64_t cap = MAX(1024, 2 * r->cap_pieces);
        struct piece *grown = realloc(r->pieces, (size_t)cap * sizeof *grown);
        if (!grown)
            return err_set(err, ERR_NOMEM, "loading: expected memory for %lld pieces, found none",
                           (long long)cap);
        r->pieces = grown;
        r->cap_pieces = cap;
    }
    int64_t rows = p.n_mats * p.n_rows, before = p.at * it->rows + p.row;
    p.asked_bytes = row_asked(it) * (uint64_t)rows;
    p.position = from + (uint64_t)((double)it->need.tensor->bytes * (double)before /
                                   (double)(it->count * it->rows));
    r->slot_bytes = MAX(r->slot_bytes, run_bytes(it) * (size_t)rows);
    if (it->need.cut == CUT_COLS)
        r->bounce_bytes = MAX(r->bounce_bytes, MAX((size_t)it->need.tensor->row_bytes,
                                                   MIN(r->piece_bytes, (size_t)p.asked_bytes)));
    if (it->vector) r->vector_bytes = MAX(r->vector_bytes, (size_t)it->bytes);
    r->meter.total += p.asked_bytes;
    r->pieces[r->n_pieces++] = p;
    return OK;
}

/* Small matrices together, large ones in bands: about piece_bytes of the file each. */
static int cut_item(struct reading *r, int i, uint64_t from, struct err_text *err) {
    const struct plan_item *it = &r->plan->items[i];
    size_t matrix = row_asked(it) * (size_t)it->rows;
    int64_t together = MAX((int64_t)(r->piece_bytes / MAX(matrix, (size_t)1)), 1);
    int64_t band = it->rows;
    if (!it->vector && matrix > r->piece_bytes)
        band = MAX((int64_t)(r->piece_bytes / row_asked(it)) / K_BAND_ROWS, 1) * K_BAND_ROWS;
    if (it->bytes == 0) return OK; /* others have it all */
    for (int64_t at = 0; at < it->count; at += together)
        for (int64_t row = 0; row < it->rows; row += band)
            TRY(add_piece(r,
                          (struct piece){.item = i,
                                         .at = at,
                                         .n_mats = MIN(together, it->count - at),
                                         .row = row,
                                         .n_rows = MIN(band, it->rows - row)},
                          from, err));
    return OK;
}

static int cut_plan(struct reading *r, struct err_text *err) {
    for (int i = 0; i < r->plan->n_items; i++) {
        uint64_t from = r->end;
        if (same_as_before(r->plan, i))
            from -= r->plan->items[i].need.tensor->bytes;
        else
            r->end += r->plan->items[i].need.tensor->bytes;
        TRY(cut_item(r, i, from, err));
    }
    return OK;
}

/* ---- reading ----------------------------------------------------------------------------- */

static int read_at(const struct reading *r, const struct gguf_tensor *t, uint64_t offset, void *dst,
                   size_t n, struct err_text *err) {
    int fd = gguf_part_fd(r->g, t->part);
    if (fd < 0) { /* parsed from memory */
        memcpy(dst, t->data + (offset - t->offset), n);
        return OK;
    }
    for (size_t at = 0; at < n;) {
        ssize_t got = pread(fd, (char *)dst + at, n - at, (off_t)(offset + at));
        if (got > 0) at += (size_t)got;
        if (got > 0 || (got < 0 && errno == EINTR)) continue;
        return err_set(err, got < 0 ? ERR_SYS : ERR_FORMAT,
                       "%.300s: %s: expected %zu bytes at %llu, found: %s",
                       gguf_part_path(r->g, t->part), t->name, n - at,
                       (unsigned long long)(offset + at),
                       got < 0 ? strerror(errno) : "the file ends; it was cut while it was read");
    }
    return OK;
}

/* Whole rows from `offset` on, of each the run that is ours. */
static int gather(const struct reading *r, const struct plan_item *it, uint64_t offset,
                  int64_t rows, uint8_t *slot, uint8_t *bounce, struct err_text *err) {
    const struct gguf_tensor *t = it->need.tensor;
    size_t run = run_bytes(it), row_bytes = (size_t)t->row_bytes;
    size_t skip = (size_t)ktype_row_bytes((int)t->type, it->first);
    int64_t step = (int64_t)(r->bounce_bytes / row_bytes);
    for (int64_t at = 0; at < rows; at += step) {
        int64_t n = MIN(step, rows - at);
        TRY(read_at(r, t, offset + (uint64_t)at * row_bytes, bounce, (size_t)n * row_bytes, err));
        for (int64_t i = 0; i < n; i++)
            memcpy(slot + (size_t)(at + i) * run,
                   bounce + (size_t)i * row_bytes + skip, run);
    }
    return OK;
}

static int fill(void *user, int64_t n, uint8_t *slot, uint8_t *bounce, const atomic_bool *stop,
                struct err_text *err) {
    const struct reading *r = user;
    const struct piece *p = &r->pieces[n];
    const struct plan_item *it = &r->plan->items[p->item];
    const struct gguf_tensor *t = it->need.tensor;
    uint64_t matrix = t->row_bytes * (uint64_t)it->need.rows;
    int64_t first = p->at, rows = p->n_mats * p->n_rows, row = p->row;
    if (!convoy_wait(r->convoy, p->position, stop)) return OK; /* somebody else has failed */
    if (it->need.cut == CUT_STACK) first += it->first;
    if (it->need.cut == CUT_ROWS) row += it->first;
    uint64_t offset = t->offset + (uint64_t)first * matrix + (uint64_t)row * t->row_bytes;
    if (it->need.cut == CUT_COLS) return gather(r, it, offset, rows, slot, bounce, err);
    if (it->need.cut != CUT_ROWS)
        return read_at(r, t, offset, slot, (size_t)rows * t->row_bytes, err);
    size_t bytes = (size_t)p->n_rows * t->row_bytes;
    for (int64_t i = 0; i < p->n_mats; i++)
        TRY(read_at(r, t, offset + (uint64_t)i * matrix, slot + (size_t)i * bytes, bytes, err));
    return OK;
}

/* ---- packing ----------------------------------------------------------------------------- */

static void pack(const struct model *m, const struct plan_item *it, const struct piece *p,
                 const uint8_t *slot) {
    size_t matrix = m->k->mat_bytes(it->mat->type, 1, it->rows, it->cols);
    for (int64_t i = 0; i < p->n_mats; i++) {
        struct kmat band = *it->mat;
        band.count = 1;
        band.rows = p->n_rows;
        band.data = (char *)it->mat->data + (size_t)(p->at + i) * matrix;
        if (p->row) /* a multiple of K_BAND_ROWS, so this is where the band stands */
            band.data = (char *)band.data + m->k->mat_bytes(band.type, 1, p->row, it->cols);
        m->k->mat_pack(m->ctx, &band, 0, slot + (size_t)(i * p->n_rows) * run_bytes(it));
        it->mat->layout = band.layout;
    }
}

static int take(void *user, int64_t n, const uint8_t *slot, struct err_text *err) {
    UNUSED(err);
    struct reading *r = user;
    const struct piece *p = &r->pieces[n];
    const struct plan_item *it = &r->plan->items[p->item];
    if (it->vector) {
        kdequant_row((int)it->need.tensor->type, slot, r->vector, it->cols);
        r->m->k->put(r->m->ctx, it->vector, r->vector, (size_t)it->bytes);
        r->m->k->sync(r->m->ctx); /* the buffer is used again */
    } else {
        pack(r->m, it, p, slot);
    }
    convoy_move(r->convoy, n + 1 < r->n_pieces ? r->pieces[n + 1].position : r->end);
    load_meter_add(&r->meter, p->asked_bytes);
    return OK;
}

/* ---- the scout --------------------------------------------------------------------------- */

static void advise(const struct reading *r, const struct gguf_tensor *t, uint64_t at, uint64_t n) {
    for (uint64_t i = 0; i < n; i += ADVICE_BYTES)
        posix_fadvise(gguf_part_fd(r->g, t->part), (off_t)(t->offset + at + i),
                      (off_t)MIN(ADVICE_BYTES, n - i), POSIX_FADV_WILLNEED);
}

/* Walks ahead of the readers; every rank of the convoy advises its part. */
static void *scout(void *user) {
    struct reading *r = user;
    uint64_t position = 0, extent = 0;
    for (int i = 0; i < r->plan->n_items; i++) {
        const struct gguf_tensor *t = r->plan->items[i].need.tensor;
        if (same_as_before(r->plan, i)) continue;
        for (uint64_t at = 0; at < t->bytes; at += r->piece_bytes) {
            if (!convoy_is_mine(r->convoy, extent++)) continue;
            if (!convoy_wait(r->convoy, position + at, &r->scout_stop)) return NULL;
            advise(r, t, at, MIN((uint64_t)r->piece_bytes, t->bytes - at));
        }
        position += t->bytes;
    }
    return NULL;
}

/* Without the scout reading is only slower. */
static int run(struct reading *r, uint64_t *staging_bytes, struct err_text *err) {
    struct staging staging;
    struct pipeline p = {.n_pieces = r->n_pieces,
                               .slot_bytes = r->slot_bytes,
                               .bounce_bytes = r->bounce_bytes,
                               .n_threads = (int)MIN(READERS, MAX(r->n_pieces, 1)),
                               .n_slots = SLOTS,
                               .fill = fill,
                               .take = take,
                               .user = r};
    pthread_t thread;
    staging_use(&staging, r->m, &p);
    bool scouted = gguf_part_fd(r->g, 0) >= 0 && pthread_create(&thread, NULL, scout, r) == 0;
    int rc = pipeline_run(&p, err);
    atomic_store(&r->scout_stop, true);
    if (scouted) pthread_join(thread, NULL);
    *staging_bytes = staging.bytes;
    return rc;
}

void weights_sort(struct plan *plan) {
    qsort(plan->items, (size_t)plan->n_items, sizeof *plan->items, in_file_order);
}

static struct convoy_options convoy_of(const struct model *m, const struct model_options *o) {
    return (struct convoy_options){.path = o->load_share,
                                   .rank = m->rank,
                                   .world = m->world,
                                   .window_bytes = o->load_window_bytes};
}

void weights_skip(const struct model *m, const struct model_options *o) {
    const struct convoy_options co = convoy_of(m, o);
    struct convoy *c;
    if (convoy_open(&c, &co, NULL) == OK) convoy_close(c);
}

int weights_read(struct model *m, const struct gguf *g, const struct plan *plan,
                 const struct model_options *o, struct load_progress progress, uint64_t *asked,
                 struct err_text *err) {
    struct reading r = {.m = m,
                        .g = g,
                        .plan = plan,
                        .piece_bytes = o->load_piece_bytes ? o->load_piece_bytes : PIECE_BYTES,
                        .meter = {.progress = progress}};
    const struct convoy_options co = convoy_of(m, o);
    TRY(convoy_open(&r.convoy, &co, err));
    int rc = cut_plan(&r, err);
    if (rc == OK && r.vector_bytes && !(r.vector = malloc(r.vector_bytes)))
        rc = err_set(err, ERR_NOMEM, "loading: expected %zu bytes, found none", r.vector_bytes);
    if (rc == OK) rc = run(&r, &m->staging_bytes, err);
    m->k->sync(m->ctx);
    convoy_close(r.convoy);
    free(r.vector);
    free(r.pieces);
    *asked = r.meter.done;
    return rc;
}
