/* coordinator/api_work.c: a request body on its way through a pool thread and back.
 *
 * Owns: every work of an api (a list), until its answer is complete or its client has left.
 * Called by: the route handlers.  Fails how: an error object to the client.
 * Limits: LIMIT_BODIES_BYTES over all works.  Tested by: tests/unit/test_api.c
 *
 * Short bodies are prepared at once on the loop: a trip through the pool costs more than they do,
 * and they must not queue behind somebody's megabytes. Long ones go to the pool, because parsing
 * and tokenising them takes as long as many steps of the engine.
 */
#include "coordinator/api_job.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { INLINE_BYTES = 8 << 10 };

struct api *api_of(struct http_exchange *x) {
    return http_user(x);
}

void api_random(void *p, size_t n) {
    for (char *at = p; n;) {
        ssize_t got = getrandom(at, n, 0);
        if (got < 0 && errno == EINTR) continue;
        assert(got > 0);
        at += got;
        n -= (size_t)got;
    }
}

void api_put_error(struct http_buf *b, const struct openai_error *e) {
    http_buf_puts(b, "{\"error\":{\"message\":");
    http_buf_json(b, e->message, strlen(e->message));
    http_buf_printf(b, ",\"type\":\"%s\",\"param\":", e->type);
    e->param[0] ? http_buf_json(b, e->param, strlen(e->param)) : http_buf_puts(b, "null");
    if (e->code)
        http_buf_printf(b, ",\"code\":\"%s\"}}", e->code);
    else
        http_buf_puts(b, ",\"code\":null}}");
}

void api_answer_error(struct http_exchange *x, const struct api *a, const struct openai_error *e) {
    char retry[64] = "";
    if (e->status == 503 || e->status == 429)
        snprintf(retry, sizeof retry, "Retry-After: %d\r\n",
                 e->retry_after_s ? e->retry_after_s : MAX(1, engine_retry_after(a->engine)));
    http_answer_error(x, e->status, e->type, e->param[0] ? e->param : NULL, e->code, retry,
                      e->message);
}

void api_answer_json(struct http_exchange *x, int status, const struct http_buf *b) {
    if (b->failed)
        http_answer_error(x, 503, "server_error", NULL, NULL, "", "Out of memory.");
    else
        http_answer(x, status, "application/json", "", b->p, b->n);
}

static void work_free(struct api_work *w) {
    struct api *a = w->api;
    if (w->prev) w->prev->next = w->next;
    if (w->next) w->next->prev = w->prev;
    if (a->works == w) a->works = w->next;
    a->n_works--;
    if (w->body) a->body_bytes -= w->n_body;
    free(w->body);
    w->free(w);
    api_check_done(a);
}

void api_work_end(struct api_work *w) {
    assert(!w->in_pool);
    w->x = NULL;
    work_free(w);
}

static void on_gone(void *user) {
    struct api_work *w = user;
    w->x = NULL;
    if (w->in_pool) {
        uv_cancel((uv_req_t *)&w->req); /* if it has not begun; it comes back either way */
        return;
    }
    w->cancel(w);
    work_free(w);
}

void api_beat(struct api *a) {
    uint64_t now_ms = uv_now(a->loop);
    for (struct api_work *w = a->works, *next; w; w = next) {
        next = w->next; /* a beat may end its own work */
        if (w->beat && w->x && !w->in_pool) w->beat(w, now_ms);
    }
}

static void prepared(struct api_work *w) {
    w->api->body_bytes -= w->n_body;
    free(w->body);
    w->body = NULL;
    if (!w->x) {
        work_free(w);
    } else if (w->err.status) {
        api_answer_error(w->x, w->api, &w->err);
        api_work_end(w);
    } else {
        w->proceed(w);
    }
}

static void in_pool(uv_work_t *req) {
    struct api_work *w = req->data;
    w->prepare(w);
}

static void after_pool(uv_work_t *req, int status) {
    UNUSED(status);
    struct api_work *w = req->data;
    w->in_pool = false;
    prepared(w);
}

void api_work_start(struct api_work *w, struct http_exchange *x) {
    struct api *a = w->api = api_of(x);
    w->x = x;
    w->next = a->works;
    if (w->next) w->next->prev = w;
    a->works = w;
    a->n_works++;
    w->body = http_take_body(x, &w->n_body);
    a->body_bytes += w->n_body;
    http_on_gone(x, on_gone, w);
    if (a->body_bytes > LIMIT_BODIES_BYTES) {
        openai_fail(&w->err, ERR_FULL, 503, NULL, NULL,
                    "Too many long requests are being prepared; try again.");
        prepared(w);
    } else if (w->n_body <= INLINE_BYTES) {
        w->prepare(w);
        prepared(w);
    } else {
        w->in_pool = true;
        w->req.data = w;
        int rc = uv_queue_work(a->loop, &w->req, in_pool, after_pool);
        assert(rc == 0);
    }
}
