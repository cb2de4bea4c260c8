/* proto/msg.h: the words that coordinator and workers say to each other.
 *
 * A message is a msgpack array [type, fields…] in the order of the struct. The coordinator
 * decides, the workers obey: if a worker would have to choose, a field is missing here.
 *
 *   worker                                coordinator
 *     HELLO (control socket)      ───>      checks version, build, limits, cookie
 *     PROGRESS bytes of total     ───>      while loading
 *     LOADED sizes                ───>
 *                                 <───      JOIN generation, pages, shared memory
 *     JOINED generation           ───>
 *                                 <───      ADMIT slot and sampling   (step socket, in order)
 *                                 <───      STEP id, entries          (step socket)
 *     TOKENS (rank 0) / DONE      ───>      (step socket)
 *     BEAT every BEAT_MS          ───>      (control socket)
 *                                 <───      ABORT generation          (control socket)
 *     ABORTED generation          ───>
 *      … a rank is replaced, all JOIN a new generation, and then, on the step socket:
 *                                 <───      COPY runs of pages, from one rank to the newborn
 *     DONE                        ───>
 *                                 <───      ADMIT, RESTORE what is in the cache, by slot
 *                                 <───      STOP                      (control socket)
 *     FAILED sentence             ───>      the worker is about to exit
 *
 * Ids that cross a process carry a generation: an answer for a recycled slot or an old
 * communicator is dropped, not believed.
 *
 * Owns: nothing; pure.  Fails how: msg_unpack returns ERR_FORMAT, ERR_LIMIT or ERR_VERSION and
 * leaves *m unspecified; it never reads past n.  Limits: LIMIT_STEP_*, LIMIT_MESSAGE_BYTES.
 * Tested by: tests/unit/test_msg.c, tests/fuzz/fuzz_msg.c
 */
#ifndef OCTAVO_PROTO_MSG_H
#define OCTAVO_PROTO_MSG_H

#include "proto/base.h"
#include "proto/limits.h"

#define MSG_PROTOCOL 1
#define MSG_BEAT_MS  250

enum msg_type {
    MSG_HELLO = 1, MSG_PROGRESS, MSG_LOADED, MSG_JOIN, MSG_JOINED, MSG_ADMIT, MSG_STEP,
    MSG_TOKENS, MSG_DONE, MSG_BEAT, MSG_ABORT, MSG_ABORTED, MSG_STOP, MSG_FAILED, MSG_COPY,
    MSG_RESTORE,
    MSG_TYPES
};

/* Worker states, as health shows them. RECLAIMING and DEAD are the coordinator's knowledge; a rank
 * is CAPTURING, its step graphs, between JOIN and JOINED. */
enum worker_state {
    WORKER_SPAWNED, WORKER_LOADING, WORKER_LOADED, WORKER_READY, WORKER_STEPPING, WORKER_DRAINING,
    WORKER_DEAD, WORKER_RECLAIMING, WORKER_CAPTURING,
    WORKER_STATES
};
const char *worker_state_name(enum worker_state s);

struct msg_hello {
    uint32_t protocol;
    uint64_t limits;     /* limits_digest() */
    char build[64];      /* build id */
    char cookie[65];     /* proves that the coordinator started this process */
    int32_t rank;
    int64_t pid;
    uint64_t start_time; /* field 22 of /proc/PID/stat */
    char device[96];     /* "cpu", or name, UUID and PCI address */
};

struct msg_progress {
    uint64_t bytes, total;
};

struct msg_loaded {
    uint64_t weight_bytes;  /* on the device */
    uint64_t scratch_bytes;
    uint64_t page_bytes;    /* one cache page over all layers */
    uint64_t free_bytes;    /* of the device, after loading */
    uint64_t shm_bytes;     /* shared memory that one generation's collectives need */
    double seconds;
};

struct msg_join {
    uint32_t generation;
    int32_t world;
    int64_t pages;        /* cache pages to hold; allocated at the first JOIN, then unchanged */
    char shm_path[128];   /* memory for this generation's collectives, e.g. /proc/PID/fd/N */
    uint64_t shm_bytes;
    bool caches_valid;    /* false: forget every cached page */
};

/* Everything a worker needs to know of a sequence, sent once when it takes a slot. */
struct msg_sampling {
    float temperature;      /* 0: greedy */
    float top_p;            /* 1: off */
    float min_p;            /* 0: off */
    int32_t top_k;          /* 0: off */
    float repetition;       /* 1: off; over prompt and output tokens */
    float presence, frequency; /* 0: off; over output tokens */
    uint64_t seed;
    int32_t top_logprobs;   /* how many alternatives to report, 0..LIMIT_TOP_LOGPROBS */
    int32_t n_bias;
    int32_t bias_token[LIMIT_BIAS];
    float bias_value[LIMIT_BIAS];
};

struct msg_admit {
    int32_t slot;
    uint32_t slot_generation;
    int32_t n_prompt;       /* positions below are prompt, the rest is output (penalties) */
    struct msg_sampling sampling;
};

/* One sequence's part of a step: feed `count` tokens at positions pos…pos+count-1 and sample after
 * the last `samples` of them. */
struct msg_entry {
    int32_t slot;
    uint32_t slot_generation;
    int32_t pos;
    int32_t count;
    int32_t samples;    /* 0: a prefill chunk, not the last; 1: the usual; more: verification */
    int32_t token_at;   /* first token in step.tokens; -1: count is 1, feed the one sampled last */
    int32_t page_first; /* page-table index that the first new page takes */
    int32_t page_at;    /* first new page in step.pages */
    int32_t n_pages;
};

/* token path 6/9: what the ranks feed next, as the coordinator's STEP says it to each worker. */
struct msg_step {
    uint64_t id;
    uint32_t generation;
    int32_t n_entries, n_tokens, n_pages;
    struct msg_entry entries[LIMIT_STEP_ENTRIES];
    int32_t tokens[LIMIT_STEP_ROWS];
    int32_t pages[LIMIT_STEP_PAGES];
};

/* Pages that some ranks lack. All ranks take part, as in a step, and answer DONE with this id. */
struct msg_run {
    int32_t first, count; /* count >= 1 pages from `first` on */
};

struct msg_copy {
    uint64_t id; /* 1, 2, … within a generation */
    uint32_t generation;
    int32_t root;   /* the rank that has them */
    uint32_t needs; /* bit r: rank r lacks them; the others keep what they have */
    int32_t n_runs;
    struct msg_run runs[LIMIT_COPY_RUNS];
};

struct msg_token {
    int32_t slot;
    uint32_t slot_generation;
    int32_t pos;    /* position the sampled token will take */
    int32_t token;  /* -1: no finite logit, this sequence cannot go on */
    float logprob;  /* of the raw distribution, before temperature and penalties */
    int32_t n_top;
    int32_t top_token[LIMIT_TOP_LOGPROBS];
    float top_logprob[LIMIT_TOP_LOGPROBS];
};

struct msg_tokens {
    uint64_t step_id;
    uint32_t generation;
    uint64_t step_us; /* time the step took on this rank */
    int32_t n;
    struct msg_token tokens[LIMIT_STEP_SAMPLES];
};

struct msg_done {
    uint64_t step_id;
    uint32_t generation;
    uint64_t step_us;
    uint64_t wait_us; /* of which waiting in collectives */
};

struct msg_beat {
    int32_t state;          /* enum worker_state */
    uint64_t last_step;     /* id of the last completed step, 0: none */
    uint64_t last_step_age_us;
    uint64_t memory_used_bytes, memory_free_bytes;
    uint64_t load_bytes, load_total;
};

struct msg_generation {
    uint32_t generation;
};

struct msg_failed {
    int32_t exit_code; /* enum exit_code that follows */
    char text[512];
};

struct msg {
    enum msg_type type;
    union {
        struct msg_hello hello;
        struct msg_progress progress;
        struct msg_loaded loaded;
        struct msg_join join;
        struct msg_generation joined, abort, aborted;
        struct msg_admit admit;
        struct msg_copy copy;
        struct msg_step step, restore; /* RESTORE: as a STEP, but the positions are in the cache
                                        * already: to be remembered and counted, not computed */
        struct msg_tokens tokens;
        struct msg_done done;
        struct msg_beat beat;
        struct msg_failed failed;
    };
};

/* A growing byte buffer; reuse it, it keeps its memory. {0} is valid. */
struct msg_buf {
    uint8_t *p;
    size_t n, cap;
};
void msg_buf_deinit(struct msg_buf *b);

/* Replaces the content of b. ERR_NOMEM or OK. A field outside its range is a bug and asserts. */
int msg_pack(struct msg_buf *b, const struct msg *m);

/* ERR_VERSION: a HELLO whose protocol is not MSG_PROTOCOL (m->hello.protocol says which).
 * ERR_LIMIT: well formed, but a field, a count or a reference into another array is out of range. */
int msg_unpack(struct msg *m, const uint8_t *p, size_t n);
void msg_print(FILE *f, const struct msg *m); /* one line, for debugging */

#endif
