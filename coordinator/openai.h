/* coordinator/openai.h: request bodies of the OpenAI API, read and checked.
 *
 * Bytes in, a struct out whose every number is in range; or an error object that names the field.
 * Fields that nobody here knows are ignored; a known field of a wrong type or range is an error, as
 * is one that asks for something this server does not do and must not pretend to do. null is the
 * same as absent everywhere. An integer may be written as a float with nothing behind the point
 * (1e3 is 1000), as the reference server's reader allows; 1.5 and "8" are refused.
 *
 * Owns: the parsed JSON; strings and messages are borrowed from it.  Called by: the API files (pool
 * thread or loop).  Pure.  Fails how: a negative code and struct openai_error.
 * Limits: LIMIT_JSON_*, LIMIT_CHOICES, LIMIT_SEQUENCES, LIMIT_STOP_*, LIMIT_TOOLS, LIMIT_BIAS,
 * LIMIT_TOP_LOGPROBS.  Tested by: tests/unit/test_openai.c, tests/fuzz/fuzz_openai.c
 */
#ifndef OCTAVO_COORDINATOR_OPENAI_H
#define OCTAVO_COORDINATOR_OPENAI_H

#include <jansson.h>

#include "coordinator/chat.h"
#include "proto/msg.h"

struct openai_error {
    int status;       /* HTTP */
    const char *type; /* "invalid_request_error", "server_error" */
    const char *code; /* or NULL */
    int retry_after_s;/* with 429 and 503; 0: as the queue is */
    char param[96];   /* "" is null */
    char message[512];
};

/* Fills e (message truncated on a code-point boundary) and returns code. */
int openai_fail(struct openai_error *e, int code, int status, const char *error_code,
                const char *param, const char *fmt, ...) PRINTF_LIKE(6, 7);

enum openai_kind { OPENAI_CHAT, OPENAI_TEXT };

struct openai_defaults {
    const char *model; /* served name */
    int32_t vocab;
    double temperature, top_p, min_p, repetition;
    int top_k;
    uint64_t random_seed; /* for a request that gives none */
};

struct openai_prompt { /* text, or ids when text is NULL */
    const char *text;  /* UTF-8, n bytes, NUL-terminated */
    size_t n;
    int32_t *ids;
    size_t n_ids;
};

struct openai_request {
    json_t *root;
    bool stream, include_usage;
    int n;                        /* choices per prompt */
    int64_t max_tokens;           /* 0: absent, up to the context */
    struct msg_sampling sampling; /* choice i of a prompt uses seed + i */
    bool logprobs;
    bool ignore_eos, include_stop;
    const char *cache_salt;       /* NULL: none */
    int64_t priority;             /* lower goes first; 0 */
    double timeout_s;             /* 0: none */
    int n_stops;
    const char *stops[LIMIT_STOP_STRINGS];
    int n_stop_ids;
    int32_t stop_ids[LIMIT_STOP_STRINGS];
    /* chat */
    json_t *messages, *tools; /* tools NULL: none, or tool_choice "none" */
    struct chat_options chat;
    /* text */
    int n_prompts;
    struct openai_prompt *prompts;
    bool echo, add_special;
};

/* body need not be terminated. On error *r holds nothing to free. */
int openai_parse(struct openai_request *r, enum openai_kind kind, const char *body, size_t n,
                 const struct openai_defaults *d, struct openai_error *e);
void openai_request_deinit(struct openai_request *r);

/* Bytes to a JSON object; depth is checked before anything is built. NULL with e filled. */
json_t *openai_object(const char *body, size_t n, struct openai_error *e);

/* Pieces that the smaller routes use as well. */
int openai_bool(json_t *o, const char *key, const char *param, bool *out, struct openai_error *e);
int openai_messages(json_t *root, json_t **messages, struct openai_error *e);
int openai_tools(json_t *root, json_t **tools, struct openai_error *e);
int openai_chat_options(json_t *root, struct chat_options *o, struct openai_error *e);
/* A list of token ids; *ids is malloc'ed. */
int openai_ids(json_t *list, const char *param, int32_t vocab, int32_t **ids, size_t *n,
               struct openai_error *e);

#endif
