/* coordinator/api_job.h: a request between its HTTP exchange and the engine.
 *
 *   body in ──> prepare (pool thread if long) ──> submit ──> events ──> answer
 *                    │ bad request                 │ full      │ error     │
 *                    └─────────── error answer ────┴───────────┘         free
 *
 * A job is freed when its answer is complete or its client has left, but never while a pool thread
 * works on it: then the thread's end frees it.
 *
 * Owns: body, parsed request, prompts, choices with their text machines.
 * Called by: api_*.c.  Tested by: tests/unit/test_api.c
 */
#ifndef OCTAVO_COORDINATOR_API_JOB_H
#define OCTAVO_COORDINATOR_API_JOB_H

#include "coordinator/api.h"
#include "coordinator/http.h"
#include "coordinator/http_buf.h"
#include "coordinator/openai.h"
#include "coordinator/text.h"

struct api {
    uv_loop_t *loop;
    struct engine *engine;
    const struct tok *tok;
    enum chat_family family;
    struct api_options o;
    char *model_name;
    struct api_key *keys;
    int n_keys;
    struct http_server *http;
    int64_t started;  /* seconds since 1970, "created" of the model */
    uv_timer_t timer; /* beats of quiet streams */
    bool draining, stopping, http_closed, timer_closed;
    struct api_work *works; /* doubly linked */
    int n_works;
    size_t body_bytes; /* of bodies that works hold */
    uint64_t n_requests;
    void (*done)(void *user);
    void *done_user;
};

/* What chat, text and the small routes share: a body to be worked on, an exchange to be answered.
 */
struct api_work {
    struct api *api;
    struct http_exchange *x; /* NULL: the client has left */
    struct api_work *prev, *next;
    uv_work_t req;
    bool in_pool;
    char *body;
    size_t n_body;
    struct openai_error err;             /* status 0: none */
    void (*prepare)(struct api_work *w); /* pool thread or loop: touches only this work */
    void (*proceed)(struct api_work *w); /* loop: prepared without error; client still there */
    void (*cancel)(struct api_work *w);  /* loop: client has left; free follows */
    void (*free)(struct api_work *w);
    void (*beat)(struct api_work *w, uint64_t now_ms); /* may be NULL */
};

void api_work_start(struct api_work *w, struct http_exchange *x);
void api_work_end(struct api_work *w); /* the answer is complete */
void api_beat(struct api *a);          /* once in a while */
void api_answer_error(struct http_exchange *x, const struct api *a, const struct openai_error *e);
void api_answer_json(struct http_exchange *x, int status, const struct http_buf *b);
int api_rank(const char *text); /* -1: no number of a rank */
bool api_has_key(struct http_exchange *x); /* or none is needed */
enum engine_state api_state(const struct api *a, struct engine_status *st); /* the one of all routes */
struct api *api_of(struct http_exchange *x);
bool api_check_done(struct api *a); /* the last work of a stopping api frees it */

/* The key that came with the request; NULL: none, or none that is known. */
struct api_key *api_key_of(struct http_exchange *x);
/* May a request begin now? ERR_FULL with e filled: not yet. No key: always. */
int api_key_begin(const struct api *a, struct api_key *k, struct openai_error *e);
/* May it have n more sequences? ERR_FULL or ERR_LIMIT with e filled: no. */
int api_key_hold(const struct api *a, struct api_key *k, int n, struct openai_error *e);
void api_key_release(struct api_key *k, int n);
int api_keys_read(struct api *a, const char *path, struct err_text *err);
void api_keys_free(struct api *a);

void api_random(void *p, size_t n);
void api_defaults(const struct api *a, struct openai_defaults *d);
void api_put_error(struct http_buf *b, const struct openai_error *e);

/* Adds the prefix of every prompt to ids. */
int api_push_prefix(const struct tok *t, struct tok_ids *ids);
int api_encode_text(const struct tok *t, const char *text, size_t n, bool prefix,
                    struct tok_ids *ids);

/* ---- generation: one choice is one engine request ----------------------------------------------
 */

struct api_choice {
    struct api_job *job;
    int index;
    uint64_t id; /* engine's */
    bool submitted, finished;
    bool stopped; /* a stop string is complete: later tokens are not shown */
    bool started; /* its first chunk is written */
    struct text *text;
    int32_t n_output, n_prompt, n_cached, n_reasoning;
    const char *finish_reason;
    struct http_buf content, reasoning, calls; /* gathered, for a whole answer */
    int n_calls, open_call;
    struct http_buf lp[4]; /* log-probabilities not written yet: chat [0]; text tokens, logprobs,
                              top, offsets */
    int64_t offset;        /* characters so far, for text_offset */
};

struct api_job {
    struct api_work work; /* first */
    enum openai_kind kind;
    const struct api_shape *shape;
    struct openai_request req;
    struct api_key *key; /* NULL: none */
    int n_held;          /* sequences that it has for this */
    int n_prompts;
    struct tok_ids *prompts;
    bool in_reasoning;
    int n_choices, n_open;
    struct api_choice *choices;
    bool streaming;      /* the head of the stream is out */
    uint64_t begun_ms, written_ms; /* the last: sign of life */
    char id[40];
    int64_t created;
    struct http_buf out; /* one event, or the whole answer */
};

/* What differs between chat and text answers. */
struct api_shape {
    const char *id_prefix, *object, *chunk_object;
    int (*prompts)(struct api_job *j, struct openai_error *e); /* pool thread */
    void (*delta)(struct api_choice *c, const struct text_delta *d);
    void (*start)(struct api_choice *c); /* first chunk of a stream */
    void (*logprob)(struct api_choice *c, const struct msg_token *t);
    void (*end)(struct api_choice *c);   /* last chunk of a choice */
    void (*whole)(struct api_choice *c); /* into job->out */
};

void api_generate(struct http_exchange *x, enum openai_kind kind, const struct api_shape *shape);

/* {"id":…,"choices":[ … then api_event_end closes it and sends. */
void api_event_begin(struct api_job *j);
void api_event_end(struct api_job *j);

extern const struct http_route api_routes[];
extern const int api_n_routes;

void api_chat(struct http_exchange *x, void *user);
void api_text(struct http_exchange *x, void *user);
void api_tokenize(struct http_exchange *x, void *user);
void api_detokenize(struct http_exchange *x, void *user);
void api_apply_template(struct http_exchange *x, void *user);
void api_restart(struct http_exchange *x, void *user);
void api_models(struct http_exchange *x, void *user);
void api_model(struct http_exchange *x, void *user);
void api_live(struct http_exchange *x, void *user);
void api_ready(struct http_exchange *x, void *user);
void api_progress(struct http_exchange *x, void *user);
void api_canary(struct http_exchange *x, void *user);
void api_workers(struct http_exchange *x, void *user);
void api_worker(struct http_exchange *x, void *user);
void api_version(struct http_exchange *x, void *user);
void api_metrics(struct http_exchange *x, void *user);

#endif
