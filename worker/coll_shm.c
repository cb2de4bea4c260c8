/* worker/coll_shm.c: collectives between processes (or threads) of one host over shared memory.
 *
 * Owns: its mapping; the memory itself belongs to all ranks of the generation.
 * Called by: forward.c and step.c through struct coll; shm_abort by any thread.
 * Fails how: ERR_ABORTED once the generation is aborted; ERR_SETUP or ERR_SYS with a sentence at
 * open.  Limits: SHM_MESSAGE_MAX bytes travel at once, longer messages go in pieces.
 * Tested by: tests/unit/test_coll.c
 *
 * The memory starts as zeros and holds a header, then two sets of [a part per rank, a result].
 * An operation writes this rank's part, meets the others at the barrier and reads theirs.
 * Operations alternate between the two sets, so one barrier each is enough: whoever writes a set
 * again has passed the barrier of the operation between, which every reader entered only after
 * reading.
 *
 * Small sums are one-shot: every rank adds all parts. Large ones are two-shot: each rank adds one
 * stretch for all and, after a second barrier, everybody copies the result. Both add in rank order
 * from rank 0's value on, so they give the same bits.
 *
 * The barrier is a counter and one futex word: bit 0 is the abort flag, the rest counts barriers.
 * Keeping both in one word closes the gap between "not aborted yet" and going to sleep. Waits are
 * bounded as well, so that even a lost wake costs a moment and not for ever. A peer may be dead:
 * nothing here waits on anything but this word. Spinning first pays only when every rank has a core
 * of its own; ranks publish the cores they may run on and count the union.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "proto/limits.h"
#include "worker/coll.h"

#define SHM_ALIGN       64
#define SHM_MESSAGE_MIN (4 << 10)
#define SHM_MESSAGE_MAX (1 << 20)
#define SHM_ONE_SHOT    (16 << 10) /* bytes; above, two-shot moves less memory */
#define SHM_SPINS       2000
#define SHM_WAIT_NS     200000000 /* longest sleep between two looks at the word */
#define SHM_ABORTED     1u
#define SHM_EPOCH       2u
#define SHM_CPU_WORDS   (CPU_SETSIZE / 64)

struct shm_header {
    _Atomic uint64_t stamp; /* generation and world, so that strangers notice each other */
    _Atomic uint64_t cpus[SHM_CPU_WORDS]; /* union of the ranks' allowed cores */
    _Alignas(SHM_ALIGN) _Atomic uint32_t arrived;
    _Alignas(SHM_ALIGN) _Atomic uint32_t word; /* futex: epochs * 2 + aborted */
    _Alignas(SHM_ALIGN) char end[SHM_ALIGN];
};

struct coll_shm {
    struct coll base;
    struct shm_header *header;
    uint64_t mapped_bytes;
    int64_t message_bytes; /* capacity of a part */
    unsigned set;          /* 0 or 1: buffers of the next operation */
    int spins;             /* < 0: not decided yet */
};

static int64_t shm_message_bytes(int64_t asked) {
    int64_t n = MAX(MIN(asked, SHM_MESSAGE_MAX), SHM_MESSAGE_MIN);
    return (n + SHM_ALIGN - 1) & ~(int64_t)(SHM_ALIGN - 1);
}

uint64_t coll_shm_bytes(int world, uint64_t message_bytes) {
    if (world <= 1) return 0;
    int64_t asked = (int64_t)MIN(message_bytes, (uint64_t)SHM_MESSAGE_MAX);
    return sizeof(struct shm_header) +
           2 * (uint64_t)(world + 1) * (uint64_t)shm_message_bytes(asked);
}

const uint32_t *coll_shm_word(const struct coll *c) {
    return (const uint32_t *)&((const struct coll_shm *)c)->header->word;
}

/* [message_bytes] part of one rank in the set in use; rank == world is the result. */
static void *shm_part(const struct coll_shm *s, int rank) {
    int64_t at = ((int64_t)s->set * (s->base.world + 1) + rank) * s->message_bytes;
    return (char *)(s->header + 1) + at;
}

static uint64_t shm_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void shm_futex_wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void shm_futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    const struct timespec bound = {.tv_nsec = SHM_WAIT_NS};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &bound, NULL, 0);
}

static void shm_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Valid once every rank has been met, that is after the first barrier. */
static int shm_decide_spins(struct coll_shm *s) {
    int cores = 0;
    for (int i = 0; i < SHM_CPU_WORDS; i++)
        cores +=
            __builtin_popcountll(atomic_load_explicit(&s->header->cpus[i], memory_order_relaxed));
    return cores >= s->base.world ? SHM_SPINS : 0;
}

/* Waits until the word is no longer `seen`. */
static uint32_t shm_wait(struct coll_shm *s, uint32_t seen) {
    _Atomic uint32_t *word = &s->header->word;
    uint64_t start = shm_now_us();
    uint32_t now = seen;
    for (int i = 0; i < s->spins && now == seen; i++) {
        shm_pause();
        now = atomic_load_explicit(word, memory_order_acquire);
    }
    while (now == seen) {
        shm_futex_wait(word, seen);
        now = atomic_load_explicit(word, memory_order_acquire);
    }
    s->base.wait_us += shm_now_us() - start;
    return now;
}

static int shm_barrier(struct coll *c) {
    struct coll_shm *s = (struct coll_shm *)c;
    struct shm_header *h = s->header;
    uint32_t seen = atomic_load_explicit(&h->word, memory_order_acquire);
    if (seen & SHM_ABORTED) return ERR_ABORTED;
    uint32_t before = atomic_fetch_add_explicit(&h->arrived, 1, memory_order_acq_rel);
    assert(before < (uint32_t)c->world);
    uint32_t now;
    if (before + 1 == (uint32_t)c->world) {
        atomic_store_explicit(&h->arrived, 0, memory_order_relaxed);
        now = atomic_fetch_add_explicit(&h->word, SHM_EPOCH, memory_order_acq_rel);
        shm_futex_wake(&h->word);
    } else {
        now = shm_wait(s, seen);
    }
    if (now & SHM_ABORTED) return ERR_ABORTED;
    if (s->spins < 0) s->spins = shm_decide_spins(s);
    return OK;
}

/* out[i] = parts[0][i] + parts[1][i] + … in rank order, for i in [from, to). */
static void shm_sum(const struct coll_shm *s, float *out, int64_t from, int64_t to) {
    memcpy(out + from, (const float *)shm_part(s, 0) + from, (size_t)(to - from) * sizeof *out);
    for (int r = 1; r < s->base.world; r++) {
        const float *part = shm_part(s, r);
        for (int64_t i = from; i < to; i++) out[i] += part[i];
    }
}

static int shm_all_reduce_piece(struct coll_shm *s, float *x, int64_t n) {
    int rank = s->base.rank, world = s->base.world;
    memcpy(shm_part(s, rank), x, (size_t)n * sizeof *x);
    TRY(shm_barrier(&s->base));
    if (n * (int64_t)sizeof *x <= SHM_ONE_SHOT) {
        shm_sum(s, x, 0, n);
    } else {
        float *result = shm_part(s, world);
        shm_sum(s, result, n * rank / world, n * (rank + 1) / world);
        TRY(shm_barrier(&s->base));
        memcpy(x, result, (size_t)n * sizeof *x);
    }
    s->set ^= 1;
    return OK;
}

static int shm_all_reduce(struct coll *c, float *x, int64_t n) {
    struct coll_shm *s = (struct coll_shm *)c;
    int64_t most = s->message_bytes / (int64_t)sizeof *x;
    for (int64_t at = 0; at < n; at += most)
        TRY(shm_all_reduce_piece(s, x + at, MIN(most, n - at)));
    return OK;
}

static int shm_all_gather(struct coll *c, const void *src, void *dst, int64_t bytes) {
    struct coll_shm *s = (struct coll_shm *)c;
    for (int64_t at = 0; at < bytes; at += s->message_bytes) {
        size_t n = (size_t)MIN(s->message_bytes, bytes - at);
        memcpy(shm_part(s, c->rank), (const char *)src + at, n);
        TRY(shm_barrier(c));
        for (int r = 0; r < c->world; r++) memcpy((char *)dst + r * bytes + at, shm_part(s, r), n);
        s->set ^= 1;
    }
    return OK;
}

static int shm_broadcast(struct coll *c, void *x, int64_t bytes, int root) {
    struct coll_shm *s = (struct coll_shm *)c;
    assert(root >= 0 && root < c->world);
    for (int64_t at = 0; at < bytes; at += s->message_bytes) {
        size_t n = (size_t)MIN(s->message_bytes, bytes - at);
        if (c->rank == root) memcpy(shm_part(s, root), (const char *)x + at, n);
        TRY(shm_barrier(c));
        if (c->rank != root) memcpy((char *)x + at, shm_part(s, root), n);
        s->set ^= 1;
    }
    return OK;
}

static void shm_abort(struct coll *c) {
    struct shm_header *h = ((struct coll_shm *)c)->header;
    atomic_fetch_or_explicit(&h->word, SHM_ABORTED, memory_order_acq_rel);
    shm_futex_wake(&h->word);
}

static void shm_close(struct coll *c) {
    struct coll_shm *s = (struct coll_shm *)c;
    munmap(s->header, s->mapped_bytes);
    free(s);
}

static const struct coll_ops shm_ops = {
    .name = "shm",
    .all_reduce = shm_all_reduce,
    .all_gather = shm_all_gather,
    .broadcast = shm_broadcast,
    .barrier = shm_barrier,
    .abort = shm_abort,
    .close = shm_close,
};

static int shm_map(struct shm_header **out, const char *path, uint64_t bytes,
                   struct err_text *err) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return err_set(err, ERR_SYS, "%s: expected the group's shared memory, found: %s", path,
                       strerror(errno));
    struct stat st;
    void *p = MAP_FAILED;
    int rc = OK;
    if (fstat(fd, &st) < 0 || (uint64_t)st.st_size < bytes)
        rc = err_set(err, ERR_SETUP, "%s: expected %llu bytes of shared memory, found %lld", path,
                     (unsigned long long)bytes, (long long)st.st_size);
    else if ((p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
        rc = err_set(err, ERR_SYS, "%s: expected to map %llu bytes, found: %s", path,
                     (unsigned long long)bytes, strerror(errno));
    close(fd);
    *out = p;
    return rc;
}

/* The first rank writes what this memory is for, the others compare. */
static int shm_stamp(struct shm_header *h, const char *path, int world, uint32_t generation,
                     struct err_text *err) {
    uint64_t mine = (uint64_t)generation << 32 | 0x5eed0000u | (unsigned)world, found = 0;
    if (atomic_compare_exchange_strong(&h->stamp, &found, mine) || found == mine) return OK;
    return err_set(err, ERR_SETUP,
                   "%s: expected generation %u of %d ranks, found generation %u of %u ranks", path,
                   generation, world, (unsigned)(found >> 32), (unsigned)(found & 0xffff));
}

static void shm_publish_cores(struct shm_header *h) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return;
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &set))
            atomic_fetch_or_explicit(&h->cpus[i / 64], 1ull << (i % 64), memory_order_relaxed);
}

int coll_open_shm(struct coll **out, const char *path, uint64_t bytes, int rank, int world,
                  uint32_t generation, struct err_text *err) {
    assert(world >= 2 && world <= LIMIT_RANKS && rank >= 0 && rank < world);
    uint64_t least = coll_shm_bytes(world, SHM_MESSAGE_MIN);
    if (bytes < least)
        return err_set(err, ERR_SETUP, "%s: expected at least %llu bytes for %d ranks, found %llu",
                       path, (unsigned long long)least, world, (unsigned long long)bytes);
    struct coll_shm *s = calloc(1, sizeof *s);
    if (!s)
        return err_set(err, ERR_NOMEM, "%s: expected memory for the collectives, found none", path);
    int rc = shm_map(&s->header, path, bytes, err);
    if (rc < 0) {
        free(s);
        return rc;
    }
    s->base =
        (struct coll){.ops = &shm_ops, .rank = rank, .world = world, .generation = generation};
    s->mapped_bytes = bytes;
    s->message_bytes = (int64_t)((bytes - sizeof *s->header) / (2 * (uint64_t)(world + 1))) &
                       ~(int64_t)(SHM_ALIGN - 1);
    s->spins = -1;
    rc = shm_stamp(s->header, path, world, generation, err);
    if (rc < 0) {
        shm_close(&s->base);
        return rc;
    }
    shm_publish_cores(s->header);
    *out = &s->base;
    return OK;
}
