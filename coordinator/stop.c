/* coordinator/stop.c: one Knuth-Morris-Pratt automaton per stop string.
 *
 * Owns, called by, fails how, limits, tested by: see stop.h.
 *
 * The state of an automaton is exactly what must be held back: the length of the longest end of the
 * text that begins the string. So nothing is rescanned, no delta ever shows a part of a stop
 * string, and a client cannot make a token expensive with strings like "aaaaab". All stop strings
 * and all text are whole code points, so what is let go is, too.
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/stop.h"

static uint16_t advance(const struct stop_one *one, uint16_t state, char c) {
    while (state > 0 && one->s[state] != c) state = one->fail[state - 1];
    return one->s[state] == c ? state + 1 : 0;
}

int stop_init(struct stop *s, const char *const *stops, int n) {
    *s = (struct stop){0};
    if (n > LIMIT_STOP_STRINGS) return ERR_LIMIT;
    for (int i = 0; i < n; i++) {
        size_t len = strlen(stops[i]);
        if (len == 0) continue; /* would stop everything; asks for nothing */
        struct stop_one *one = &s->all[s->n];
        *one = (struct stop_one){.s = stops[i], .n = (uint16_t)len};
        if (len <= LIMIT_STOP_STRING_BYTES) one->fail = calloc(len, sizeof *one->fail);
        if (!one->fail) {
            stop_deinit(s);
            return len > LIMIT_STOP_STRING_BYTES ? ERR_LIMIT : ERR_NOMEM;
        }
        s->n++;
        for (size_t k = 1; k < len; k++) one->fail[k] = advance(one, one->fail[k - 1], one->s[k]);
    }
    return OK;
}

void stop_deinit(struct stop *s) {
    for (int i = 0; i < s->n; i++) free(s->all[i].fail);
    buf_deinit(&s->held);
    *s = (struct stop){0};
}

/* Lets every automaton see c; the longest string completed by it, or NULL. *longest: the longest
 * state. */
static const struct stop_one *see(struct stop *s, char c, size_t *longest) {
    const struct stop_one *hit = NULL;
    *longest = 0;
    for (int i = 0; i < s->n; i++) {
        struct stop_one *one = &s->all[i];
        one->state = advance(one, one->state, c);
        *longest = MAX(*longest, (size_t)one->state);
        if (one->state == one->n && (!hit || one->n > hit->n)) hit = one;
    }
    return hit;
}

const char *stop_feed(struct stop *s, const char *p, size_t n, bool include, struct buf *out) {
    size_t keep = 0;
    if (s->n == 0) {
        buf_add(out, p, n);
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        const struct stop_one *hit = see(s, p[i], &keep);
        if (!hit) continue;
        buf_add(&s->held, p, i + 1);
        buf_add(out, s->held.p, include ? s->held.n : s->held.n - hit->n);
        buf_clear(&s->held);
        return hit->s;
    }
    buf_add(&s->held, p, n);
    if (n > 0) {
        buf_add(out, s->held.p, s->held.n - keep);
        buf_drop(&s->held, s->held.n - keep);
    }
    return NULL;
}

void stop_flush(struct stop *s, struct buf *out) {
    if (s->held.n) buf_add(out, s->held.p, s->held.n);
    buf_clear(&s->held);
    for (int i = 0; i < s->n; i++) s->all[i].state = 0;
}
