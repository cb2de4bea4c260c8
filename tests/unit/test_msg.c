/* tests/unit/test_msg.c: packing and unpacking are each other's inverse, and strict.
 *
 * Random messages fill every field of every struct (OCTAVO_SEED repeats a run); wrong bytes are
 * written with msgpack itself, one row per thing that is wrong.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

#include "proto/msg.h"

static uint64_t seed = 1, rng;
static struct msg *a, *b; /* 160 KB each: not on the stack */

static int setup(void **state) {
    UNUSED(state);
    if (getenv("OCTAVO_SEED")) seed = strtoull(getenv("OCTAVO_SEED"), NULL, 10);
    rng = seed;
    a = calloc(1, sizeof *a);
    b = calloc(1, sizeof *b);
    return a && b ? 0 : -1;
}

static int teardown(void **state) {
    UNUSED(state);
    free(a);
    free(b);
    return 0;
}

/* ---- random messages: every field gets a value that is probably not zero ---- */

static uint64_t random_u64(void) { /* xorshift64* */
    rng = rng ? rng : 88172645463325252ull;
    rng ^= rng >> 12;
    rng ^= rng << 25;
    rng ^= rng >> 27;
    return rng * 2685821657736338717ull >> (rng & 63);
}

static int32_t random_in(int32_t min, int32_t max) { /* the ends are likely */
    uint64_t r = random_u64();
    if (r % 8 == 0) return max;
    if (r % 8 == 1) return min;
    return (int32_t)(min + (int64_t)(random_u64() % ((uint64_t)((int64_t)max - min) + 1)));
}

static float random_f32(float min, float max) {
    return min + (max - min) * (float)random_in(0, 1 << 20) / (1 << 20);
}

static void random_text(char *s, size_t cap) {
    size_t n = (size_t)random_in(0, (int32_t)cap - 1);
    for (size_t i = 0; i < n; i++) s[i] = (char)random_in(1, 255);
}

static void random_sampling(struct msg_sampling *s) {
    s->temperature = random_f32(0, 2);
    s->top_p = random_f32(0, 1);
    s->min_p = random_f32(0, 1);
    s->top_k = random_in(0, INT32_MAX);
    s->repetition = random_f32(0.5f, 2);
    s->presence = random_f32(-2, 2);
    s->frequency = random_f32(-2, 2);
    s->seed = random_u64();
    s->top_logprobs = random_in(0, LIMIT_TOP_LOGPROBS);
    s->n_bias = random_in(0, LIMIT_BIAS);
    for (int i = 0; i < s->n_bias; i++) {
        s->bias_token[i] = random_in(0, INT32_MAX);
        s->bias_value[i] = i % 7 ? random_f32(-100, 100) : -INFINITY;
    }
}

static void random_step(struct msg_step *s) {
    s->id = random_u64();
    s->generation = (uint32_t)random_u64();
    s->n_entries = random_in(0, LIMIT_STEP_ENTRIES);
    s->n_pages = random_in(0, LIMIT_STEP_PAGES);
    s->n_tokens = random_in(0, LIMIT_STEP_ROWS);
    int32_t rows = LIMIT_STEP_ROWS, samples = LIMIT_STEP_SAMPLES;
    for (int i = 0; i < s->n_entries; i++) {
        struct msg_entry *e = &s->entries[i];
        bool last = s->n_tokens == 0 || random_in(0, 3) == 0;
        int32_t most = MIN(s->n_tokens, rows - (s->n_entries - i - 1));
        e->slot = random_in(0, LIMIT_SLOTS - 1);
        e->slot_generation = (uint32_t)random_u64();
        e->count = last ? 1 : random_in(1, MAX(1, MIN(most, 100)));
        e->pos = random_in(0, LIMIT_CONTEXT_TOKENS - e->count);
        e->token_at = last ? -1 : random_in(0, s->n_tokens - e->count);
        e->samples = random_in(0, MIN(e->count, samples / 2));
        e->page_at = random_in(0, s->n_pages);
        e->n_pages = random_in(0, s->n_pages - e->page_at);
        e->page_first = random_in(0, LIMIT_CONTEXT_TOKENS / LIMIT_PAGE_TOKENS - e->n_pages);
        rows -= e->count;
        samples -= e->samples;
    }
    for (int i = 0; i < s->n_tokens; i++) s->tokens[i] = random_in(0, 200000);
    for (int i = 0; i < s->n_pages; i++) s->pages[i] = random_in(0, INT32_MAX);
}

static void random_copy(struct msg_copy *c) {
    c->id = random_u64();
    c->generation = (uint32_t)random_u64();
    c->root = random_in(0, LIMIT_RANKS - 1);
    c->needs = (uint32_t)random_u64();
    c->n_runs = random_in(0, LIMIT_COPY_RUNS);
    for (int i = 0; i < c->n_runs; i++) {
        c->runs[i].first = random_in(0, INT32_MAX - 1);
        c->runs[i].count = random_in(1, INT32_MAX - c->runs[i].first);
    }
}

static void random_tokens(struct msg_tokens *t) {
    t->step_id = random_u64();
    t->generation = (uint32_t)random_u64();
    t->step_us = random_u64();
    t->n = random_in(0, LIMIT_STEP_SAMPLES);
    for (int i = 0; i < t->n; i++) {
        struct msg_token *k = &t->tokens[i];
        k->slot = random_in(0, LIMIT_SLOTS - 1);
        k->slot_generation = (uint32_t)random_u64();
        k->pos = random_in(0, LIMIT_CONTEXT_TOKENS);
        k->token = random_in(-1, INT32_MAX);
        k->logprob = i % 9 ? random_f32(-30, 0) : -INFINITY;
        k->n_top = random_in(0, LIMIT_TOP_LOGPROBS);
        for (int j = 0; j < k->n_top; j++) {
            k->top_token[j] = random_in(0, INT32_MAX);
            k->top_logprob[j] = random_f32(-30, 0);
        }
    }
}

static void random_hello(struct msg_hello *h) {
    h->protocol = MSG_PROTOCOL;
    h->limits = random_u64();
    random_text(h->build, sizeof h->build);
    random_text(h->cookie, sizeof h->cookie);
    h->rank = random_in(0, LIMIT_RANKS - 1);
    h->pid = random_in(1, INT32_MAX);
    h->start_time = random_u64();
    random_text(h->device, sizeof h->device);
}

static void random_join(struct msg_join *j) {
    j->generation = (uint32_t)random_u64();
    j->world = random_in(1, LIMIT_RANKS);
    j->pages = random_in(0, INT32_MAX);
    random_text(j->shm_path, sizeof j->shm_path);
    j->shm_bytes = random_u64();
    j->caches_valid = random_u64() & 1;
}

static void random_message(struct msg *m, enum msg_type type) {
    m->type = type;
    switch (type) {
    case MSG_HELLO: random_hello(&m->hello); return;
    case MSG_PROGRESS: m->progress = (struct msg_progress){random_u64(), random_u64()}; return;
    case MSG_LOADED:
        m->loaded = (struct msg_loaded){random_u64(), random_u64(), random_u64(), random_u64(),
                                        random_u64(), (double)random_u64() / 3};
        return;
    case MSG_JOIN: random_join(&m->join); return;
    case MSG_JOINED:
    case MSG_ABORT:
    case MSG_ABORTED: m->abort.generation = (uint32_t)random_u64(); return;
    case MSG_ADMIT:
        m->admit.slot = random_in(0, LIMIT_SLOTS - 1);
        m->admit.slot_generation = (uint32_t)random_u64();
        m->admit.n_prompt = random_in(0, LIMIT_CONTEXT_TOKENS);
        random_sampling(&m->admit.sampling);
        return;
    case MSG_STEP:
    case MSG_RESTORE: random_step(&m->step); return;
    case MSG_COPY: random_copy(&m->copy); return;
    case MSG_TOKENS: random_tokens(&m->tokens); return;
    case MSG_DONE:
        m->done.step_id = random_u64();
        m->done.generation = (uint32_t)random_u64();
        m->done.step_us = random_u64();
        m->done.wait_us = random_u64();
        return;
    case MSG_BEAT:
        m->beat.state = random_in(0, WORKER_STATES - 1);
        m->beat.last_step = random_u64();
        m->beat.last_step_age_us = random_u64();
        m->beat.memory_used_bytes = random_u64();
        m->beat.memory_free_bytes = random_u64();
        m->beat.load_bytes = random_u64();
        m->beat.load_total = random_u64();
        return;
    case MSG_STOP: return;
    case MSG_FAILED:
        m->failed.exit_code = random_in(0, 3);
        random_text(m->failed.text, sizeof m->failed.text);
        return;
    case MSG_TYPES: break;
    }
    fail_msg("expected a random message for every type, found none for %d", (int)type);
}

/* ---- tests ---- */

static void every_field_of_every_message_survives_the_round_trip(void **state) {
    UNUSED(state);
    struct msg_buf buf = {0};
    for (int round = 0; round < 60; round++)
        for (int type = MSG_HELLO; type < MSG_TYPES; type++) {
            memset(a, 0, sizeof *a);
            memset(b, 0, sizeof *b);
            random_message(a, (enum msg_type)type);
            assert_int_equal(msg_pack(&buf, a), OK);
            int rc = msg_unpack(b, buf.p, buf.n);
            if (rc) fail_msg("OCTAVO_SEED=%llu type %d: expected ok, found %s",
                             (unsigned long long)seed, type, err_name(rc));
            if (memcmp(a, b, sizeof *a))
                fail_msg("OCTAVO_SEED=%llu type %d round %d: expected the same message, found "
                         "another", (unsigned long long)seed, type, round);
        }
    msg_buf_deinit(&buf);
    assert_null(buf.p);
}

static void the_largest_message_of_each_kind_fits(void **state) {
    UNUSED(state);
    struct msg_buf buf = {0};
    memset(a, 0, sizeof *a);
    a->type = MSG_STEP;
    struct msg_step *s = &a->step;
    s->id = UINT64_MAX;
    s->n_entries = LIMIT_STEP_ENTRIES;
    s->n_tokens = LIMIT_STEP_ROWS;
    s->n_pages = LIMIT_STEP_PAGES;
    for (int i = 0; i < s->n_entries; i++)
        s->entries[i] = (struct msg_entry){.slot = i, .slot_generation = UINT32_MAX, .count = 32,
                                           .pos = LIMIT_CONTEXT_TOKENS - 32, .samples = 1,
                                           .token_at = 32 * i, .n_pages = 32, .page_at = 32 * i};
    for (int i = 0; i < LIMIT_STEP_ROWS; i++) s->tokens[i] = s->pages[i] = INT32_MAX;
    assert_int_equal(msg_pack(&buf, a), OK);
    assert_int_equal(msg_unpack(b, buf.p, buf.n), OK);
    assert_memory_equal(&b->step, s, sizeof *s);
    msg_buf_deinit(&buf);
}

static void unpacking_touches_only_what_the_message_holds(void **state) {
    UNUSED(state);
    struct msg_buf buf = {0};
    memset(a, 0, sizeof *a);
    a->type = MSG_STEP;
    a->step.n_tokens = 2;
    assert_int_equal(msg_pack(&buf, a), OK);
    memset(b, 0xa5, sizeof *b);
    assert_int_equal(msg_unpack(b, buf.p, buf.n), OK);
    assert_int_equal(b->step.tokens[1], 0);
    assert_int_equal((uint32_t)b->step.tokens[2], 0xa5a5a5a5);
    assert_int_equal((uint32_t)b->step.pages[LIMIT_STEP_PAGES - 1], 0xa5a5a5a5);
    assert_int_equal((uint32_t)b->step.entries[0].slot, 0xa5a5a5a5);
    msg_buf_deinit(&buf);
}

static void a_message_cut_anywhere_or_with_bytes_after_it_is_refused(void **state) {
    UNUSED(state);
    struct msg_buf buf = {0};
    for (int type = MSG_HELLO; type < MSG_TYPES; type++) {
        memset(a, 0, sizeof *a);
        random_message(a, (enum msg_type)type);
        assert_int_equal(msg_pack(&buf, a), OK);
        size_t stride = buf.n > 4000 ? 37 : 1;
        for (size_t n = 0; n < buf.n; n += stride) {
            uint8_t *p = malloc(n + 1);
            memcpy(p, buf.p, n);
            assert_int_equal(msg_unpack(b, p, n), ERR_FORMAT);
            free(p);
        }
        uint8_t *longer = malloc(buf.n + 1);
        memcpy(longer, buf.p, buf.n);
        longer[buf.n] = 0xc2;
        assert_int_equal(msg_unpack(b, longer, buf.n + 1), ERR_FORMAT);
        free(longer);
    }
    msg_buf_deinit(&buf);
}

static void changed_bytes_are_refused_or_read_but_what_is_read_packs_again(void **state) {
    UNUSED(state);
    struct msg_buf buf = {0}, again = {0};
    int accepted = 0;
    for (int type = MSG_HELLO; type < MSG_TYPES; type++)
        for (int round = 0; round < 2000; round++) {
            memset(a, 0, sizeof *a);
            bool large = type == MSG_STEP || type == MSG_RESTORE || type == MSG_COPY;
            if (round % 100 == 0 || !large) random_message(a, (enum msg_type)type);
            else a->type = (enum msg_type)type;
            assert_int_equal(msg_pack(&buf, a), OK);
            size_t at = random_u64() % MIN(buf.n, 200u);
            buf.p[at] = (uint8_t)random_u64();
            if (msg_unpack(b, buf.p, buf.n) != OK) continue;
            accepted++;
            assert_int_equal(msg_pack(&again, b), OK);
            assert_int_equal(msg_unpack(a, again.p, again.n), OK);
        }
    assert_true(accepted > 0);
    msg_buf_deinit(&buf);
    msg_buf_deinit(&again);
}

#define RAW(s) (const uint8_t *)(s), sizeof(s) - 1

static const struct {
    const char *name;
    const uint8_t *p;
    size_t n;
    int expect;
} wrong_bytes[] = {
    {"nothing", RAW(""), ERR_FORMAT},
    {"a number", RAW("\x0d"), ERR_FORMAT},
    {"an empty array", RAW("\x90"), ERR_FORMAT},
    {"a map", RAW("\x81\x01\x02"), ERR_FORMAT},
    {"type 0", RAW("\x91\x00"), ERR_FORMAT},
    {"type 17", RAW("\x91\x11"), ERR_FORMAT},
    {"type -1", RAW("\x91\xff"), ERR_FORMAT},
    {"type as a string", RAW("\x91\xa1" "13"), ERR_FORMAT},
    {"type as a float", RAW("\x91\xca\x41\x50\0\0"), ERR_FORMAT},
    {"STOP with a field", RAW("\x92\x0d\x01"), ERR_FORMAT},
    {"ABORT without its field", RAW("\x91\x0b"), ERR_FORMAT},
    {"ABORT with nil", RAW("\x92\x0b\xc0"), ERR_FORMAT},
    {"ABORT with a bool", RAW("\x92\x0b\xc3"), ERR_FORMAT},
    {"ABORT -1", RAW("\x92\x0b\xff"), ERR_FORMAT},
    {"ABORT 2^32", RAW("\x92\x0b\xcf\0\0\0\x01\0\0\0\0"), ERR_LIMIT},
    {"binary", RAW("\x92\x0b\xc4\x01x"), ERR_FORMAT},
    {"extension", RAW("\x92\x0b\xd4\x01x"), ERR_FORMAT},
    {"byte c1", RAW("\x92\x0b\xc1"), ERR_FORMAT},
    {"an array of 2^32-1", RAW("\xdd\xff\xff\xff\xff\x0d"), ERR_FORMAT},
    {"nested arrays of 2^32-1",
     RAW("\x92\x07\xdd\xff\xff\xff\xff\xdd\xff\xff\xff\xff"), ERR_FORMAT},
    {"a string of 2^32-1", RAW("\x93\x0e\x01\xdb\xff\xff\xff\xff" "x"), ERR_FORMAT},
    {"FAILED with NUL in the text", RAW("\x93\x0e\x01\xa3" "a\0b"), ERR_FORMAT},
    {"FAILED exit 256", RAW("\x93\x0e\xcd\x01\0\xa1" "a"), ERR_LIMIT},
    {"BEAT of state 99", RAW("\x98\x0a\x63\1\1\1\1\1\1"), ERR_LIMIT},
    {"HELLO of protocol 2", RAW("\x92\x01\x02"), ERR_VERSION},
    {"HELLO without fields", RAW("\x91\x01"), ERR_FORMAT},
    {"HELLO of our protocol, too short", RAW("\x92\x01\x01"), ERR_FORMAT},
    {"HELLO rank 16", RAW("\x99\x01\x01\1\xa0\xa0\x10\1\1\xa0"), ERR_LIMIT},
    {"HELLO pid 0", RAW("\x99\x01\x01\1\xa0\xa0\x01\0\1\xa0"), ERR_LIMIT},
    {"HELLO with a field more", RAW("\x9a\x01\x01\1\xa0\xa0\x01\1\1\xa0\x01"), ERR_FORMAT},
    {"JOIN of no ranks", RAW("\x97\x04\1\0\1\xa0\1\xc2"), ERR_LIMIT},
    {"JOIN with -1 pages", RAW("\x97\x04\1\1\xff\xa0\1\xc2"), ERR_LIMIT},
    {"JOIN with 1 for true", RAW("\x97\x04\1\1\1\xa0\1\1"), ERR_FORMAT},
};

static void bytes_that_are_no_message_are_refused(void **state) {
    UNUSED(state);
    int failures = 0;
    for (size_t i = 0; i < ARRAY_LEN(wrong_bytes); i++) {
        uint8_t *p = malloc(wrong_bytes[i].n + 1);
        memcpy(p, wrong_bytes[i].p, wrong_bytes[i].n);
        int rc = msg_unpack(b, p, wrong_bytes[i].n);
        free(p);
        if (rc == wrong_bytes[i].expect) continue;
        failures++;
        print_error("%s: expected %s, found %s\n", wrong_bytes[i].name,
                    err_name(wrong_bytes[i].expect), err_name(rc));
    }
    assert_int_equal(failures, 0);
}

static void depth_and_size_are_bounded(void **state) {
    UNUSED(state);
    size_t n = LIMIT_MESSAGE_BYTES + 1;
    uint8_t *p = malloc(n);
    memset(p, 0x91, n); /* [[[[… */
    assert_int_equal(msg_unpack(b, p, n), ERR_LIMIT);
    assert_int_equal(msg_unpack(b, p, n - 1), ERR_LIMIT); /* too many objects */
    p[1999] = 1;
    assert_int_equal(msg_unpack(b, p, 2000), ERR_FORMAT); /* well formed, too deep */
    free(p);
}

/* STEP with one entry of nine numbers, n_tokens tokens and n_pages pages. */
static int unpack_step(const int64_t entry[9], int n_entries, int n_tokens, int64_t token,
                       int n_pages) {
    msgpack_sbuffer s;
    msgpack_packer pk;
    msgpack_sbuffer_init(&s);
    msgpack_packer_init(&pk, &s, msgpack_sbuffer_write);
    msgpack_pack_array(&pk, 6);
    msgpack_pack_int(&pk, MSG_STEP);
    msgpack_pack_int(&pk, 77);
    msgpack_pack_int(&pk, 1);
    msgpack_pack_array(&pk, (size_t)n_entries);
    for (int e = 0; e < n_entries; e++) {
        msgpack_pack_array(&pk, 9);
        for (int i = 0; i < 9; i++) msgpack_pack_int64(&pk, entry[i]);
    }
    msgpack_pack_array(&pk, (size_t)n_tokens);
    for (int i = 0; i < n_tokens; i++) msgpack_pack_int64(&pk, token);
    msgpack_pack_array(&pk, (size_t)n_pages);
    for (int i = 0; i < n_pages; i++) msgpack_pack_int64(&pk, 3);
    int rc = msg_unpack(b, (const uint8_t *)s.data, s.size);
    msgpack_sbuffer_destroy(&s);
    return rc;
}

/* slot, generation, pos, count, samples, token_at, page_first, page_at, n_pages */
static const struct {
    const char *name;
    int64_t entry[9];
    int n_entries, n_tokens;
    int64_t token;
    int n_pages, expect;
} steps[] = {
    {"a right one", {1, 2, 0, 4, 1, 0, 0, 0, 2}, 1, 4, 5, 2, OK},
    {"the sampled one", {1, 2, 9, 1, 1, -1, 0, 0, 0}, 1, 0, 5, 0, OK},
    {"no entries", {0}, 0, 0, 5, 0, OK},
    {"slot 256", {256, 2, 0, 4, 1, 0, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"slot -1", {-1, 2, 0, 4, 1, 0, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"pos -1", {1, 2, -1, 4, 1, 0, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"pos + count past the context",
     {1, 2, LIMIT_CONTEXT_TOKENS - 3, 4, 1, 0, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"count 0", {1, 2, 0, 0, 0, 0, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"count past the tokens", {1, 2, 0, 5, 1, 0, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"token_at + count past the tokens", {1, 2, 0, 4, 1, 1, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"token_at -2", {1, 2, 0, 1, 1, -2, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"two of the sampled one", {1, 2, 0, 2, 1, -1, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"more samples than tokens", {1, 2, 0, 4, 5, 0, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"page_at + n_pages past the pages", {1, 2, 0, 4, 1, 0, 0, 1, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"page_at -1", {1, 2, 0, 4, 1, 0, 0, -1, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"n_pages -1", {1, 2, 0, 4, 1, 0, 0, 1, -1}, 1, 4, 5, 2, ERR_LIMIT},
    {"page_first past the context",
     {1, 2, 0, 4, 1, 0, LIMIT_CONTEXT_TOKENS / LIMIT_PAGE_TOKENS - 1, 0, 2},
     1, 4, 5, 2, ERR_LIMIT},
    {"count 2^31", {1, 2, 0, 1ll << 31, 1, 0, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"count 2^32 + 1", {1, 2, 0, (1ll << 32) + 1, 1, 0, 0, 0, 2}, 1, 4, 5, 2, ERR_LIMIT},
    {"257 entries", {1, 2, 9, 1, 0, -1, 0, 0, 0}, 257, 0, 5, 0, ERR_LIMIT},
    {"8193 tokens", {1, 2, 9, 1, 0, -1, 0, 0, 0}, 1, 8193, 5, 0, ERR_LIMIT},
    {"8193 pages", {1, 2, 9, 1, 0, -1, 0, 0, 0}, 1, 0, 5, 8193, ERR_LIMIT},
    {"token -1", {1, 2, 0, 4, 1, 0, 0, 0, 2}, 1, 4, -1, 2, ERR_LIMIT},
    {"rows of all entries past the limit", {1, 2, 0, 64, 0, 0, 0, 0, 0}, 129, 64, 5, 0, ERR_LIMIT},
    {"samples of all entries past the limit", {1, 2, 0, 3, 3, 0, 0, 0, 0}, 86, 3, 5, 0, ERR_LIMIT},
};

static void a_step_that_points_outside_itself_is_refused(void **state) {
    UNUSED(state);
    int failures = 0;
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        int rc = unpack_step(steps[i].entry, steps[i].n_entries, steps[i].n_tokens, steps[i].token,
                             steps[i].n_pages);
        if (rc == steps[i].expect) continue;
        failures++;
        print_error("%s: expected %s, found %s\n", steps[i].name, err_name(steps[i].expect),
                    err_name(rc));
    }
    assert_int_equal(failures, 0);
}

static void sampling_numbers_outside_their_range_are_refused(void **state) {
    UNUSED(state);
    struct msg_buf buf = {0};
    memset(a, 0, sizeof *a);
    a->type = MSG_ADMIT;
    a->admit.sampling.temperature = 0.77f;
    a->admit.sampling.top_p = 0.55f;
    a->admit.sampling.repetition = 1.25f;
    assert_int_equal(msg_pack(&buf, a), OK);
    static const struct {
        float was, is;
    } rows[] = {{0.77f, -1}, {0.77f, NAN}, {0.77f, INFINITY}, {0.55f, 1.5f}, {1.25f, 0}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        uint32_t was, is;
        memcpy(&was, &rows[i].was, 4);
        memcpy(&is, &rows[i].is, 4);
        was = __builtin_bswap32(was);
        is = __builtin_bswap32(is);
        uint8_t *at = memmem(buf.p, buf.n, &was, 4);
        assert_non_null(at);
        assert_int_equal(msg_unpack(b, buf.p, buf.n), OK);
        memcpy(at, &is, 4);
        assert_int_equal(msg_unpack(b, buf.p, buf.n), ERR_LIMIT);
        memcpy(at, &was, 4);
    }
    msg_buf_deinit(&buf);
}

static void each_message_prints_as_one_line_without_the_cookie(void **state) {
    UNUSED(state);
    for (int type = MSG_HELLO; type < MSG_TYPES; type++) {
        char *text = NULL;
        size_t n = 0;
        memset(a, 0, sizeof *a);
        a->type = (enum msg_type)type;
        if (type == MSG_HELLO) snprintf(a->hello.cookie, sizeof a->hello.cookie, "SECRET");
        FILE *f = open_memstream(&text, &n);
        msg_print(f, a);
        fclose(f);
        assert_true(n > 1);
        assert_ptr_equal(strchr(text, '\n'), text + n - 1);
        assert_null(strstr(text, "SECRET"));
        assert_null(strchr(text, '?'));
        free(text);
    }
}

static void worker_states_have_names(void **state) {
    UNUSED(state);
    assert_string_equal(worker_state_name(WORKER_READY), "ready");
    for (int s = 0; s < WORKER_STATES; s++)
        assert_string_not_equal(worker_state_name((enum worker_state)s), "?");
    assert_string_equal(worker_state_name((enum worker_state)99), "?");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_of_every_message_survives_the_round_trip),
        cmocka_unit_test(the_largest_message_of_each_kind_fits),
        cmocka_unit_test(unpacking_touches_only_what_the_message_holds),
        cmocka_unit_test(a_message_cut_anywhere_or_with_bytes_after_it_is_refused),
        cmocka_unit_test(changed_bytes_are_refused_or_read_but_what_is_read_packs_again),
        cmocka_unit_test(bytes_that_are_no_message_are_refused),
        cmocka_unit_test(depth_and_size_are_bounded),
        cmocka_unit_test(a_step_that_points_outside_itself_is_refused),
        cmocka_unit_test(sampling_numbers_outside_their_range_are_refused),
        cmocka_unit_test(each_message_prints_as_one_line_without_the_cookie),
        cmocka_unit_test(worker_states_have_names),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
