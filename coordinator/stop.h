/* coordinator/stop.h: finds stop strings in a stream and holds back what may become one.
 *
 * Owns: a failure table per string and the held text.  Called by: text.c.
 * Fails how: stop_init: ERR_LIMIT, ERR_NOMEM.  Limits: LIMIT_STOP_STRINGS,
 * LIMIT_STOP_STRING_BYTES; a few steps per byte and string, whatever the strings.
 * Tested by: tests/unit/test_text.c, tests/fuzz/fuzz_text.c
 */
#ifndef OCTAVO_COORDINATOR_STOP_H
#define OCTAVO_COORDINATOR_STOP_H

#include "coordinator/buf.h"
#include "proto/base.h"
#include "proto/limits.h"

struct stop {
    struct stop_one {
        const char *s;   /* borrowed */
        uint16_t n;      /* bytes */
        uint16_t state;  /* bytes of s that the held text ends with */
        uint16_t *fail;  /* [n] longest border of s[0..i] */
    } all[LIMIT_STOP_STRINGS];
    int n;
    struct buf held;
};

int stop_init(struct stop *s, const char *const *stops, int n);
void stop_deinit(struct stop *s);

/* Appends to *out what of p[0..n), and of what was held, may be shown. Returns NULL, or the first
 * stop string to be completed (of several at once the longest): then *out ends before it, or with
 * it if `include`, and the rest of the text is dropped. */
const char *stop_feed(struct stop *s, const char *p, size_t n, bool include, struct buf *out);

/* No continuation: appends what was held and starts afresh. */
void stop_flush(struct stop *s, struct buf *out);

#endif
