/* tests/fuzz/fuzz_text.c: arbitrary bytes through the output parser, the splitter and the stops.
 *
 * The first bytes choose options; the rest are fed twice, cut differently, and both outputs must
 * be equal and valid UTF-8. Byte 255 and the next name a token; all other bytes are text.
 *
 * Owns: a vocabulary, for the life of the process.  Called by: a fuzzing engine, replay.c.
 * Fails how: aborts.
 */
#include <stdio.h>
#include <stdlib.h>

#include "coordinator/text.h"
#include "tests/unit/vocab_fixture.h"

static struct fixture fixture;
static struct tok *tok;
static json_t *tools;

static void open_once(void) {
    struct err_text err;
    if (tok) return;
    fixture_init(&fixture);
    if (fixture_open(&fixture, &tok, &err) < 0) abort();
    tools =
        json_loads("[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":"
                   "\"string\"},\"n\":{\"type\":\"integer\"}}}}}]",
                   0, NULL);
}

static void take(void *user, const struct text_delta *d) {
    struct buf *joined = user;
    if (d->n == 0 || !utf8_valid(d->s, d->n)) abort();
    char head[2] = {(char)('0' + d->kind), (char)('0' + d->call % 64)};
    static char last[2];
    if (joined->n == 0 || memcmp(head, last, 2) != 0) buf_add(joined, head, 2);
    memcpy(last, head, 2);
    buf_add(joined, d->s, d->n);
}

/* Bytes 0 to 254 are text; 255 and a byte is a token. most: bytes of text fed at once. */
static void run(const struct text_options *o, const uint8_t *p, size_t n, size_t most, bool cut,
                struct buf *joined) {
    struct text *x;
    if (text_new(&x, tok, o, take, joined) < 0) abort();
    buf_add(joined, "", 0);
    for (size_t i = 0; i < n;) {
        if (p[i] == 255) {
            if (i + 1 < n) text_feed(x, 256 + p[i + 1] % (tok_vocab(tok) - 256));
            i += 2;
            continue;
        }
        size_t len = 0;
        while (i + len < n && p[i + len] != 255 && len < most) len++;
        text_feed_bytes(x, (const char *)p + i, len);
        i += len;
    }
    text_end(x, cut);
    text_free(x);
}

static void encode(const uint8_t *p, size_t n) {
    char *text = malloc(3 * n + 1);
    struct tok_ids ids = {0};
    size_t len = utf8_scrub(text, (const char *)p, n);
    if (!utf8_valid(text, len) || utf8_complete(text, len) != len) abort();
    if (tok_encode(tok, text, len, TOK_PLAIN, &ids) < 0) abort();
    size_t at = 0, piece;
    for (size_t i = 0; i < ids.n; i++, at += piece) {
        const char *q = tok_bytes(tok, ids.ids[i], &piece);
        if (at + piece > len || memcmp(text + at, q, piece) != 0) abort();
    }
    if (at != len) abort();
    tok_ids_deinit(&ids);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    static const char *const stops[] = {"ab", "</", "aab", "\n\n"};
    open_once();
    if (n < 2) return 0;
    encode(p, n);
    struct text_options o = {.chat = p[0] & 1,
                             .in_reasoning = p[0] & 2,
                             .parse_tools = p[0] & 4,
                             .tools = tools,
                             .stops = stops,
                             .n_stops = p[0] >> 3 & 3,
                             .include_stop = p[0] & 32};
    struct buf one = {0}, other = {0};
    run(&o, p + 2, n - 2, 1, p[0] & 64, &one);
    run(&o, p + 2, n - 2, 1 + p[1], p[0] & 64, &other);
    if (one.n != other.n || memcmp(one.p, other.p, one.n) != 0) {
        fprintf(stderr, "byte by byte %s\nin pieces    %s\n", one.p, other.p);
        abort();
    }
    buf_deinit(&one);
    buf_deinit(&other);
    return 0;
}
