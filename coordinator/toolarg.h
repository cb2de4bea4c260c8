/* coordinator/toolarg.h: the text of a tool call's argument as a JSON value of the tool's schema.
 *
 * Owns: nothing.  Called by: text.c.  Pure.
 * Fails how: never: a text that fits nothing else is a string.
 * Limits: TOOLARG_DEPTH.  Tested by: tests/unit/test_text.c, tests/fuzz/fuzz_text.c
 */
#ifndef OCTAVO_COORDINATOR_TOOLARG_H
#define OCTAVO_COORDINATOR_TOOLARG_H

#include <jansson.h>

#include "coordinator/buf.h"
#include "proto/base.h"

#define TOOLARG_DEPTH 64

enum toolarg_type { /* bits; 0: nothing is known */
    TOOLARG_STRING = 1,
    TOOLARG_NUMBER = 2,
    TOOLARG_BOOLEAN = 4,
    TOOLARG_NULL = 8,
    TOOLARG_OBJECT = 16,
    TOOLARG_ARRAY = 32,
};

/* The types that the schema of parameter `key` of tool `name` allows; tools may be NULL. */
unsigned toolarg_types(json_t *tools, const char *name, const char *key);

/* Appends the JSON of the whole text p[0..n), valid UTF-8. */
void toolarg_value(struct buf *out, unsigned types, const char *p, size_t n);

#endif
