/* coordinator/outline.h: how much JSON a text will become, told before it is parsed.
 *
 * Parsed, an empty list takes a hundred times its bytes: a body within LIMIT_BODY_BYTES can become
 * gigabytes. Whoever parses what a client sent counts first.
 *
 * Owns: nothing; pure.  Called by: openai.c (bodies), chat.c (arguments of past tool calls).
 * Tested by: tests/unit/test_openai.c, tests/unit/test_chat.c
 */
#ifndef OCTAVO_COORDINATOR_OUTLINE_H
#define OCTAVO_COORDINATOR_OUTLINE_H

#include "proto/base.h"

struct outline {
    int depth;            /* deepest nesting */
    size_t lists, values; /* lists: objects too */
};

/* One pass over the bytes, whether or not they are JSON. */
struct outline outline_of(const char *p, size_t n);

/* Within LIMIT_JSON_DEPTH, LIMIT_JSON_LISTS and LIMIT_JSON_VALUES. */
bool outline_fits(const struct outline *o);

#endif
