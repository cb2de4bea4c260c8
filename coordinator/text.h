/* coordinator/text.h: from sampled tokens to what the client reads, as a stream.
 *
 * One struct text per choice: bytes of tokens → whole code points → reasoning / content / tool
 * calls → stop strings, emitting deltas that never hold half a code point, never leak a tag of the
 * format and never show any part of a stop string.
 *
 * Grammar of the output: [reasoning "</think>"] content { "<tool_call>" name { <arg_key>k</arg_key>
 * <arg_value>v</arg_value> } "</tool_call>" }. Tags are recognised by token id and, spelled out from
 * ordinary tokens, by text with hold-back.
 *
 * Owns: its buffers.  Called by: the API files.  Pure.
 * Tested by: tests/unit/test_text.c, tests/fuzz/fuzz_text.c
 */
#ifndef OCTAVO_COORDINATOR_TEXT_H
#define OCTAVO_COORDINATOR_TEXT_H

#include <jansson.h>

#include "coordinator/tok.h"

enum text_kind {
    TEXT_REASONING,
    TEXT_CONTENT,
    TEXT_TOOL_NAME, /* a call begins: s is its name, call its index */
    TEXT_TOOL_ARGS, /* a fragment of the call's arguments, a JSON object when joined */
};

struct text_delta {
    enum text_kind kind;
    int call;
    const char *s; /* valid during the callback */
    size_t n;
};

struct text_options {
    bool chat;             /* parse reasoning and tool calls; else everything is content */
    bool in_reasoning;     /* the prompt opened <think> */
    bool parse_tools;
    json_t *tools;         /* borrowed for the life of the text; types of arguments; may be NULL */
    const char *const *stops; /* borrowed */
    int n_stops;
    bool include_stop;     /* include_stop_str_in_output */
};

typedef void text_sink(void *user, const struct text_delta *d);

struct text;
int text_new(struct text **out, const struct tok *t, const struct text_options *o, text_sink *sink,
             void *user);
void text_free(struct text *x);

/* One sampled token (not an end token). Returns 0, or 1 when a stop string was completed: nothing
 * more will be emitted and the sequence should be finished. */
int text_feed(struct text *x, int32_t token);

/* The same for bytes, as if from ordinary tokens: tags in them are spelled out. */
int text_feed_bytes(struct text *x, const char *p, size_t n);

/* No more tokens: flushes what was held back. truncated: the length limit was met (an unfinished
 * tool call emits nothing more). */
void text_end(struct text *x, bool truncated);

int text_calls(const struct text *x);             /* complete tool calls so far */
const char *text_stopped_by(const struct text *x); /* the stop string, or NULL */
int text_reasoning_tokens(const struct text *x);

#endif
