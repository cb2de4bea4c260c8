/* coordinator/fleet_canary.c: one token through the whole model before anybody is told READY.
 *
 * Owns: the canary's step, the token of the last one.  Called by: fleet.c from its tick.
 * Fails how: a rank that does not answer is found as in any step; an answer that is no token, or
 * another token than before, loses every rank: nobody can be blamed.
 * Limits: CANARY_ROWS tokens, one page that no sequence ever gets.
 * Tested by: tests/unit/test_engine.c, tests/faults/test_health.py
 *
 * Ranks that have loaded and joined can still be unable to answer: a kernel that does not run on
 * this device, a graph that cannot be captured, a byte that was read wrongly. So between JOINED and
 * the caches that the newborn get, the group is fed a few tokens and must answer one. No client
 * waits behind it that does not wait anyway, and nothing of a client is touched: the cache page is
 * the last one, which the scheduler is not told of, and slot 0 is admitted anew afterwards if a
 * sequence has it, as every slot is.
 *
 * It is the same prompt each time and greedy, so the same group of the same weights gives the same
 * token. A successor that loaded something else is found here, before a client reads it. On a GPU
 * the ranks may add up in another way than before, with other last bits: there a token that was
 * nearly as likely is taken for the same.
 */
#include <inttypes.h>
#include <string.h>

#include "coordinator/fleet_state.h"
#include "proto/log.h"

#define CANARY_ROWS     8
#define CANARY_TOP      5   /* the likeliest tokens, told beside the one chosen */
#define CANARY_TIE      0.1f /* so much less log-probability is nearly as likely */
#define CANARY_LEAST_US (10 * SECOND_US) /* the first step of a process is its slowest */

bool fleet_wants_canary(const struct fleet *f) {
    return f->canary == FLEET_CANARY_WANTED;
}

static void admit(struct fleet *f, uint64_t now_us) {
    struct msg *m = f->in; /* nothing is being read */
    m->type = MSG_ADMIT;
    m->admit = (struct msg_admit){.n_prompt = MIN(CANARY_ROWS, f->o.max_step_rows),
                                  .sampling = {.top_p = 1,
                                               .repetition = 1,
                                               .top_logprobs = CANARY_TOP}};
    fleet_send_all(f, m, now_us);
}

/* Slot generation 0 is nobody else's: the scheduler begins with 1. */
static void feed(struct fleet *f, uint64_t id, uint64_t now_us) {
    struct msg *m = f->in;
    int rows = MIN(CANARY_ROWS, f->o.max_step_rows);
    m->type = MSG_STEP;
    m->step.id = id;
    m->step.generation = f->generation;
    m->step.n_entries = m->step.n_pages = 1;
    m->step.n_tokens = rows;
    m->step.entries[0] = (struct msg_entry){.count = rows, .samples = 1, .n_pages = 1};
    m->step.pages[0] = (int32_t)f->pages;
    for (int i = 0; i < rows; i++) m->step.tokens[i] = i + 1;
    fleet_note_step(f, &m->step, now_us);
    struct flight *s = &f->flight[f->flight_head];
    s->due_us = MAX(s->due_us, now_us + CANARY_LEAST_US);
    fleet_send_all(f, m, now_us);
}

void fleet_canary(struct fleet *f, uint64_t id, uint64_t now_us) {
    if (f->state != FLEET_CANARY) return;
    assert(f->n_flight == 0);
    f->canary = FLEET_CANARY_ASKED;
    admit(f, now_us);
    if (f->state == FLEET_CANARY) feed(f, id, now_us);
}

static bool is_same(const struct fleet *f, const struct msg_token *k) {
    if (k->token == f->canary_token) return true;
    for (int i = 0; i < k->n_top && strcmp(f->o.device, "cpu"); i++)
        if (k->top_token[i] == f->canary_token) return k->top_logprob[i] > k->logprob - CANARY_TIE;
    return false;
}

/* OK, or the sentence. */
static int judge(const struct fleet *f, const struct msg_tokens *t, struct err_text *err) {
    const struct msg_token *k = &t->tokens[0];
    int rows = MIN(CANARY_ROWS, f->o.max_step_rows);
    if (t->n != 1 || k->slot != 0 || k->slot_generation != 0 || k->pos != rows)
        return err_set(err, ERR_FORMAT,
                       "canary: expected one token at position %d of slot 0, found %d, the first at "
                       "position %d of slot %d",
                       rows, t->n, k->pos, k->slot);
    if (k->token < 0)
        return err_set(err, ERR_FORMAT, "canary: expected a token, found no finite logit");
    if (f->canary_known && !is_same(f, k))
        return err_set(err, ERR_FORMAT, "canary: expected token %d as before, found %d",
                       f->canary_token, k->token);
    return OK;
}

static void failed(struct fleet *f, const char *why, uint64_t now_us) {
    f->canary_known = false; /* who was right is not known: the next one counts */
    for (int r = 0; r < f->world; r++)
        fleet_lose(f, &f->w[r], CAUSE_CANARY, now_us, "%s", why);
    f->canary = FLEET_CANARY_FAILED;
}

void fleet_check_canary(struct fleet *f, uint64_t now_us) {
    struct err_text err = {0};
    if (f->canary == FLEET_CANARY_WANTED) return; /* to be sent yet */
    const struct msg_tokens *t = fleet_answer(f);
    if (!t) {
        fleet_check_step(f, now_us);
        if (f->state != FLEET_CANARY) f->canary = FLEET_CANARY_FAILED;
        return;
    }
    if (judge(f, t, &err) < 0) {
        failed(f, err.text, now_us);
        return;
    }
    f->canary = FLEET_CANARY_SUNG;
    f->canary_known = true;
    f->canary_token = t->tokens[0].token;
    f->canary_us = now_us - f->flight[f->flight_head].begun_us;
    log_info("canary", "generation=%u token=%d ms=%.1f", f->generation, f->canary_token,
             (double)f->canary_us / 1e3);
    f->flight_head = (f->flight_head + 1) % SCHED_DEPTH_MAX;
    f->n_flight = 0;
    f->recovery.sung_us = now_us;
    f->want_restore = f->root >= 0;
    fleet_enter(f, FLEET_RESTORING, now_us);
}
