/* worker/shard.c: this rank's weights in a file for the next start. See shard.h.
 *
 * Owns: nothing between calls.  Called by: load.c.  Fails how: see shard.h.
 * Limits: BLOCK_BYTES per checksum.  Tested by: tests/unit/test_shard.c
 *
 * A GGUF file gives a rank its slices of expert matrices as short runs, to be cut out and repacked;
 * this file is one long read. It is bound to its makers by the digest in its name, so two models,
 * two worlds or two builds with other layouts live side by side in one folder. The backend's layout
 * is not a number that somebody must remember to raise: a small matrix of each type is packed, and
 * what comes out is part of the digest.
 *
 * Reads go through the page cache, not around it: the usual reason for a second start is that a
 * rank died minutes after the first, and then memory still holds the file.
 */
#include "worker/shard.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "worker/pipeline.h"

#define MAGIC       "OCTSHARD"
#define VERSION     1
#define HEAD_BYTES  4096
#define BLOCK_BYTES ((uint64_t)1 << 20)
#define PIECE_BYTES (8 * BLOCK_BYTES)
#define READERS     4
#define SLOTS       8
#define PROBE_ROWS  32
#define PROBE_COLS  1024 /* whole blocks of every type */

struct header {
    char magic[8];
    uint32_t version, n_layouts;
    uint64_t digest, bytes, n_blocks;
    uint64_t checksum; /* of this with 0 here, then of the table */
};

/* ---- checksums --------------------------------------------------------------------------- */

static uint64_t mix(uint64_t h, uint64_t word) {
    h = (h ^ word) * 0x9e3779b97f4a7c15ull;
    return h ^ h >> 29;
}

/* Four independent lanes of eight bytes, so that memory and not the multiplier is the bound. Each
 * step is a bijection of its lane: one wrong word is always noticed. */
static uint64_t checksum(uint64_t seed, const void *data, size_t n) {
    uint64_t lane[4] = {seed, seed + 1, seed + 2, seed + 3}, h = n;
    const uint8_t *p = data;
    for (; n >= 32; n -= 32, p += 32) {
        uint64_t word[4];
        memcpy(word, p, sizeof word);
        for (int i = 0; i < 4; i++) lane[i] = mix(lane[i], word[i]);
    }
    for (int i = 0; i < 4; i++) h = mix(h, lane[i]);
    for (; n > 0; n--) h = mix(h, *p++);
    return h;
}

/* ---- the digest -------------------------------------------------------------------------- */

static uint64_t digest_file(uint64_t h, const struct gguf *g) {
    for (int i = 0; i < gguf_parts(g); i++) {
        struct stat st = {0};
        if (gguf_part_fd(g, i) >= 0) fstat(gguf_part_fd(g, i), &st);
        h = mix(h, (uint64_t)st.st_size);
        h = mix(h, (uint64_t)st.st_mtim.tv_sec);
        h = mix(h, (uint64_t)st.st_mtim.tv_nsec);
    }
    for (uint64_t i = 0; i < gguf_n_kv(g); i++) {
        const struct gguf_kv *kv = gguf_kv_at(g, i);
        h = checksum(h, kv->key.p, (size_t)kv->key.n);
        h = checksum(h, kv->data, (size_t)kv->data_bytes);
    }
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        h = checksum(h, t->name, strlen(t->name));
        h = checksum(h, t->ne, sizeof t->ne);
        h = mix(mix(mix(h, t->type), (uint64_t)t->part), t->offset);
    }
    return h;
}

/* What the backend makes of a known matrix of this type. */
static uint64_t digest_layout(uint64_t h, const struct model *m, int type) {
    size_t file_bytes = (size_t)(PROBE_ROWS * ktype_row_bytes(type, PROBE_COLS));
    size_t bytes = m->k->mat_bytes(type, 1, PROBE_ROWS, PROBE_COLS);
    struct kmat mat = {.type = type, .count = 1, .rows = PROBE_ROWS, .cols = PROBE_COLS};
    uint8_t *host = malloc(MAX(file_bytes, bytes));
    mat.data = m->k->alloc(m->ctx, bytes);
    if (host && mat.data) {
        for (size_t i = 0; i < file_bytes; i++) host[i] = (uint8_t)(i * 2654435761u >> 13);
        m->k->zero(m->ctx, mat.data, bytes);
        m->k->mat_pack(m->ctx, &mat, 0, host);
        m->k->get(m->ctx, host, mat.data, bytes);
        h = mix(checksum(h, host, bytes), (uint64_t)mat.layout);
    }
    if (mat.data) m->k->free(m->ctx, mat.data);
    free(host);
    return h;
}

static uint64_t digest_plan(uint64_t h, const struct model *m, const struct plan *plan) {
    bool seen[KT_MAX] = {0};
    h = checksum(h, m->k->name, strlen(m->k->name));
    h = mix(mix(mix(h, VERSION), (uint64_t)m->rank), (uint64_t)m->world);
    for (int i = 0; i < plan->n_items; i++) {
        const struct plan_item *it = &plan->items[i];
        int type = (int)it->need.tensor->type;
        h = mix(mix(mix(h, it->offset), it->bytes), (uint64_t)it->need.cut);
        if (it->mat && !seen[type]) h = digest_layout(h, m, type);
        seen[type] |= it->mat != NULL;
    }
    return h;
}

void shard_init(struct shard *s, const struct model *m, const struct gguf *g,
                const struct plan *plan, const char *dir) {
    *s = (struct shard){.m = m, .plan = plan};
    s->digest = digest_plan(digest_file(VERSION, g), m, plan);
    snprintf(s->path, sizeof s->path, "%.440s/%016llx-%d-of-%d.shard", dir,
             (unsigned long long)s->digest, m->rank, m->world);
}

/* ---- the table: layouts, then checksums -------------------------------------------------- */

struct table {
    struct header head;
    int32_t *layouts; /* [n_items] */
    uint64_t *sums;   /* [n_blocks] in the same memory */
    size_t bytes;
    uint64_t data_at; /* where the weights begin in the file */
};

static int table_new(struct table *t, const struct shard *s, struct err_text *err) {
    uint64_t n_blocks = (s->m->weight_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
    size_t layouts = ((size_t)s->plan->n_items * sizeof *t->layouts + 7) / 8 * 8;
    *t = (struct table){.head = {.magic = MAGIC,
                                 .version = VERSION,
                                 .n_layouts = (uint32_t)s->plan->n_items,
                                 .digest = s->digest,
                                 .bytes = s->m->weight_bytes,
                                 .n_blocks = n_blocks},
                        .bytes = layouts + (size_t)n_blocks * sizeof *t->sums};
    t->layouts = calloc(1, MAX(t->bytes, (size_t)1));
    if (!t->layouts)
        return err_set(err, ERR_NOMEM, "%s: expected %zu bytes for its table, found none", s->path,
                       t->bytes);
    t->sums = (uint64_t *)(void *)((char *)t->layouts + layouts);
    t->data_at = HEAD_BYTES + (t->bytes + HEAD_BYTES - 1) / HEAD_BYTES * HEAD_BYTES;
    return OK;
}

static uint64_t table_checksum(const struct table *t) {
    struct header head = t->head;
    head.checksum = 0;
    return checksum(checksum(1, &head, sizeof head), t->layouts, t->bytes);
}

/* ---- reading ----------------------------------------------------------------------------- */

struct shard_reading {
    const struct shard *s;
    struct table table;
    int fd;
    struct load_meter meter;
};

static int read_at(const struct shard_reading *r, uint64_t offset, void *dst, size_t n,
                   struct err_text *err) {
    for (size_t at = 0; at < n;) {
        ssize_t got = pread(r->fd, (char *)dst + at, n - at, (off_t)(offset + at));
        if (got > 0) at += (size_t)got;
        if (got > 0 || (got < 0 && errno == EINTR)) continue;
        return err_set(err, got < 0 ? ERR_SYS : ERR_FORMAT,
                       "%s: expected %zu bytes at %llu, found: %s", r->s->path, n - at,
                       (unsigned long long)(offset + at),
                       got < 0 ? strerror(errno) : "the end of the file");
    }
    return OK;
}

static size_t piece_bytes(const struct shard_reading *r, int64_t piece) {
    return (size_t)MIN(PIECE_BYTES, r->table.head.bytes - (uint64_t)piece * PIECE_BYTES);
}

static int fill(void *user, int64_t piece, uint8_t *slot, uint8_t *bounce, const atomic_bool *stop,
                struct err_text *err) {
    const struct shard_reading *r = user;
    uint64_t at = (uint64_t)piece * PIECE_BYTES;
    size_t n = piece_bytes(r, piece);
    UNUSED(bounce);
    UNUSED(stop);
    TRY(read_at(r, r->table.data_at + at, slot, n, err));
    for (size_t i = 0; i < n; i += BLOCK_BYTES) {
        uint64_t block = (at + i) / BLOCK_BYTES;
        uint64_t sum = checksum(block, slot + i, MIN((size_t)BLOCK_BYTES, n - i));
        if (sum != r->table.sums[block])
            return err_set(err, ERR_FORMAT,
                           "%s: block %llu: expected checksum %016llx, found %016llx", r->s->path,
                           (unsigned long long)block, (unsigned long long)r->table.sums[block],
                           (unsigned long long)sum);
    }
    return OK;
}

static int take(void *user, int64_t piece, const uint8_t *slot, struct err_text *err) {
    struct shard_reading *r = user;
    const struct model *m = r->s->m;
    size_t n = piece_bytes(r, piece);
    UNUSED(err);
    m->k->put(m->ctx, (char *)m->arena[ARENA_WEIGHTS] + (uint64_t)piece * PIECE_BYTES, slot, n);
    m->k->sync(m->ctx); /* the slot is used again */
    load_meter_add(&r->meter, n);
    return OK;
}

static int read_table(struct shard_reading *r, struct err_text *err) {
    struct table *t = &r->table;
    struct header want = t->head;
    TRY(read_at(r, 0, &t->head, sizeof t->head, err));
    want.checksum = t->head.checksum;
    if (memcmp(&want, &t->head, sizeof want))
        return err_set(err, ERR_FORMAT, "%s: expected the header of digest %016llx, found another",
                       r->s->path, (unsigned long long)r->s->digest);
    TRY(read_at(r, HEAD_BYTES, t->layouts, t->bytes, err));
    if (table_checksum(t) != t->head.checksum)
        return err_set(err, ERR_FORMAT, "%s: expected table checksum %016llx, found %016llx",
                       r->s->path, (unsigned long long)t->head.checksum,
                       (unsigned long long)table_checksum(t));
    return OK;
}

static int read_weights(struct shard_reading *r, uint64_t *staging_bytes, struct err_text *err) {
    struct staging staging;
    struct pipeline p = {.n_pieces =
                             (int64_t)((r->table.head.bytes + PIECE_BYTES - 1) / PIECE_BYTES),
                         .slot_bytes = (size_t)MIN(PIECE_BYTES, r->table.head.bytes),
                         .n_threads = READERS,
                         .n_slots = SLOTS,
                         .fill = fill,
                         .take = take,
                         .user = r};
    staging_use(&staging, r->s->m, &p);
    TRY(pipeline_run(&p, err));
    *staging_bytes = staging.bytes;
    for (int i = 0; i < r->s->plan->n_items; i++)
        if (r->s->plan->items[i].mat) r->s->plan->items[i].mat->layout = r->table.layouts[i];
    return OK;
}

int shard_read(const struct shard *s, struct load_progress progress, struct model *m,
               struct err_text *err) {
    struct shard_reading r = {.s = s, .meter = {.progress = progress}};
    r.fd = open(s->path, O_RDONLY | O_CLOEXEC);
    if (r.fd < 0)
        return err_set(err, errno == ENOENT ? ERR_NOT_FOUND : ERR_SYS,
                       "%s: expected to read it, found: %s", s->path, strerror(errno));
    r.meter.total = s->m->weight_bytes;
    posix_fadvise(r.fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    int rc = table_new(&r.table, s, err);
    if (rc == OK) rc = read_table(&r, err);
    if (rc == OK) rc = read_weights(&r, &m->staging_bytes, err);
    free(r.table.layouts);
    close(r.fd);
    m->asked_bytes = r.meter.done;
    return rc;
}

/* ---- writing ----------------------------------------------------------------------------- */

static int write_at(int fd, uint64_t offset, const void *src, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t put = pwrite(fd, (const char *)src + at, n - at, (off_t)(offset + at));
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return ERR_SYS;
        at += (size_t)put;
    }
    return OK;
}

/* The gaps between items were never written: what the memory held before stays off the disk. */
static void clear_gaps(const struct shard *s) {
    const struct model *m = s->m;
    for (int i = 0; i < s->plan->n_items; i++) {
        uint64_t end = s->plan->items[i].offset + s->plan->items[i].bytes;
        size_t gap = (size_t)((ARENA_ALIGN - end % ARENA_ALIGN) % ARENA_ALIGN);
        m->k->zero(m->ctx, (char *)m->arena[ARENA_WEIGHTS] + end, gap);
    }
}

static int write_weights(const struct shard *s, struct table *t, int fd) {
    uint8_t *buf = malloc(PIECE_BYTES);
    int rc = buf ? OK : ERR_NOMEM;
    for (uint64_t at = 0; at < t->head.bytes && rc == OK; at += PIECE_BYTES) {
        size_t n = (size_t)MIN(PIECE_BYTES, t->head.bytes - at);
        s->m->k->get(s->m->ctx, buf, (char *)s->m->arena[ARENA_WEIGHTS] + at, n);
        for (size_t i = 0; i < n; i += BLOCK_BYTES) {
            uint64_t block = (at + i) / BLOCK_BYTES;
            t->sums[block] = checksum(block, buf + i, MIN((size_t)BLOCK_BYTES, n - i));
        }
        rc = write_at(fd, t->data_at + at, buf, n);
    }
    free(buf);
    return rc;
}

static int write_all(const struct shard *s, struct table *t, int fd) {
    for (int i = 0; i < s->plan->n_items; i++)
        t->layouts[i] = s->plan->items[i].mat ? s->plan->items[i].mat->layout : 0;
    TRY(write_weights(s, t, fd));
    t->head.checksum = table_checksum(t);
    TRY(write_at(fd, HEAD_BYTES, t->layouts, t->bytes));
    TRY(write_at(fd, 0, &t->head, sizeof t->head));
    return fsync(fd) < 0 ? ERR_SYS : OK;
}

/* The folder is made if only its last part is missing. */
static int open_temporary(const struct shard *s, const char *temporary) {
    char dir[sizeof s->path];
    snprintf(dir, sizeof dir, "%s", s->path);
    *strrchr(dir, '/') = 0;
    mkdir(dir, 0777);
    return open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
}

int shard_write(const struct shard *s, struct err_text *err) {
    char temporary[sizeof s->path + 32];
    struct table t;
    snprintf(temporary, sizeof temporary, "%s.%d", s->path, (int)getpid());
    int rc = table_new(&t, s, err), fd = -1;
    if (rc < 0) return rc;
    clear_gaps(s);
    fd = open_temporary(s, temporary);
    rc = fd < 0 ? ERR_SYS : write_all(s, &t, fd);
    if (rc == OK && rename(temporary, s->path) < 0) rc = ERR_SYS;
    if (rc < 0) {
        err_set(err, rc, "%s: expected to write %llu bytes, found: %s", s->path,
                (unsigned long long)(t.data_at + t.head.bytes),
                rc == ERR_SYS ? strerror(errno) : err_name(rc));
        if (fd >= 0) unlink(temporary);
    }
    if (fd >= 0) close(fd);
    free(t.layouts);
    return rc;
}
