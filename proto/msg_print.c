/* proto/msg_print.c: messages and worker states as text, for people.
 *
 * Owns: nothing; pure but for the stream.  Called by: debug switches, tests, health.
 * Fails how: never; a value outside its table prints as "?".  Limits: one line per message.
 * Tested by: tests/unit/test_msg.c
 */
#include "proto/msg.h"

#include <inttypes.h>

const char *worker_state_name(enum worker_state s) {
    static const char *const names[WORKER_STATES] = {
        [WORKER_SPAWNED] = "spawned",   [WORKER_LOADING] = "loading",
        [WORKER_LOADED] = "loaded",     [WORKER_READY] = "ready",
        [WORKER_STEPPING] = "stepping", [WORKER_DRAINING] = "draining",
        [WORKER_DEAD] = "dead",         [WORKER_RECLAIMING] = "reclaiming",
        [WORKER_CAPTURING] = "capturing",
    };
    return (unsigned)s < WORKER_STATES ? names[s] : "?";
}

static void print_step(FILE *f, const struct msg_step *s) {
    fprintf(f, "step id=%" PRIu64 " generation=%u tokens=%d pages=%d entries=%d", s->id,
            s->generation, s->n_tokens, s->n_pages, s->n_entries);
    for (int i = 0; i < s->n_entries; i++) {
        const struct msg_entry *e = &s->entries[i];
        fprintf(f, " {slot=%d.%u pos=%d+%d samples=%d token_at=%d pages=%d@%d:%d}", e->slot,
                e->slot_generation, e->pos, e->count, e->samples, e->token_at, e->page_first,
                e->page_at, e->n_pages);
    }
}

static void print_tokens(FILE *f, const struct msg_tokens *t) {
    fprintf(f, "tokens step=%" PRIu64 " generation=%u us=%" PRIu64, t->step_id, t->generation,
            t->step_us);
    for (int i = 0; i < t->n; i++)
        fprintf(f, " {slot=%d.%u pos=%d token=%d logprob=%.4f top=%d}", t->tokens[i].slot,
                t->tokens[i].slot_generation, t->tokens[i].pos, t->tokens[i].token,
                (double)t->tokens[i].logprob, t->tokens[i].n_top);
}

static void print_admit(FILE *f, const struct msg_admit *a) {
    const struct msg_sampling *s = &a->sampling;
    fprintf(f, "admit slot=%d.%u prompt=%d temperature=%g top_p=%g min_p=%g top_k=%d "
            "repetition=%g presence=%g frequency=%g seed=%" PRIu64 " top_logprobs=%d bias=%d",
            a->slot, a->slot_generation, a->n_prompt, (double)s->temperature, (double)s->top_p,
            (double)s->min_p, s->top_k, (double)s->repetition, (double)s->presence,
            (double)s->frequency, s->seed, s->top_logprobs, s->n_bias);
}

static void print_small(FILE *f, const struct msg *m) {
    switch (m->type) {
    case MSG_HELLO: /* the cookie is a secret */
        fprintf(f, "hello protocol=%u limits=%016" PRIx64 " build=%s rank=%d pid=%" PRId64
                " start=%" PRIu64 " device=\"%s\"", m->hello.protocol, m->hello.limits,
                m->hello.build, m->hello.rank, m->hello.pid, m->hello.start_time, m->hello.device);
        return;
    case MSG_PROGRESS:
        fprintf(f, "progress bytes=%" PRIu64 " total=%" PRIu64, m->progress.bytes,
                m->progress.total);
        return;
    case MSG_LOADED:
        fprintf(f, "loaded weights=%" PRIu64 " scratch=%" PRIu64 " page=%" PRIu64 " free=%" PRIu64
                " shm=%" PRIu64 " seconds=%.2f", m->loaded.weight_bytes, m->loaded.scratch_bytes,
                m->loaded.page_bytes, m->loaded.free_bytes, m->loaded.shm_bytes,
                m->loaded.seconds);
        return;
    case MSG_JOIN:
        fprintf(f, "join generation=%u world=%d pages=%" PRId64 " shm=%s bytes=%" PRIu64
                " caches_valid=%d", m->join.generation, m->join.world, m->join.pages,
                m->join.shm_path, m->join.shm_bytes, m->join.caches_valid);
        return;
    case MSG_DONE:
        fprintf(f, "done step=%" PRIu64 " generation=%u us=%" PRIu64 " wait_us=%" PRIu64,
                m->done.step_id, m->done.generation, m->done.step_us, m->done.wait_us);
        return;
    case MSG_BEAT:
        fprintf(f, "beat state=%s last_step=%" PRIu64 " age_us=%" PRIu64 " used=%" PRIu64
                " free=%" PRIu64 " load=%" PRIu64 "/%" PRIu64,
                worker_state_name((enum worker_state)m->beat.state), m->beat.last_step,
                m->beat.last_step_age_us, m->beat.memory_used_bytes, m->beat.memory_free_bytes,
                m->beat.load_bytes, m->beat.load_total);
        return;
    case MSG_JOINED: fprintf(f, "joined generation=%u", m->joined.generation); return;
    case MSG_ABORT: fprintf(f, "abort generation=%u", m->abort.generation); return;
    case MSG_ABORTED: fprintf(f, "aborted generation=%u", m->aborted.generation); return;
    case MSG_STOP: fprintf(f, "stop"); return;
    case MSG_FAILED:
        fprintf(f, "failed exit=%d text=\"%s\"", m->failed.exit_code, m->failed.text);
        return;
    default: fprintf(f, "? type=%d", (int)m->type); return;
    }
}

static void print_copy(FILE *f, const struct msg_copy *c) {
    fprintf(f, "copy id=%" PRIu64 " generation=%u root=%d needs=%x runs=", c->id, c->generation,
            c->root, c->needs);
    for (int i = 0; i < c->n_runs; i++)
        fprintf(f, "%s%d+%d", i ? "," : "", c->runs[i].first, c->runs[i].count);
}

void msg_print(FILE *f, const struct msg *m) {
    switch (m->type) {
    case MSG_STEP: print_step(f, &m->step); break;
    case MSG_RESTORE:
        fprintf(f, "restore: ");
        print_step(f, &m->restore);
        break;
    case MSG_COPY: print_copy(f, &m->copy); break;
    case MSG_TOKENS: print_tokens(f, &m->tokens); break;
    case MSG_ADMIT: print_admit(f, &m->admit); break;
    default: print_small(f, m); break;
    }
    fprintf(f, "\n");
}
