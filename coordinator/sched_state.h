/* coordinator/sched_state.h: the inside of a scheduler, for the files sched*.c alone. See sched.h.
 *
 * Owns: nothing.  Called by: sched.c, sched_queue.c, sched_prefix.c, sched_restore.c.
 */
#ifndef OCTAVO_COORDINATOR_SCHED_STATE_H
#define OCTAVO_COORDINATOR_SCHED_STATE_H

#include "coordinator/pages.h"
#include "coordinator/sched.h"

#define NONE       (-1)
#define INDEX_BITS 16

enum seq_state { SEQ_FREE, SEQ_WAITING, SEQ_RUNNING };
enum seq_mark { MARK_NONE, MARK_FINISH, MARK_CANCEL };

struct seq {
    enum seq_state state;
    enum seq_mark mark;  /* asked for from outside, done in sched_sweep */
    uint32_t generation; /* upper part of the id */
    int32_t prev, next;  /* waiting list; next also links the free list */
    int32_t next_marked;
    engine_sink *sink;
    void *user;
    int priority;
    uint64_t arrival;
    uint64_t deadline_us; /* UINT64_MAX: none */
    int32_t *tokens; /* prompt, then output */
    int32_t n_tokens, n_prompt, max_total, cap_tokens;
    int32_t *stop_ids;
    int n_stop_ids;
    bool ignore_eos, lockstep;
    struct msg_sampling sampling;
    /* while it has a slot */
    int32_t slot;
    int32_t n_fed, n_pending;
    int32_t *pages; /* its page table */
    int32_t n_pages, n_announced, cap_pages;
    int32_t n_found;    /* positions that were in the cache when it took the slot */
    uint64_t last_step; /* the last planned step that names it */
    /* the prefix cache */
    struct digest root;
    struct digest *names; /* [cap_pages] of its full pages */
    int32_t n_names, n_named;  /* known; told to the page account */
    bool entered;              /* it has had a slot before */
    int32_t n_cached;          /* of the prompt, found in the cache when it first had one */
};

struct slot {
    int32_t seq; /* NONE: free */
    uint32_t generation;
};

struct flight_entry {
    int32_t slot;
    uint32_t generation;
    int32_t pos;      /* the first position it feeds */
    int32_t next_pos; /* the position its sample takes */
    bool samples;
};

struct flight { /* a step in flight */
    uint64_t id, planned_us;
    int n_rows, n;
    int n_decode, prompt_rows; /* of these rows; the others are prompts' */
    double prompt_work;        /* see sched_gap.c */
    struct flight_entry e[LIMIT_STEP_ENTRIES];
    int16_t by_slot[LIMIT_SLOTS]; /* index into e, or NONE */
};

struct sched_restore { /* how far sched_restore_next has come */
    uint8_t *live; /* [pages.n] 1: holds something that was committed */
    int64_t page;
    int running;   /* index into running[] */
    int32_t pos;   /* of its positions, so many are said; NONE: not even the ADMIT */
};

struct sched {
    struct sched_options o;
    int32_t *eog;
    struct seq *seqs; /* [n_pool] */
    int n_pool;
    int32_t free_head, wait_head, wait_tail, marked_head;
    int n_waiting;
    int64_t waiting_tokens;
    int32_t running[LIMIT_SLOTS]; /* in order: most urgent, then oldest first */
    int n_running;
    struct slot slots[LIMIT_SLOTS];
    struct pages pages;                    /* n 0 until sched_set_pages */
    struct flight flight[SCHED_DEPTH_MAX]; /* a ring */
    int flight_head, n_flight;
    struct sched_restore restore;
    uint64_t last_id, arrivals;
    struct sched_event *events;
    int n_events, cap_events;
    uint64_t next_deadline_us; /* nobody's comes before this */
    uint64_t last_commit_us;
    double busy_rows, busy_us; /* fed, and the time that took, the past fading */
    double output_mean;        /* tokens of an answer, smoothed */
    double step_us, us_per_work; /* of a step without prompts; what they add; 0: not measured */
    struct sched_counts count; /* the running totals only */
};

static inline int32_t seq_index(const struct sched *s, const struct seq *q) {
    return (int32_t)(q - s->seqs);
}

static inline uint64_t seq_id(const struct sched *s, const struct seq *q) {
    return (uint64_t)q->generation << INDEX_BITS | (uint64_t)seq_index(s, q);
}

/* The one order of everything: lower priority value first, then earlier arrival. */
static inline bool seq_before(const struct seq *a, const struct seq *b) {
    return a->priority != b->priority ? a->priority < b->priority : a->arrival < b->arrival;
}

static inline int32_t sched_pages_for(int64_t tokens) {
    return (int32_t)((tokens + LIMIT_PAGE_TOKENS - 1) / LIMIT_PAGE_TOKENS);
}

/* sched_queue.c */
struct sched_event *sched_event_new(struct sched *s, const struct seq *q);
void sched_wait_insert(struct sched *s, struct seq *q);
void sched_wait_remove(struct sched *s, struct seq *q);
void sched_run_insert(struct sched *s, struct seq *q);
/* Out of the running list and its slot, its pages given back. */
void sched_run_remove(struct sched *s, struct seq *q);
/* The end of a request: its event is written and its place is free. */
void seq_end(struct sched *s, struct seq *q, enum engine_finish reason, int32_t stop_token,
             const char *error);

/* sched.c */
void seq_admit(const struct sched *s, const struct seq *q, struct msg_admit *out);

/* sched_prefix.c */
/* SipHash-2-4 with 128 bits of output. */
struct digest sched_digest(struct digest key, const void *bytes, size_t n);
/* How many of the first pages of q, which has none yet, are in the cache. They are written into its
 * page table, not yet held; *n_kept: of them, those that nobody holds. */
int32_t sched_prefix_match(const struct sched *s, struct seq *q, int32_t *n_kept);
/* The page behind those matched is being computed by a sequence that goes before q. */
bool sched_prefix_coming(const struct sched *s, const struct seq *q, int32_t n_matched);
/* Positions below n_answered of q are in the caches of all ranks. */
void sched_prefix_answered(struct sched *s, struct seq *q, int32_t n_answered);
/* Nothing that q holds is found any more: something in it is no number. */
void sched_prefix_forget(struct sched *s, const struct seq *q);

/* sched_gap.c */
void sched_gap_measure(struct sched *s, const struct flight *f, double us);
/* Of `want` rows from pos on, how many step f may take in besides what it holds. */
int32_t sched_gap_rows(const struct sched *s, const struct flight *f, int32_t pos, int32_t want);
/* sign 1: it holds them now; -1: no more. */
void sched_gap_add(struct flight *f, int32_t pos, int32_t rows, int sign);

/* sched_restore.c */
/* One entry of m: the positions pos…end of q, or as many as fit, and their pages; how many. */
int32_t sched_history(const struct sched *s, const struct seq *q, int32_t pos, int32_t end,
                      struct msg_step *m);

#endif
