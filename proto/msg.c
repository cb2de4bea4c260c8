/* proto/msg.c: packs messages to msgpack and back.
 *
 * Owns: nothing; pure.  Called by: wire.c, tests.
 * Fails how: unpacking returns ERR_FORMAT, ERR_LIMIT or ERR_VERSION; packing a message that
 * breaks a limit is a bug of ours and asserts.
 * Limits: LIMIT_STEP_*, LIMIT_MESSAGE_BYTES, OBJECTS_MAX.
 * Tested by: tests/unit/test_msg.c, tests/fuzz/fuzz_msg.c
 *
 * Each message is described once: walk_X names its fields in order, and struct io either packs or
 * reads them, so the two directions cannot drift apart. Ranges stand beside the fields; what
 * depends on several fields (an entry's tokens lie inside the step's) is checked after reading.
 * Only fields that are there are written: a struct msg is 160 KB and is never cleared as a whole.
 *
 * msgpack-c reserves memory for as many elements as an array claims before it has seen one, so
 * scan() first walks the bytes and holds every claim against what is there. It also counts, which
 * lets one allocation of the right size serve the whole message.
 */
#include "proto/msg.h"

#include <float.h>
#include <math.h>
#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

/* The largest message is a STEP: every entry with its nine fields, every token, every page. */
#define OBJECTS_MAX (LIMIT_STEP_ENTRIES * 10 + LIMIT_STEP_ROWS + LIMIT_STEP_PAGES + 4096)
static_assert(OBJECTS_MAX > 3 * LIMIT_COPY_RUNS, "a COPY must fit too");
#define PAGES_OF_CONTEXT (LIMIT_CONTEXT_TOKENS / LIMIT_PAGE_TOKENS)

struct io {
    msgpack_packer *pk; /* packing, else NULL */
    const msgpack_object *at, *end;
    int *rc; /* the first error; everything after it is a no-op */
};

static void fail(struct io *io, int code) {
    if (*io->rc == OK) *io->rc = code;
}

/* The next object if reading is still going well and it has the wanted type. */
static const msgpack_object *next(struct io *io, msgpack_object_type type) {
    if (*io->rc < 0) return NULL;
    if (io->at == io->end || io->at->type != type) return fail(io, ERR_FORMAT), NULL;
    return io->at++;
}

/* ---- one function per kind of field ---- */

static void io_u64(struct io *io, uint64_t *v) {
    if (io->pk) {
        msgpack_pack_uint64(io->pk, *v);
        return;
    }
    const msgpack_object *o = next(io, MSGPACK_OBJECT_POSITIVE_INTEGER);
    if (o) *v = o->via.u64;
}

static void io_u32(struct io *io, uint32_t *v) {
    uint64_t wide = *v;
    io_u64(io, &wide);
    if (wide > UINT32_MAX) fail(io, ERR_LIMIT);
    else *v = (uint32_t)wide;
}

static void io_i64(struct io *io, int64_t *v, int64_t min, int64_t max) {
    if (io->pk) {
        assert(*v >= min && *v <= max);
        msgpack_pack_int64(io->pk, *v);
        return;
    }
    bool negative = io->at != io->end && io->at->type == MSGPACK_OBJECT_NEGATIVE_INTEGER;
    const msgpack_object *o = next(io, negative ? MSGPACK_OBJECT_NEGATIVE_INTEGER
                                                : MSGPACK_OBJECT_POSITIVE_INTEGER);
    if (!o) return;
    if (!negative && o->via.u64 > INT64_MAX) return fail(io, ERR_LIMIT);
    int64_t got = o->via.i64;
    if (got < min || got > max) fail(io, ERR_LIMIT);
    else *v = got;
}

static void io_i32(struct io *io, int32_t *v, int32_t min, int32_t max) {
    int64_t wide = io->pk ? *v : min;
    io_i64(io, &wide, min, max);
    *v = (int32_t)wide;
}

static void io_bool(struct io *io, bool *v) {
    if (io->pk) {
        if (*v) msgpack_pack_true(io->pk);
        else msgpack_pack_false(io->pk);
        return;
    }
    const msgpack_object *o = next(io, MSGPACK_OBJECT_BOOLEAN);
    if (o) *v = o->via.boolean;
}

static void io_f64(struct io *io, double *v) {
    if (io->pk) {
        msgpack_pack_double(io->pk, *v);
        return;
    }
    const msgpack_object *o = next(io, MSGPACK_OBJECT_FLOAT64);
    if (o) *v = o->via.f64;
}

/* Any float, infinities and NaN included. */
static void io_f32(struct io *io, float *v) {
    if (io->pk) {
        msgpack_pack_float(io->pk, *v);
        return;
    }
    const msgpack_object *o = next(io, MSGPACK_OBJECT_FLOAT32);
    if (o) *v = (float)o->via.f64;
}

static void io_f32_in(struct io *io, float *v, float min, float max) {
    assert(!io->pk || (*v >= min && *v <= max));
    io_f32(io, v);
    if (*io->rc == OK && !(*v >= min && *v <= max)) fail(io, ERR_LIMIT); /* NaN too */
}

/* cap counts the terminator. */
static void io_str(struct io *io, char *s, size_t cap) {
    if (io->pk) {
        size_t n = strnlen(s, cap);
        assert(n < cap);
        msgpack_pack_str_with_body(io->pk, s, n);
        return;
    }
    const msgpack_object *o = next(io, MSGPACK_OBJECT_STR);
    if (!o) return;
    if (o->via.str.size >= cap) return fail(io, ERR_LIMIT);
    if (o->via.str.size && memchr(o->via.str.ptr, 0, o->via.str.size)) return fail(io, ERR_FORMAT);
    if (o->via.str.size) memcpy(s, o->via.str.ptr, o->via.str.size);
    s[o->via.str.size] = 0;
}

/* Opens an array of *n elements, at most max; the elements are walked through the returned io. */
static struct io io_list(struct io *io, int32_t *n, int32_t max) {
    struct io inner = {.pk = io->pk, .rc = io->rc};
    if (io->pk) {
        assert(*n >= 0 && *n <= max);
        msgpack_pack_array(io->pk, (size_t)*n);
        return inner;
    }
    const msgpack_object *o = next(io, MSGPACK_OBJECT_ARRAY);
    if (o && o->via.array.size > (uint32_t)max) fail(io, ERR_LIMIT);
    bool good = o && *io->rc == OK;
    *n = good ? (int32_t)o->via.array.size : 0;
    if (good) {
        inner.at = o->via.array.ptr;
        inner.end = inner.at + o->via.array.size;
    }
    return inner;
}

/* Opens an array of exactly n fields. */
static struct io io_record(struct io *io, int32_t n) {
    int32_t found = n;
    struct io inner = io_list(io, &found, INT32_MAX);
    if (found != n) fail(io, ERR_FORMAT);
    return inner;
}

static void io_i32s(struct io *io, int32_t *v, int32_t *n, int32_t max, int32_t least) {
    struct io list = io_list(io, n, max);
    for (int32_t i = 0; i < *n && *io->rc == OK; i++) io_i32(&list, &v[i], least, INT32_MAX);
}

/* ---- one function per message: its fields, in the order of the struct ---- */

static void walk_hello(struct io *io, struct msg_hello *h) {
    io_u32(io, &h->protocol);
    /* The fields of another protocol are not ours to judge. */
    if (!io->pk && *io->rc == OK && h->protocol != MSG_PROTOCOL) return fail(io, ERR_VERSION);
    io_u64(io, &h->limits);
    io_str(io, h->build, sizeof h->build);
    io_str(io, h->cookie, sizeof h->cookie);
    io_i32(io, &h->rank, 0, LIMIT_RANKS - 1);
    io_i64(io, &h->pid, 1, INT32_MAX);
    io_u64(io, &h->start_time);
    io_str(io, h->device, sizeof h->device);
}

static void walk_progress(struct io *io, struct msg_progress *p) {
    io_u64(io, &p->bytes);
    io_u64(io, &p->total);
}

static void walk_loaded(struct io *io, struct msg_loaded *l) {
    io_u64(io, &l->weight_bytes);
    io_u64(io, &l->scratch_bytes);
    io_u64(io, &l->page_bytes);
    io_u64(io, &l->free_bytes);
    io_u64(io, &l->shm_bytes);
    io_f64(io, &l->seconds);
}

static void walk_join(struct io *io, struct msg_join *j) {
    io_u32(io, &j->generation);
    io_i32(io, &j->world, 1, LIMIT_RANKS);
    io_i64(io, &j->pages, 0, INT32_MAX); /* page ids are int32 */
    io_str(io, j->shm_path, sizeof j->shm_path);
    io_u64(io, &j->shm_bytes);
    io_bool(io, &j->caches_valid);
}

static void walk_sampling(struct io *io, struct msg_sampling *s) {
    io_f32_in(io, &s->temperature, 0, FLT_MAX);
    io_f32_in(io, &s->top_p, 0, 1);
    io_f32_in(io, &s->min_p, 0, 1);
    io_i32(io, &s->top_k, 0, INT32_MAX);
    io_f32_in(io, &s->repetition, FLT_MIN, FLT_MAX);
    io_f32_in(io, &s->presence, -FLT_MAX, FLT_MAX);
    io_f32_in(io, &s->frequency, -FLT_MAX, FLT_MAX);
    io_u64(io, &s->seed);
    io_i32(io, &s->top_logprobs, 0, LIMIT_TOP_LOGPROBS);
    int32_t n = s->n_bias;
    io_i32s(io, s->bias_token, &s->n_bias, LIMIT_BIAS, 0);
    struct io values = io_list(io, io->pk ? &s->n_bias : &n, LIMIT_BIAS);
    if (!io->pk && n != s->n_bias) fail(io, ERR_FORMAT);
    for (int32_t i = 0; i < s->n_bias && *io->rc == OK; i++)
        io_f32_in(&values, &s->bias_value[i], -HUGE_VALF, HUGE_VALF);
}

static void walk_admit(struct io *io, struct msg_admit *a) {
    io_i32(io, &a->slot, 0, LIMIT_SLOTS - 1);
    io_u32(io, &a->slot_generation);
    io_i32(io, &a->n_prompt, 0, LIMIT_CONTEXT_TOKENS);
    struct io sampling = io_record(io, 11);
    walk_sampling(&sampling, &a->sampling);
}

static void walk_entry(struct io *io, struct msg_entry *e) {
    io_i32(io, &e->slot, 0, LIMIT_SLOTS - 1);
    io_u32(io, &e->slot_generation);
    io_i32(io, &e->pos, 0, LIMIT_CONTEXT_TOKENS - 1);
    io_i32(io, &e->count, 1, LIMIT_STEP_ROWS);
    io_i32(io, &e->samples, 0, LIMIT_STEP_SAMPLES);
    io_i32(io, &e->token_at, -1, LIMIT_STEP_ROWS - 1);
    io_i32(io, &e->page_first, 0, PAGES_OF_CONTEXT);
    io_i32(io, &e->page_at, 0, LIMIT_STEP_PAGES);
    io_i32(io, &e->n_pages, 0, LIMIT_STEP_PAGES);
}

/* The ranges of the single fields hold, so no sum here can wrap. */
static bool entry_fits(const struct msg_step *s, const struct msg_entry *e) {
    if (e->pos + e->count > LIMIT_CONTEXT_TOKENS || e->samples > e->count) return false;
    if (e->token_at < 0 ? e->count != 1 : e->token_at + e->count > s->n_tokens) return false;
    return e->page_at + e->n_pages <= s->n_pages && e->page_first + e->n_pages <= PAGES_OF_CONTEXT;
}

static bool step_fits(const struct msg_step *s) {
    int32_t rows = 0, samples = 0;
    for (int32_t i = 0; i < s->n_entries; i++) {
        if (!entry_fits(s, &s->entries[i])) return false;
        rows += s->entries[i].count;
        samples += s->entries[i].samples;
    }
    return rows <= LIMIT_STEP_ROWS && samples <= LIMIT_STEP_SAMPLES;
}

static void walk_step(struct io *io, struct msg_step *s) {
    assert(!io->pk || step_fits(s));
    io_u64(io, &s->id);
    io_u32(io, &s->generation);
    struct io entries = io_list(io, &s->n_entries, LIMIT_STEP_ENTRIES);
    for (int32_t i = 0; i < s->n_entries && *io->rc == OK; i++) {
        struct io entry = io_record(&entries, 9);
        walk_entry(&entry, &s->entries[i]);
    }
    io_i32s(io, s->tokens, &s->n_tokens, LIMIT_STEP_ROWS, 0);
    io_i32s(io, s->pages, &s->n_pages, LIMIT_STEP_PAGES, 0);
    if (*io->rc == OK && !step_fits(s)) fail(io, ERR_LIMIT);
}

static void walk_copy(struct io *io, struct msg_copy *c) {
    io_u64(io, &c->id);
    io_u32(io, &c->generation);
    io_i32(io, &c->root, 0, LIMIT_RANKS - 1);
    io_u32(io, &c->needs);
    struct io runs = io_list(io, &c->n_runs, LIMIT_COPY_RUNS);
    for (int32_t i = 0; i < c->n_runs && *io->rc == OK; i++) {
        struct io run = io_record(&runs, 2);
        io_i32(&run, &c->runs[i].first, 0, INT32_MAX - 1);
        io_i32(&run, &c->runs[i].count, 1, INT32_MAX);
        if (*io->rc == OK && c->runs[i].count > INT32_MAX - c->runs[i].first) fail(io, ERR_LIMIT);
    }
}

static void walk_token(struct io *io, struct msg_token *t) {
    io_i32(io, &t->slot, 0, LIMIT_SLOTS - 1);
    io_u32(io, &t->slot_generation);
    io_i32(io, &t->pos, 0, LIMIT_CONTEXT_TOKENS);
    io_i32(io, &t->token, -1, INT32_MAX);
    io_f32(io, &t->logprob);
    struct io top = io_list(io, &t->n_top, LIMIT_TOP_LOGPROBS);
    for (int32_t i = 0; i < t->n_top && *io->rc == OK; i++) {
        struct io pair = io_record(&top, 2);
        io_i32(&pair, &t->top_token[i], -1, INT32_MAX);
        io_f32(&pair, &t->top_logprob[i]);
    }
}

static void walk_tokens(struct io *io, struct msg_tokens *t) {
    io_u64(io, &t->step_id);
    io_u32(io, &t->generation);
    io_u64(io, &t->step_us);
    struct io list = io_list(io, &t->n, LIMIT_STEP_SAMPLES);
    for (int32_t i = 0; i < t->n && *io->rc == OK; i++) {
        struct io token = io_record(&list, 6);
        walk_token(&token, &t->tokens[i]);
    }
}

static void walk_done(struct io *io, struct msg_done *d) {
    io_u64(io, &d->step_id);
    io_u32(io, &d->generation);
    io_u64(io, &d->step_us);
    io_u64(io, &d->wait_us);
}

static void walk_beat(struct io *io, struct msg_beat *b) {
    io_i32(io, &b->state, 0, WORKER_STATES - 1);
    io_u64(io, &b->last_step);
    io_u64(io, &b->last_step_age_us);
    io_u64(io, &b->memory_used_bytes);
    io_u64(io, &b->memory_free_bytes);
    io_u64(io, &b->load_bytes);
    io_u64(io, &b->load_total);
}

static void walk_failed(struct io *io, struct msg_failed *f) {
    io_i32(io, &f->exit_code, 0, 255);
    io_str(io, f->text, sizeof f->text);
}

static const uint8_t n_fields[MSG_TYPES] = {
    [MSG_HELLO] = 8,  [MSG_PROGRESS] = 2, [MSG_LOADED] = 6, [MSG_JOIN] = 6,    [MSG_JOINED] = 1,
    [MSG_ADMIT] = 4,  [MSG_STEP] = 5,     [MSG_TOKENS] = 4, [MSG_DONE] = 4,    [MSG_BEAT] = 7,
    [MSG_ABORT] = 1,  [MSG_ABORTED] = 1,  [MSG_STOP] = 0,   [MSG_FAILED] = 2,
    [MSG_COPY] = 5,   [MSG_RESTORE] = 5,
};

static void walk(struct io *io, struct msg *m) {
    switch (m->type) {
    case MSG_HELLO: walk_hello(io, &m->hello); return;
    case MSG_PROGRESS: walk_progress(io, &m->progress); return;
    case MSG_LOADED: walk_loaded(io, &m->loaded); return;
    case MSG_JOIN: walk_join(io, &m->join); return;
    case MSG_JOINED: io_u32(io, &m->joined.generation); return;
    case MSG_ADMIT: walk_admit(io, &m->admit); return;
    case MSG_STEP:
    case MSG_RESTORE: walk_step(io, &m->step); return;
    case MSG_COPY: walk_copy(io, &m->copy); return;
    case MSG_TOKENS: walk_tokens(io, &m->tokens); return;
    case MSG_DONE: walk_done(io, &m->done); return;
    case MSG_BEAT: walk_beat(io, &m->beat); return;
    case MSG_ABORT: io_u32(io, &m->abort.generation); return;
    case MSG_ABORTED: io_u32(io, &m->aborted.generation); return;
    case MSG_STOP: return;
    case MSG_FAILED: walk_failed(io, &m->failed); return;
    case MSG_TYPES: break;
    }
    fail(io, ERR_FORMAT);
}

/* ---- packing ---- */

static int append(void *data, const char *p, size_t n) {
    struct msg_buf *b = data;
    if (n > b->cap - b->n) {
        size_t cap = MAX(MAX(2 * b->cap, b->n + n), (size_t)512);
        uint8_t *grown = realloc(b->p, cap);
        if (!grown) {
            b->n = SIZE_MAX; /* sticks: nothing fits any more */
            return -1;
        }
        b->p = grown;
        b->cap = cap;
    }
    memcpy(b->p + b->n, p, n);
    b->n += n;
    return 0;
}

static int append_or_stick(void *data, const char *p, size_t n) {
    return ((struct msg_buf *)data)->n == SIZE_MAX ? -1 : append(data, p, n);
}

void msg_buf_deinit(struct msg_buf *b) {
    free(b->p);
    *b = (struct msg_buf){0};
}

int msg_pack(struct msg_buf *b, const struct msg *m) {
    assert(m->type >= MSG_HELLO && m->type < MSG_TYPES);
    msgpack_packer pk;
    int rc = OK;
    struct io io = {.pk = &pk, .rc = &rc};
    b->n = 0;
    msgpack_packer_init(&pk, b, append_or_stick);
    msgpack_pack_array(&pk, 1u + n_fields[m->type]);
    msgpack_pack_int32(&pk, m->type);
    walk(&io, (struct msg *)m); /* packing only reads */
    assert(rc == OK);
    if (b->n == SIZE_MAX) {
        b->n = 0;
        return ERR_NOMEM;
    }
    assert(b->n <= LIMIT_MESSAGE_BYTES);
    return OK;
}

/* ---- unpacking ---- */

/* What follows the first byte of an object: bytes of a number or of a length, and what the length
 * counts. Maps, binaries and extensions stand in no message of ours. */
enum follows { NUMBER, TEXT, ELEMENTS, REFUSED };

static enum follows look_at(uint8_t b, unsigned *head, uint64_t *len) {
    *head = 0;
    *len = 0;
    if (b < 0x80 || b >= 0xe0) return NUMBER;
    if (b < 0x90) return REFUSED;
    if (b < 0xa0) return *len = b & 15, ELEMENTS;
    if (b < 0xc0) return *len = b & 31, TEXT;
    switch (b) {
    case 0xc2: case 0xc3: return NUMBER; /* bool */
    case 0xca: *head = 4; return NUMBER; /* floats */
    case 0xcb: *head = 8; return NUMBER;
    case 0xcc: case 0xcd: case 0xce: case 0xcf: *head = 1u << (b - 0xcc); return NUMBER;
    case 0xd0: case 0xd1: case 0xd2: case 0xd3: *head = 1u << (b - 0xd0); return NUMBER;
    case 0xd9: case 0xda: case 0xdb: *head = 1u << (b - 0xd9); return TEXT;
    case 0xdc: case 0xdd: *head = 2u << (b - 0xdc); return ELEMENTS;
    default: return REFUSED;
    }
}

/* OK if p[0…n-1] is exactly one object, all of whose claims fit; counts the objects in it. */
static int scan(const uint8_t *p, size_t n, size_t *objects) {
    size_t at = 0, owed = 1;
    for (*objects = 0; owed > 0; owed--) {
        unsigned head;
        uint64_t len;
        if (owed > n - at) return ERR_FORMAT; /* each takes a byte at least */
        if (++*objects > OBJECTS_MAX) return ERR_LIMIT;
        enum follows kind = look_at(p[at++], &head, &len);
        if (kind == REFUSED || head > n - at) return ERR_FORMAT;
        for (unsigned i = 0; kind != NUMBER && i < head; i++) len = len << 8 | p[at + i];
        at += head;
        if (len > n - at) return ERR_FORMAT;
        if (kind == TEXT) at += len;
        if (kind == ELEMENTS) owed += len;
    }
    return at == n ? OK : ERR_FORMAT;
}

static int read_root(struct msg *m, const msgpack_object *root) {
    int rc = OK;
    if (root->type != MSGPACK_OBJECT_ARRAY) return ERR_FORMAT;
    struct io io = {.at = root->via.array.ptr, .end = root->via.array.ptr + root->via.array.size,
                    .rc = &rc};
    int32_t type = 0;
    io_i32(&io, &type, MSG_HELLO, MSG_TYPES - 1);
    if (rc < 0) return ERR_FORMAT;
    m->type = (enum msg_type)type;
    if (m->type != MSG_HELLO && io.end - io.at != n_fields[type]) return ERR_FORMAT;
    walk(&io, m);
    if (rc == OK && io.at != io.end) rc = ERR_FORMAT; /* HELLO with more fields than ours */
    return rc;
}

int msg_unpack(struct msg *m, const uint8_t *p, size_t n) {
    size_t objects;
    if (n > LIMIT_MESSAGE_BYTES) return ERR_LIMIT;
    TRY(scan(p, n, &objects));
    msgpack_zone zone;
    msgpack_object root;
    if (!msgpack_zone_init(&zone, (objects + 8) * sizeof root)) return ERR_NOMEM;
    size_t off = 0;
    int got = msgpack_unpack((const char *)p, n, &off, &zone, &root);
    int rc = got == MSGPACK_UNPACK_SUCCESS && off == n ? read_root(m, &root) : ERR_FORMAT;
    msgpack_zone_destroy(&zone);
    return rc;
}
