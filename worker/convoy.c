/* worker/convoy.c: the ranks of one host walk through the file together. See convoy.h.
 *
 * Owns: the mapping.  Called by: weights.c.  Fails how: see convoy.h.
 * Limits: LIMIT_RANKS.  Tested by: tests/unit/test_load.c
 *
 * One word per rank in a page that the coordinator made, each in a cache line of its own, written
 * by its rank alone: there is no lock that a dead rank could hold. Waiting is polling, a thousand
 * times a second at most, by threads that are ahead and have nothing better to do.
 *
 * A rank killed while loading leaves its word where it was. Its peers wait for it once, up to the
 * patience, then remember the word and pass it for good; the price of any number of deaths is one
 * pause.
 */
#include "worker/convoy.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/limits.h"
#include "proto/log.h"

#define POLL_NS 1000000
#define DONE    UINT64_MAX

struct convoy_page {
    struct {
        _Alignas(128) _Atomic uint64_t at; /* position + 1; 0: not here yet; DONE */
    } rank[LIMIT_RANKS];
};
_Static_assert(sizeof(struct convoy_page) <= CONVOY_SHARE_BYTES, "a word for each rank");

struct convoy {
    struct convoy_options o;
    struct convoy_page *page;
    struct convoy_page alone;           /* the page when there is no shared one */
    _Atomic uint64_t left[LIMIT_RANKS]; /* the word at which a peer was given up, + 1 */
};

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static int map_page(struct convoy *c, struct err_text *err) {
    struct stat st;
    int fd = open(c->o.path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0 || st.st_size < CONVOY_SHARE_BYTES) {
        int rc =
            err_set(err, ERR_SETUP, "--load-share: expected %d shared bytes at %.300s, found %s",
                    CONVOY_SHARE_BYTES, c->o.path, fd < 0 ? strerror(errno) : "fewer");
        if (fd >= 0) close(fd);
        return rc;
    }
    void *p = mmap(NULL, CONVOY_SHARE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED)
        return err_set(err, ERR_SETUP, "--load-share: expected to map %.300s, found: %s", c->o.path,
                       strerror(errno));
    c->page = p;
    return OK;
}

int convoy_open(struct convoy **out, const struct convoy_options *o, struct err_text *err) {
    assert(o->world >= 1 && o->world <= LIMIT_RANKS && o->rank >= 0 && o->rank < o->world);
    struct convoy *c = aligned_alloc(128, (sizeof *c + 127) / 128 * 128);
    if (!c) return err_set(err, ERR_NOMEM, "loading: expected %zu bytes, found none", sizeof *c);
    memset(c, 0, sizeof *c);
    c->o = *o;
    if (c->o.window_bytes == 0) c->o.window_bytes = CONVOY_WINDOW_BYTES;
    if (c->o.patience_us == 0) c->o.patience_us = CONVOY_PATIENCE_US;
    int rc = o->path && o->world > 1 ? map_page(c, err) : OK;
    if (rc < 0) {
        free(c);
        return rc;
    }
    if (!c->page) {
        c->page = &c->alone;
        for (int r = 0; r < o->world; r++) atomic_store(&c->page->rank[r].at, DONE);
    }
    atomic_store(&c->page->rank[o->rank].at, 1);
    *out = c;
    return OK;
}

void convoy_move(struct convoy *c, uint64_t position) {
    atomic_store(&c->page->rank[c->o.rank].at, position + 1);
}

/* The word of one who waits is compared with that of each peer, and with when it last changed. */
struct watch {
    uint64_t word[LIMIT_RANKS], since_us[LIMIT_RANKS];
};

/* Somebody is too far behind `position` and not given up. */
static bool must_wait(struct convoy *c, uint64_t position, struct watch *w, uint64_t now) {
    bool wait = false;
    for (int r = 0; r < c->o.world; r++) {
        uint64_t word = atomic_load(&c->page->rank[r].at), at = word ? word - 1 : 0;
        if (w->since_us[r] == 0 || word != w->word[r]) {
            w->word[r] = word;
            w->since_us[r] = now;
        }
        if (word == DONE || position <= at || position - at <= c->o.window_bytes) continue;
        if (r != c->o.rank && atomic_load(&c->left[r]) == word + 1) continue;
        if (r == c->o.rank || now - w->since_us[r] < c->o.patience_us) {
            wait = true;
        } else if (atomic_exchange(&c->left[r], word + 1) != word + 1) {
            log_warn("load_peer_left", "rank=%d position=%llu", r, (unsigned long long)at);
        }
    }
    return wait;
}

bool convoy_wait(struct convoy *c, uint64_t position, const atomic_bool *stop) {
    struct watch w = {0};
    while (!atomic_load(stop) && must_wait(c, position, &w, now_us()))
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    return !atomic_load(stop);
}

bool convoy_is_mine(const struct convoy *c, uint64_t n) {
    return c->page == &c->alone || n % (uint64_t)c->o.world == (uint64_t)c->o.rank;
}

void convoy_close(struct convoy *c) {
    if (!c) return;
    atomic_store(&c->page->rank[c->o.rank].at, DONE);
    if (c->page != &c->alone) munmap(c->page, CONVOY_SHARE_BYTES);
    free(c);
}
