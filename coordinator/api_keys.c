/* coordinator/api_keys.c: who asks, and how much of the machine one key may have.
 *
 * Owns: the keys and what each has in hand.  Called by: api_server.c, api_job.c, on the loop.
 * Fails how: ERR_SETUP with a sentence while reading; ERR_FULL (429) for a key at its limit.
 * Limits: LIMIT_API_KEYS, one key at most LIMIT_API_KEY_BYTES.
 * Tested by: tests/unit/test_api.c, tests/serve/test_load.py
 *
 * Two limits, because they bound different things. How many sequences a key has at once (n answers
 * are n) bounds its share of slots and queue. How many requests it may begin a minute bounds what
 * requests cost before they are sequences, so it is asked before the body is read as JSON. The
 * second is a bucket that holds one minute's worth and fills evenly; what is missing in it says
 * after how many seconds to come back.
 */
#include "coordinator/api_job.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct api_key {
    char *secret;
    int held;         /* sequences submitted and not ended */
    double allowance; /* requests it may begin now */
    uint64_t at_ms;   /* when that was so */
};

/* ---- reading -------------------------------------------------------------------------------- */

int api_keys_read(struct api *a, const char *path, struct err_text *err) {
    FILE *f = fopen(path, "re");
    if (!f)
        return err_set(err, ERR_SETUP, "--api-key-file %s: expected a readable file, found: %s",
                       path, strerror(errno));
    a->keys = calloc(LIMIT_API_KEYS, sizeof *a->keys);
    assert(a->keys);
    char line[LIMIT_API_KEY_BYTES + 2];
    int rc = OK;
    for (int at = 1; rc == OK && fgets(line, sizeof line, f); at++) {
        if (!strchr(line, '\n') && !feof(f))
            rc = err_set(err, ERR_SETUP, "--api-key-file %s: line %d: expected at most %d bytes",
                         path, at, LIMIT_API_KEY_BYTES);
        char *key = line + strspn(line, " \t");
        key[strcspn(key, " \t\r\n")] = 0;
        if (!*key || *key == '#' || rc) continue;
        if (a->n_keys == LIMIT_API_KEYS)
            rc = err_set(err, ERR_SETUP, "--api-key-file %s: expected at most %d keys", path,
                         LIMIT_API_KEYS);
        else
            a->keys[a->n_keys++] = (struct api_key){.secret = strdup(key),
                                                    .allowance = a->o.key_rate,
                                                    .at_ms = uv_now(a->loop)};
    }
    fclose(f);
    explicit_bzero(line, sizeof line);
    if (rc == OK && !a->n_keys)
        rc = err_set(err, ERR_SETUP, "--api-key-file %s: expected at least one key, found none",
                     path);
    return rc;
}

void api_keys_free(struct api *a) {
    for (int i = 0; i < a->n_keys; i++) {
        assert(a->keys[i].held == 0);
        explicit_bzero(a->keys[i].secret, strlen(a->keys[i].secret));
        free(a->keys[i].secret);
    }
    free(a->keys);
}

/* ---- who asks ------------------------------------------------------------------------------- */

/* Takes as long for a wrong key as for a right one, whichever it is and wherever it differs. */
static struct api_key *find(const struct api *a, const char *given) {
    size_t n = strlen(given);
    struct api_key *found = NULL;
    for (int k = 0; k < a->n_keys; k++) {
        const char *key = a->keys[k].secret;
        size_t n_key = strlen(key);
        volatile unsigned diff = n != n_key;
        for (size_t i = 0; i < n; i++) diff |= (unsigned char)(given[i] ^ key[n_key ? i % n_key : 0]);
        found = diff ? found : &a->keys[k];
    }
    return found;
}

struct api_key *api_key_of(struct http_exchange *x) {
    const char *auth = http_header(x, "authorization");
    if (!auth || strncasecmp(auth, "bearer ", 7)) return NULL;
    auth += 7;
    auth += strspn(auth, " ");
    return find(api_of(x), auth);
}

bool api_has_key(struct http_exchange *x) {
    return !api_of(x)->n_keys || api_key_of(x);
}

/* ---- how much ------------------------------------------------------------------------------- */

int api_key_begin(const struct api *a, struct api_key *k, struct openai_error *e) {
    if (!k || a->o.key_rate <= 0) return OK;
    uint64_t now_ms = uv_now(a->loop);
    double more = (double)(now_ms - k->at_ms) * a->o.key_rate / 60e3;
    k->allowance = MIN(k->allowance + more, a->o.key_rate);
    k->at_ms = now_ms;
    if (k->allowance >= 1) {
        k->allowance--;
        return OK;
    }
    openai_fail(e, ERR_FULL, 429, "rate_limit_exceeded", NULL,
                "This key may begin %g requests a minute; try again later.", a->o.key_rate);
    e->retry_after_s = 1 + (int)((1 - k->allowance) * 60 / a->o.key_rate);
    return ERR_FULL;
}

int api_key_hold(const struct api *a, struct api_key *k, int n, struct openai_error *e) {
    int most = a->o.key_concurrency;
    if (!k) return OK;
    if (most > 0 && n > most)
        return openai_fail(e, ERR_LIMIT, 400, "too_many_answers", "n",
                           "n: expected at most the %d answers that a key may have at once, found %d.",
                           most, n);
    if (most > 0 && k->held + n > most)
        return openai_fail(e, ERR_FULL, 429, "concurrency_limit_exceeded", NULL,
                           "This key has %d answers in progress of at most %d; try again later.",
                           k->held, most);
    k->held += n;
    return OK;
}

void api_key_release(struct api_key *k, int n) {
    if (!k) return;
    assert(k->held >= n);
    k->held -= n;
}
