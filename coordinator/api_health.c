/* coordinator/api_health.c: health, progress, and the workers one by one. The README's table of
 * states and codes is what these routes answer.
 *
 * Owns: nothing.  Called by: http.c (routes).  Fails how: cannot; 404 for a rank that is none.
 * Tested by: tests/unit/test_api_look.c, tests/faults/test_health.py
 *
 * All of them read one engine_status and take one state out of it, so that no two tell different
 * stories. live: this process works, and a restart of it would help nobody. ready: an answer can be
 * expected now. progress: what was asked for, or loading, gets on.
 *
 * A balancer that has no key learns one word. The rest (pids, sentences, devices) is for those who
 * have one.
 */
#include "coordinator/api_job.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum engine_state api_state(const struct api *a, struct engine_status *st) {
    engine_status(a->engine, st);
    if (a->draining && st->state != ENGINE_FAILED) st->state = ENGINE_DRAINING;
    return st->state;
}

static void put_string(struct http_buf *b, const char *s) { /* s comes from outside: any bytes */
    char clean[3 * 512 + 1];
    http_buf_json(b, clean, utf8_scrub(clean, s, strnlen(s, 512)));
}

static void put_ms(struct http_buf *b, const char *name, uint64_t us, bool known) {
    if (known)
        http_buf_printf(b, ",\"%s\":%llu", name, (unsigned long long)(us / 1000));
    else
        http_buf_printf(b, ",\"%s\":null", name);
}

static void answer(struct http_exchange *x, int status, struct http_buf *b) {
    api_answer_json(x, status, b);
    http_buf_deinit(b);
}

/* ---- live, ready ------------------------------------------------------------------------------
 */

static void put_state(struct http_buf *b, const struct engine_status *st, const char *status) {
    http_buf_printf(b, "{\"status\":\"%s\",\"state\":\"%s\",\"phase\":\"%s\"", status,
                    engine_state_name(st->state), st->phase);
    if (st->state != ENGINE_READY && st->why[0]) {
        http_buf_puts(b, ",\"message\":");
        put_string(b, st->why);
    }
    http_buf_printf(b, ",\"canary\":\"%s\"", st->canary);
    put_ms(b, "ready_ms", st->ready_us, st->state == ENGINE_READY);
}

static void answer_health(struct http_exchange *x, bool ok, const struct engine_status *st) {
    const char *state = engine_state_name(st->state);
    struct http_buf b = {0};
    if (!api_has_key(x)) {
        http_buf_printf(&b, "%s\n", state);
        http_answer(x, ok ? 200 : 503, "text/plain", "", b.p ? b.p : "", b.n);
        http_buf_deinit(&b);
        return;
    }
    put_state(&b, st, ok ? "ok" : state);
    http_buf_puts(&b, "}");
    answer(x, ok ? 200 : 503, &b);
}

void api_live(struct http_exchange *x, void *user) {
    struct engine_status st;
    enum engine_state s = api_state(user, &st);
    answer_health(x, s != ENGINE_FAILED, &st);
}

void api_ready(struct http_exchange *x, void *user) {
    struct engine_status st;
    enum engine_state s = api_state(user, &st);
    answer_health(x, s == ENGINE_READY, &st);
}

/* ---- progress ---------------------------------------------------------------------------------
 */

/* "ok", or what is the matter. A step within its bound, which follows its size, is progress however
 * long it takes: a long prompt is not a stall. So is a load in which something moves. */
static const char *progress(const struct engine_status *st) {
    switch (st->state) {
    case ENGINE_STARTING:
    case ENGINE_LOADING:
        return st->load_quiet_us <= st->load_bound_us ? "ok" : "stalled";
    case ENGINE_CANARY:
    case ENGINE_READY:
    case ENGINE_DRAINING:
        return st->step_age_us <= st->step_bound_us ? "ok" : "stuck";
    default:
        return engine_state_name(st->state);
    }
}

void api_progress(struct http_exchange *x, void *user) {
    struct engine_status st;
    api_state(user, &st);
    const char *status = progress(&st);
    struct http_buf b = {0};
    put_state(&b, &st, status);
    http_buf_printf(&b, ",\"running\":%d,\"waiting\":%d,\"steps\":%llu", st.running, st.waiting,
                    (unsigned long long)st.steps);
    put_ms(&b, "last_step_age_ms", st.last_step_us, st.last_step_us != UINT64_MAX);
    if (st.step)
        http_buf_printf(&b, ",\"step\":{\"id\":%llu,\"rows\":%d,\"age_ms\":%llu,\"bound_ms\":%llu}",
                        (unsigned long long)st.step, st.step_rows,
                        (unsigned long long)(st.step_age_us / 1000),
                        (unsigned long long)(st.step_bound_us / 1000));
    else
        http_buf_puts(&b, ",\"step\":null");
    if (st.prefill.n)
        http_buf_printf(&b, ",\"prefill\":{\"prompts\":%d,\"tokens_done\":%lld,\"tokens\":%lld}",
                        st.prefill.n, (long long)st.prefill.done, (long long)st.prefill.total);
    else
        http_buf_puts(&b, ",\"prefill\":null");
    http_buf_printf(&b, ",\"load\":{\"bytes\":%llu,\"total\":%llu,\"quiet_ms\":%llu,"
                        "\"bound_ms\":%llu}}",
                    (unsigned long long)st.load_bytes, (unsigned long long)st.load_total,
                    (unsigned long long)(st.load_quiet_us / 1000),
                    (unsigned long long)(st.load_bound_us / 1000));
    answer(x, strcmp(status, "ok") ? 503 : 200, &b);
}

/* ---- workers ----------------------------------------------------------------------------------
 */

static bool is_address(const char *word, size_t n) { /* "0000:01:00.0", or a longer domain */
    size_t hex = strspn(word, "0123456789abcdefABCDEF:");
    return n >= 12 && hex + 2 == n && word[hex] == '.' && isdigit((unsigned char)word[n - 1]) &&
           memchr(word, ':', n);
}

/* The word of a device's description that is its UUID, or its address on the bus; null if none is. */
static void put_word(struct http_buf *b, const char *name, const char *text, bool address) {
    http_buf_printf(b, ",\"%s\":", name);
    for (size_t n; *text; text += n + (text[n] == ' ')) {
        n = strcspn(text, " ");
        bool hit = address ? is_address(text, n)
                           : n > 4 && (!strncmp(text, "GPU-", 4) || !strncmp(text, "MIG-", 4));
        if (!hit) continue;
        char word[96];
        snprintf(word, sizeof word, "%.*s", (int)n, text);
        put_string(b, word);
        return;
    }
    http_buf_puts(b, "null");
}

static void put_worker(struct http_buf *b, const struct engine_worker *w) {
    http_buf_printf(
        b, "{\"rank\":%d,\"pid\":%lld,\"start_time\":%llu,\"state\":\"%s\",\"device\":", w->rank,
        (long long)w->pid, (unsigned long long)w->start_time, worker_state_name(w->state));
    put_string(b, w->device);
    put_word(b, "device_uuid", w->device, false);
    put_word(b, "pci_address", w->device, true);
    http_buf_printf(b, ",\"last_step\":%llu", (unsigned long long)w->last_step);
    put_ms(b, "age_ms", w->age_us, w->age_us != UINT64_MAX);
    http_buf_printf(b,
                    ",\"load_bytes\":%llu,\"load_total\":%llu,\"memory_used_bytes\":%llu,"
                    "\"memory_free_bytes\":%llu,\"restarts\":%d,\"restarts_by_cause\":{",
                    (unsigned long long)w->load_bytes, (unsigned long long)w->load_total,
                    (unsigned long long)w->memory_used_bytes,
                    (unsigned long long)w->memory_free_bytes, w->restarts);
    for (int c = 0; c < ENGINE_CAUSES; c++)
        http_buf_printf(b, "%s\"%s\":%d", c ? "," : "", engine_cause_name((enum engine_cause)c),
                        w->restarts_by[c]);
    http_buf_puts(b, "},\"last_error\":");
    w->last_error[0] ? put_string(b, w->last_error) : http_buf_puts(b, "null");
    http_buf_puts(b, "}");
}

void api_workers(struct http_exchange *x, void *user) {
    struct engine_status st;
    enum engine_state s = api_state(user, &st);
    struct http_buf b = {0};
    http_buf_printf(&b, "{\"state\":\"%s\",\"phase\":\"%s\",\"data\":[", engine_state_name(s),
                    st.phase);
    for (int i = 0; i < st.n_workers; i++) {
        if (i) http_buf_puts(&b, ",");
        put_worker(&b, &st.workers[i]);
    }
    http_buf_puts(&b, "]}");
    answer(x, 200, &b);
}

void api_worker(struct http_exchange *x, void *user) {
    struct engine_status st;
    struct http_buf b = {0};
    int rank = api_rank(http_tail(x));
    api_state(user, &st);
    if (rank < 0 || rank >= st.n_workers) {
        http_answer_error(x, 404, "invalid_request_error", "rank", "not_found", "",
                          "There is no such rank here.");
        return;
    }
    put_worker(&b, &st.workers[rank]);
    answer(x, 200, &b);
}
