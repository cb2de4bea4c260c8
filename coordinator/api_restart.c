/* coordinator/api_restart.c: POST /v1/restart/RANK: one rank is replaced while the service goes on.
 *
 * Owns: nothing.  Called by: http.c (routes).
 * Fails how: 400 or 404 for a rank that is none, 403 for a page in a browser, 503 with Retry-After
 * while the service is not ready.  Tested by: tests/unit/test_api_restart.c,
 * tests/faults/test_restart.py
 *
 * Why not a signal to the worker's pid: between looking the pid up and sending the signal the rank
 * may have been replaced, and a death that nobody announced counts towards giving up. Here the
 * coordinator replaces the rank when it is whole, by the way that every loss goes: streams pause
 * and go on. A keyless server answers every page of every origin, so this route refuses pages.
 */
#include "coordinator/api_job.h"

#include <stdlib.h>
#include <string.h>

static void refuse(struct http_exchange *x, int status, const char *code, const char *extra,
                   const char *message) {
    http_answer_error(x, status, status < 500 ? "invalid_request_error" : "server_error", "rank",
                      code, extra, message);
}

int api_rank(const char *text) {
    size_t n = strspn(text, "0123456789");
    return n > 0 && n <= 3 && text[n] == 0 ? (int)strtol(text, NULL, 10) : -1;
}

void api_restart(struct http_exchange *x, void *user) {
    struct api *a = user;
    struct engine_status st;
    struct http_buf b = {0};
    int rank = api_rank(http_tail(x));
    engine_status(a->engine, &st);
    if (http_header(x, "origin"))
        refuse(x, 403, "forbidden", "", "Ranks are not restarted for pages in a browser.");
    else if (rank < 0)
        refuse(x, 400, "invalid_value", "",
               "Expected the number of a rank at the end of the path.");
    else if (st.n_workers > 0 && rank >= st.n_workers)
        refuse(x, 404, "not_found", "", "There is no such rank here.");
    else if (a->draining || engine_restart(a->engine, rank) < 0)
        refuse(x, 503, "not_ready", "Retry-After: 1\r\n",
               "The service is not ready: a rank is restarted when all are there.");
    else {
        http_buf_printf(&b, "{\"rank\":%d,\"pid\":%lld,\"restarts\":%d}", rank,
                        (long long)st.workers[rank].pid, st.workers[rank].restarts);
        api_answer_json(x, 202, &b);
    }
    http_buf_deinit(&b);
}
