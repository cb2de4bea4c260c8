/* coordinator/api.h: the OpenAI-shaped HTTP API in front of an engine.
 *
 * Routes: POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize, /apply-template;
 * GET /v1/models, /v1/models/{id}, /v1/workers, /health, /health/live, /health/ready, /version,
 * /metrics. With keys, all but the three health routes need "Authorization: Bearer KEY".
 *
 * Owns: the HTTP server, requests in progress, the keys.  Called by: cmd_serve.c on the loop
 * thread. Fails how: api_start gives ERR_SETUP and a sentence; afterwards every fault is an answer
 * to one client.  Tested by: tests/unit/test_api.c
 */
#ifndef OCTAVO_COORDINATOR_API_H
#define OCTAVO_COORDINATOR_API_H

#include <uv.h>

#include "coordinator/chat.h"
#include "coordinator/engine.h"
#include "coordinator/tok.h"

struct api;

struct api_options {
    const char *host;         /* default "127.0.0.1" */
    int port;                 /* 0: any free one */
    const char *model_name;   /* served model name; a request for another gets 404 */
    const char *api_key_file; /* one key a line, '#' begins a comment; NULL: no keys */
    int64_t context;          /* tokens per sequence */
    int key_concurrency;      /* sequences that one key may have at once; 0: no bound */
    double key_rate;          /* requests that one key may begin a minute; 0: no bound */
    double request_timeout_s; /* the longest a request may take; 0: no bound */
    /* What a request that says nothing gets. */
    double temperature, top_p, min_p, repetition;
    int top_k;
};

/* Everything neutral: host 127.0.0.1, port 8000, temperature 1, top_p 1, no limits. */
void api_options_init(struct api_options *o);
/* general.sampling.* of the file, where given. */
void api_options_from_gguf(struct api_options *o, const struct gguf *g);

/* Listens and serves. May be called while the engine is still loading: requests wait. engine and
 * tok must outlive the api; strings of o are copied. ERR_SETUP with a sentence. */
int api_start(struct api **out, uv_loop_t *loop, struct engine *engine, const struct tok *tok,
              enum chat_family family, const struct api_options *o, struct err_text *err);
int api_port(const struct api *a);

/* Health stops being ready, new inference gets 503 with Retry-After, streams in progress go on,
 * connections close after their answer. */
void api_drain(struct api *a);

/* Requests whose answer is not finished yet. */
int api_in_progress(const struct api *a);

/* Takes no more connections; true while somebody who is connected may still get an answer. */
bool api_finish(struct api *a);

/* Cancels what is in progress, closes everything, calls done once (from the loop), frees a. The
 * engine must still exist until done is called. */
void api_stop(struct api *a, void (*done)(void *user), void *user);

#endif
