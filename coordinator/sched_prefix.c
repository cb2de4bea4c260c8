/* coordinator/sched_prefix.c: what was computed before is found again: the prefix cache. See sched.h.
 *
 * Owns: nothing of its own; names are kept by pages.c.  Called by: sched.c, sched_queue.c.  Pure.
 * Fails how: cannot; a miss is always right.  Limits: whole pages of LIMIT_PAGE_TOKENS.
 * Tested by: tests/unit/test_sched_prefix.c, tests/unit/test_sched_sim.c, tests/serve/test_prefix.py
 *
 * The name of a full page is a chain: SipHash-2-4 with 128 bits of output over its 64 tokens, keyed
 * by the name of the page before it; the first is keyed by the digest of the request's cache_salt
 * under a secret of this process. So equal names mean equal salt and equal tokens from the first on
 * (there is one model to a scheduler, and positions follow from the chain), nobody can make two
 * prompts collide who does not know the secret, and who does not know the salt cannot even ask
 * whether a prompt was seen. Output is named like prompt: the next turn of a chat has it as history.
 *
 * A page gets its name when the step that filled it was answered by all ranks, not when that step is
 * sent: a lost rank makes steps void, and with them would have gone the pages others read. Only
 * whole pages are shared, and the last token is always fed, because it is its row that samples; so
 * nobody ever writes into a page that somebody else reads.
 *
 * Whoever needs a page that an older sequence is about to fill waits for it instead of computing it
 * again: n answers to one prompt, or a client that asks again and again, cost one prefill.
 *
 * A sequence without a finite logit may have met the same in a page; which one is not known, so all
 * of its pages lose their names, and who asks again has them computed again.
 *
 * A layer that predicts further tokens (MTP) would put into the last entry of a page what depends on
 * the token behind it; such layers are not loaded. Once they are, a hit must feed that token again.
 */
#include <string.h>

#include "coordinator/sched_state.h"

static uint64_t rotl(uint64_t x, int n) {
    return x << n | x >> (64 - n);
}

static void rounds(uint64_t v[4], int n) {
    while (n-- > 0) {
        v[0] += v[1], v[1] = rotl(v[1], 13) ^ v[0], v[0] = rotl(v[0], 32);
        v[2] += v[3], v[3] = rotl(v[3], 16) ^ v[2];
        v[0] += v[3], v[3] = rotl(v[3], 21) ^ v[0];
        v[2] += v[1], v[1] = rotl(v[1], 17) ^ v[2], v[2] = rotl(v[2], 32);
    }
}

struct digest sched_digest(struct digest key, const void *bytes, size_t n) {
    const uint8_t *p = bytes;
    uint64_t v[4] = {key.a ^ 0x736f6d6570736575, key.b ^ 0x646f72616e646f6d ^ 0xee,
                     key.a ^ 0x6c7967656e657261, key.b ^ 0x7465646279746573};
    for (size_t at = 0;; at += 8) {
        uint64_t word = 0;
        size_t k = MIN(n - at, (size_t)8);
        for (size_t i = 0; i < k; i++) word |= (uint64_t)p[at + i] << 8 * i;
        if (k < 8) word |= (uint64_t)n << 56; /* the last one */
        v[3] ^= word;
        rounds(v, 2);
        v[0] ^= word;
        if (k < 8) break;
    }
    struct digest out;
    v[2] ^= 0xee;
    rounds(v, 4);
    out.a = v[0] ^ v[1] ^ v[2] ^ v[3];
    v[1] ^= 0xdd;
    rounds(v, 4);
    out.b = v[0] ^ v[1] ^ v[2] ^ v[3];
    return out;
}

/* The names of all full pages whose tokens are known. */
static void extend(struct seq *q) {
    while (((int64_t)q->n_names + 1) * LIMIT_PAGE_TOKENS <= q->n_tokens) {
        struct digest key = q->n_names ? q->names[q->n_names - 1] : q->root;
        assert(q->n_names < q->cap_pages);
        q->names[q->n_names] = sched_digest(key, &q->tokens[q->n_names * LIMIT_PAGE_TOKENS],
                                            LIMIT_PAGE_TOKENS * sizeof *q->tokens);
        q->n_names++;
    }
}

int32_t sched_prefix_match(const struct sched *s, struct seq *q, int32_t *n_kept) {
    int32_t n = 0, most = (q->n_tokens - 1) / LIMIT_PAGE_TOKENS;
    *n_kept = 0;
    if (!s->o.prefix_cache) return 0;
    extend(q);
    for (int32_t page; n < most && (page = pages_find(&s->pages, q->names[n])) != PAGES_NONE; n++) {
        *n_kept += s->pages.page[page].state == PAGE_KEPT;
        q->pages[n] = page;
    }
    return n;
}

bool sched_prefix_coming(const struct sched *s, const struct seq *q, int32_t n_matched) {
    if (!s->o.prefix_cache || n_matched >= (q->n_tokens - 1) / LIMIT_PAGE_TOKENS) return false;
    for (int i = 0; i < s->n_running; i++) {
        const struct seq *r = &s->seqs[s->running[i]];
        if (seq_before(q, r)) return false; /* and so are all behind it */
        if (r->mark == MARK_NONE && r->n_named <= n_matched && r->n_names > n_matched &&
            digest_equal(r->names[n_matched], q->names[n_matched]))
            return true;
    }
    return false;
}

void sched_prefix_answered(struct sched *s, struct seq *q, int32_t n_answered) {
    if (!s->o.prefix_cache) return;
    extend(q);
    int32_t full = MIN(n_answered, q->n_tokens) / LIMIT_PAGE_TOKENS;
    for (; q->n_named < full; q->n_named++)
        pages_name(&s->pages, q->pages[q->n_named], q->names[q->n_named]);
}

void sched_prefix_forget(struct sched *s, const struct seq *q) {
    for (int32_t i = 0; i < q->n_pages; i++) pages_unname(&s->pages, q->pages[i]);
}
