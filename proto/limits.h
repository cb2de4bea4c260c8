/* proto/limits.h: everything is finite, and the numbers are here.
 *
 * Coordinator and workers exchange limits_digest() in HELLO: two binaries built with different
 * numbers refuse each other. Sizes are in the unit of the name's last word.
 */
#ifndef OCTAVO_PROTO_LIMITS_H
#define OCTAVO_PROTO_LIMITS_H

#include <stdint.h>

/* the fleet */
#define LIMIT_RANKS 16

/* a step */
#define LIMIT_SLOTS         256  /* sequences that can be running at once */
#define LIMIT_STEP_ENTRIES  256  /* sequences named by one step */
#define LIMIT_STEP_ROWS     8192 /* tokens fed by one step */
#define LIMIT_STEP_PAGES    8192 /* new pages announced by one step */
#define LIMIT_STEP_SAMPLES  256  /* rows sampled by one step */
#define LIMIT_COPY_RUNS     4096 /* runs of pages named by one copy */
#define LIMIT_PAGE_TOKENS   64   /* tokens per cache page */
#define LIMIT_CONTEXT_TOKENS (1 << 20)

/* sampling */
#define LIMIT_TOP_LOGPROBS 20
#define LIMIT_BIAS         1024 /* logit_bias entries of one request */

/* messages and sockets */
#define LIMIT_MESSAGE_BYTES (4u << 20)
#define LIMIT_WIRE_QUEUE    4096 /* messages queued to or from one peer */

/* HTTP */
#define LIMIT_CONNECTIONS        4096
#define LIMIT_DESCRIPTORS_KEPT   128 /* open files that connections leave to everything else */
#define LIMIT_HEADER_BYTES       (32u << 10)
#define LIMIT_URL_BYTES          (8u << 10)
#define LIMIT_BODY_BYTES         (16u << 20)
#define LIMIT_JSON_DEPTH         128
#define LIMIT_JSON_LISTS         (1 << 16) /* objects and lists of one body */
#define LIMIT_JSON_VALUES        ((1 << 20) + (1 << 16)) /* a context of token ids fits */
#define LIMIT_WRITE_BACKLOG_BYTES (4u << 20) /* unsent bytes of one client before it is cut off */
#define LIMIT_PIPELINE_BYTES     (64u << 10) /* read ahead of the request being answered */
#define LIMIT_BODIES_BYTES       (512u << 20) /* request bodies in memory, all connections together */
#define LIMIT_HEADERS            128         /* header lines of one request */
#define LIMIT_HEADER_SECONDS     20          /* from a request's first byte to its last header */
#define LIMIT_BODY_SECONDS       120         /* from the last header to the end of the body */
#define LIMIT_IDLE_SECONDS       75          /* keep-alive without a request */
#define LIMIT_LINGER_SECONDS     2           /* after the last answer, for the client to close */
#define LIMIT_STALL_SECONDS      120         /* unsent bytes and no progress */

#define LIMIT_QUIET_SECONDS      15          /* of a stream before a comment says that it lives */
#define LIMIT_CANARY_SECONDS     30          /* for the token that a probe asks for */
#define LIMIT_ANSWER_BYTES       (256u << 20) /* gathered for one answer that is not streamed */
#define LIMIT_API_KEYS           1024
#define LIMIT_API_KEY_BYTES      512

/* requests */
#define LIMIT_QUEUE_REQUESTS    4096
#define LIMIT_QUEUE_TOKENS      (64 << 20)
#define LIMIT_CHOICES           64 /* n */
#define LIMIT_SEQUENCES         256 /* prompts times n of one request */
#define LIMIT_PROMPT_BYTES      (64u << 20) /* of one rendered conversation */
#define LIMIT_CACHE_SALT_BYTES  1024
#define LIMIT_STOP_STRINGS      16
#define LIMIT_STOP_STRING_BYTES 1024
#define LIMIT_TOOLS             512

/* GGUF */
#define LIMIT_GGUF_STRING_BYTES (1ull << 30)
#define LIMIT_GGUF_ARRAY        (1ull << 30)
#define LIMIT_GGUF_HEADER_BYTES (1ull << 30) /* of one file, before its tensor data */
#define LIMIT_GGUF_PARTS        99999
#define LIMIT_GGUF_NAME_BYTES   64 /* with a terminator */
#define LIMIT_GGUF_KEY_BYTES    65535
#define LIMIT_GGUF_KEYS         (1 << 16)
#define LIMIT_GGUF_TENSORS      (1 << 18)
#define LIMIT_GGUF_ALIGNMENT    (1u << 20)
#define LIMIT_LAYERS            512
#define LIMIT_EXPERTS           1024

/* FNV-1a over the numbers that both sides of the wire must share. */
static inline uint64_t limits_digest(void) {
    const uint64_t shared[] = {LIMIT_RANKS,        LIMIT_SLOTS,       LIMIT_STEP_ENTRIES,
                               LIMIT_STEP_ROWS,    LIMIT_STEP_PAGES,  LIMIT_STEP_SAMPLES,
                               LIMIT_PAGE_TOKENS,  LIMIT_TOP_LOGPROBS, LIMIT_BIAS,
                               LIMIT_MESSAGE_BYTES, LIMIT_COPY_RUNS};
    uint64_t h = 1469598103934665603ull;
    for (unsigned i = 0; i < sizeof shared / sizeof shared[0]; i++)
        for (int b = 0; b < 64; b += 8) h = (h ^ ((shared[i] >> b) & 255)) * 1099511628211ull;
    return h;
}

#endif
