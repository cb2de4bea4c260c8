/* coordinator/utf8.c: validity, completeness and repair of UTF-8 (declared in tok.h).
 *
 * Owns: nothing.  Called by: tok.c, text.c, the API files.  Fails how: never.
 * Limits: none; linear.  Tested by: tests/unit/test_text.c, tests/conformance/test_tokenizer.py
 *
 * One function knows the grammar: utf8_step looks at the longest prefix that can still become a
 * code point. Everything else follows from its three answers. An invalid stretch is replaced as
 * Unicode recommends (and Python does): one U+FFFD for each maximal prefix of a valid sequence, so
 * that scrubbing a stream in pieces gives the same text as scrubbing it whole.
 */
#include <string.h>

#include "coordinator/tok.h"

enum utf8_state { UTF8_VALID, UTF8_INVALID, UTF8_SHORT };

/* What stands at p[0..n), n > 0: *len bytes that are a code point, that can never become one, or
 * that are a beginning cut off by n. */
static enum utf8_state utf8_step(const unsigned char *p, size_t n, size_t *len) {
    unsigned char c = p[0], low = 0x80, high = 0xBF;
    size_t need;
    *len = 1;
    if (c < 0x80) return UTF8_VALID;
    if (c < 0xC2 || c > 0xF4) return UTF8_INVALID;
    if (c < 0xE0) {
        need = 2;
    } else if (c < 0xF0) {
        need = 3;
        if (c == 0xE0) low = 0xA0;  /* overlong */
        if (c == 0xED) high = 0x9F; /* surrogates */
    } else {
        need = 4;
        if (c == 0xF0) low = 0x90;  /* overlong */
        if (c == 0xF4) high = 0x8F; /* beyond U+10FFFF */
    }
    for (size_t i = 1; i < need; i++, low = 0x80, high = 0xBF) {
        if (i == n) return UTF8_SHORT;
        if (p[i] < low || p[i] > high) return UTF8_INVALID;
        *len = i + 1;
    }
    return UTF8_VALID;
}

/* The length of the ASCII run at p, rounded down to words where that is quick. */
static size_t ascii_run(const char *p, size_t n) {
    size_t i = 0;
    for (uint64_t word; i + sizeof word <= n; i += sizeof word) {
        memcpy(&word, p + i, sizeof word);
        if (word & 0x8080808080808080ull) break;
    }
    return i;
}

bool utf8_valid(const char *p, size_t n) {
    for (size_t i = 0, len; i < n; i += len) {
        i += ascii_run(p + i, n - i);
        if (i == n) break;
        if (utf8_step((const unsigned char *)p + i, n - i, &len) != UTF8_VALID) return false;
    }
    return true;
}

size_t utf8_complete(const char *p, size_t n) {
    /* Only the last three bytes can be the beginning of something. */
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        const unsigned char *q = (const unsigned char *)p + n - back;
        size_t len;
        if (*q >= 0x80 && *q < 0xC0) continue;
        return utf8_step(q, back, &len) == UTF8_SHORT ? n - back : n;
    }
    return n;
}

size_t utf8_scrub(char *dst, const char *p, size_t n) {
    char *d = dst;
    for (size_t i = 0, len; i < n; i += len) {
        if (utf8_step((const unsigned char *)p + i, n - i, &len) == UTF8_VALID) {
            memcpy(d, p + i, len);
            d += len;
        } else {
            memcpy(d, "\xEF\xBF\xBD", 3);
            d += 3;
        }
    }
    *d = 0;
    return (size_t)(d - dst);
}
