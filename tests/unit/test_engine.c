/* tests/unit/test_engine.c: engine and fleet with real processes and a worker without a model.
 *
 * tests/unit/fake_worker.c samples a hash of everything it was fed, so each stream has one right
 * text, whatever died meanwhile. A watchdog timer fails the test instead of hanging it.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/engine.h"
#include "proto/log.h"

#define REQS_MAX 64
#define EOG      0

struct req {
    uint64_t id, seed;
    int32_t prompt[400];
    int n_prompt, max_tokens, n_got, ends;
    enum engine_finish reason;
    int32_t expected; /* the next token */
    uint64_t hash;
    char error[200];
    int finish_at;     /* engine_finish after so many tokens; 0: never */
    int restart_every; /* engine_restart of rank 1 after so many more tokens; 0: never */
    int cancel_at;
    struct world *in;
};

struct world {
    uv_loop_t loop;
    uv_timer_t watchdog;
    struct engine *e;
    struct engine_options o;
    struct req reqs[REQS_MAX];
    int n_reqs, n_open;
    int done_code, fatal_code; /* -1: not called */
    bool stop_when_idle;
    int readies;
    char why[256];
    int64_t pids[LIMIT_RANKS];
    int restarts[LIMIT_RANKS], by_canary[LIMIT_RANKS];
};

static uint64_t mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9E3779B97F4A7C15ull;
    return h ^ h >> 29;
}

static void on_done(void *user, int code) {
    struct world *w = user;
    w->done_code = code;
    uv_close((uv_handle_t *)&w->watchdog, NULL);
}

static void stop(struct world *w, bool now) {
    engine_stop(w->e, now, on_done, w);
}

static void note_pids(struct world *w) {
    static struct engine_status s;
    engine_status(w->e, &s);
    for (int i = 0; i < s.n_workers; i++) {
        w->pids[i] = s.workers[i].pid;
        w->restarts[i] = s.workers[i].restarts;
        w->by_canary[i] = s.workers[i].restarts_by[CAUSE_CANARY];
    }
}

static void on_fatal(void *user, int code) {
    struct world *w = user;
    static struct engine_status s;
    engine_status(w->e, &s);
    snprintf(w->why, sizeof w->why, "%s", s.why);
    assert_int_equal(s.state, ENGINE_FAILED);
    w->fatal_code = code;
    stop(w, true);
}

static void on_ready(void *user) {
    struct world *w = user;
    w->readies++;
    note_pids(w);
}

static void on_watchdog(uv_timer_t *t) {
    UNUSED(t);
    fail_msg("the test did not come to its end within 60 s");
}

static void sink(void *user, const struct engine_event *ev) {
    struct req *r = user;
    assert_int_equal(r->ends, 0);
    if (!ev->finished) {
        assert_int_equal(ev->token->token, r->expected);
        r->n_got++;
        r->hash = mix(r->hash, (uint64_t)ev->token->token);
        r->expected = (int32_t)(100 + r->hash % 800);
        if (r->restart_every && r->n_got % r->restart_every == 0) engine_restart(r->in->e, 1);
        if (r->n_got == r->finish_at) engine_finish(r->in->e, r->id);
        if (r->n_got == r->cancel_at) {
            engine_cancel(r->in->e, r->id);
            r->ends = -1; /* nothing may come any more */
            r->in->n_open--;
        }
    } else {
        r->ends++;
        r->reason = ev->reason;
        snprintf(r->error, sizeof r->error, "%s", ev->error ? ev->error : "");
        assert_int_equal(ev->n_prompt, r->n_prompt);
        assert_int_equal(ev->n_output, r->n_got);
        r->in->n_open--;
    }
    if (r->in->n_open == 0 && r->in->stop_when_idle) {
        note_pids(r->in);
        stop(r->in, false);
    }
}

static struct req *submit(struct world *w, int n_prompt, int max_tokens) {
    static struct engine_request q;
    struct req *r = &w->reqs[w->n_reqs++];
    r->in = w;
    r->n_prompt = n_prompt;
    r->seed = r->hash = mix(7, (uint64_t)w->n_reqs);
    for (int i = 0; i < n_prompt; i++) {
        r->prompt[i] = (i * 37 + w->n_reqs) % 50 + 1;
        r->hash = mix(r->hash, (uint64_t)r->prompt[i]);
    }
    r->expected = (int32_t)(100 + r->hash % 800);
    q = (struct engine_request){.tokens = r->prompt,
                                .n_tokens = n_prompt,
                                .max_tokens = max_tokens,
                                .sink = sink,
                                .user = r};
    q.sampling.top_p = q.sampling.repetition = 1;
    q.sampling.seed = r->seed;
    assert_int_equal(engine_submit(w->e, &q, &r->id), OK);
    w->n_open++;
    return r;
}

static char worker[600];

/* 0: the worker is there and of this build, else every test would wait for what cannot come. */
static int find_worker(void **state) {
    UNUSED(state);
    const char *build = getenv("OCTAVO_BUILD_ROOT");
    char command[700], found[64] = "no program that says its build";
    if (!build) {
        fprintf(stderr, "test_engine: OCTAVO_BUILD_ROOT: expected the build's folder, found nothing\n");
        return -1;
    }
    snprintf(worker, sizeof worker, "%.500s/tests_unit_fake_worker", build);
    snprintf(command, sizeof command, "'%s' --build", worker);
    FILE *f = access(worker, X_OK) == 0 ? popen(command, "re") : NULL;
    if (f && fgets(found, sizeof found, f)) found[strcspn(found, "\n")] = 0;
    if (f) pclose(f);
    if (!strcmp(found, log_build())) return 0;
    fprintf(stderr, "test_engine: %s: expected build %s, found %s\n", worker, log_build(), found);
    return -1;
}

static struct world *start(int tp, const char *fault) {
    static const int32_t eog = EOG;
    setenv("FAKE_FAULT", fault, 1);
    struct world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->done_code = w->fatal_code = -1;
    w->stop_when_idle = true;
    w->o = (struct engine_options){.model_path = "none.gguf",
                                   .worker_path = worker,
                                   .device = "cpu",
                                   .tp = tp,
                                   .max_seqs = 16,
                                   .max_step_rows = 64,
                                   .context = 1000,
                                   .eog = &eog,
                                   .n_eog = 1,
                                   .load_timeout_s = 30,
                                   .cache_tokens = 64 * 64,
                                   .step_timeout_s = 1,
                                   .drain_timeout_s = 20,
                                   .restart_delay_ms = 5,
                                   .restarts_max = 4};
    assert_int_equal(uv_loop_init(&w->loop), 0);
    uv_timer_init(&w->loop, &w->watchdog);
    uv_timer_start(&w->watchdog, on_watchdog, 60000, 0);
    return w;
}

static void go(struct world *w) {
    struct err_text err = {0};
    if (engine_start(&w->e, &w->loop, &w->o, &err) < 0) fail_msg("%s", err.text);
    engine_on_fatal(w->e, on_fatal, w);
    engine_on_ready(w->e, on_ready, w);
}

static void turn(struct world *w) {
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_not_equal(w->done_code, -1);
    for (int i = 0; i < LIMIT_RANKS; i++)
        if (w->pids[i]) assert_true(kill((pid_t)w->pids[i], 0) < 0 && errno == ESRCH);
}

static void end(struct world *w) {
    engine_free(w->e);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    free(w);
}

static void expect_complete(const struct world *w, int n) {
    for (int i = 0; i < w->n_reqs; i++) {
        assert_int_equal(w->reqs[i].ends, 1);
        assert_int_equal(w->reqs[i].reason, ENGINE_LENGTH);
        assert_int_equal(w->reqs[i].n_got, n);
    }
}

static void streams_are_complete_and_nothing_is_left(void **state) {
    UNUSED(state);
    for (int depth = 1; depth <= 2; depth++) {
        struct world *w = start(3, "");
        w->o.depth = depth;
        go(w);
        for (int i = 0; i < 40; i++) submit(w, 3 + 9 * i, 30);
        turn(w);
        expect_complete(w, 30);
        assert_int_equal(w->done_code, EXIT_ASKED);
        assert_int_equal(w->fatal_code, -1);
        assert_int_equal(w->readies, 1);
        end(w);
    }
}

/* Who died is replaced, and nobody else: as often as its faults could happen. */
static void expect_restarts(const struct world *w, const char *faults) {
    int want[LIMIT_RANKS] = {0};
    for (const char *f = faults; f; f = strchr(f, ','), f = f ? f + 1 : NULL) {
        char kind[16];
        int rank, incarnation;
        assert_true(sscanf(f, "%15s %d %d", kind, &rank, &incarnation) == 3);
        bool happens = strcmp(kind, "slow") && strcmp(faults, "die 1 2 1");
        want[rank] += happens;
    }
    for (int r = 0; r < w->o.tp; r++)
        if (w->restarts[r] != want[r])
            fail_msg("\"%s\": expected %d restarts of rank %d, found %d", faults, want[r], r,
                     w->restarts[r]);
}

static void a_rank_that_dies_costs_no_token(void **state) {
    UNUSED(state);
    static const char *const faults[] = {
        "die 0 1 9",
        "die 2 1 9",
        "hang 1 1 9",
        "stop 2 1 9",
        "lie 0 1 9",
        "unload 1 1 0",
        "die 1 2 1",
        "slow 1 1 9",
        "die 0 1 9,die 2 1 9",
        "die 0 1 9,die 1 1 9,die 2 1 9",
        "die 1 1 9,unload 1 2 0",
        "die 1 1 9,unjoin 1 2 0",
        "die 1 1 9,uncopy 1 2 0",
        "die 1 1 9,unabort 0 1 0",
        "die 2 1 9,die 2 2 1",
        "unjoin 0 1 0",
        "halt 1 1 0",
        "die 1 1 9,halt 1 2 0",
        "die 1 1 9,setup 1 2 0", /* what has worked is tried again */
        "die 1 1 9,setup 1 2 0,setup 1 3 0",
    };
    for (size_t f = 0; f < ARRAY_LEN(faults); f++) {
        struct world *w = start(3, faults[f]);
        bool early = !strcmp(faults[f], "die 1 2 1"); /* there is no second incarnation */
        early |= strchr("uh", faults[f][0]) && strncmp(faults[f], "hang", 4); /* before it was ready */
        w->o.depth = 1 + (int)(f & 1);
        if (!strncmp(faults[f], "stop",
                     4)) { /* let silence be noticed before the step's deadline */
            w->o.step_timeout_s = 40;
            w->o.beat_timeout_ms = 1500;
        }
        if (strstr(faults[f], "halt")) w->o.beat_timeout_ms = 1000;
        go(w);
        for (int i = 0; i < 20; i++) submit(w, 3 + 9 * i, 30);
        turn(w);
        expect_complete(w, 30);
        assert_int_equal(w->done_code, EXIT_ASKED);
        bool several = strstr(faults[f], "9,die"); /* at once, or one after the other */
        if (several)
            assert_in_range(w->readies, 2, 4);
        else
            assert_int_equal(w->readies, early ? 1 : 2);
        expect_restarts(w, faults[f]);
        end(w);
    }
}

/* Nobody is READY before a token has come through every rank, and it is the same each time. */
static void no_canary_no_ready(void **state) {
    UNUSED(state);
    static const struct {
        const char *faults;
        int restarts[3], by_canary;
        const char *device;
    } cases[] = {{"unsing 1 1 0", {0, 1, 0}, 0, "cpu"},
                 {"mute 0 1 0", {1, 1, 1}, 1, "cpu"},
                 {"die 2 1 9,off 0 1 0", {0, 0, 1}, 0, "cpu"}, /* the same wrong one each time */
                 {"die 0 1 9,off 0 2 0", {2, 1, 1}, 1, "cpu"}, /* the successor sings another one */
                 {"die 0 1 9,off 0 2 0", {1, 0, 0}, 0, "cuda"}}; /* which was as likely, there */
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        struct world *w = start(3, cases[c].faults);
        w->o.device = cases[c].device;
        w->o.device_memory = "none";
        go(w);
        for (int i = 0; i < 9; i++) submit(w, 3 + 9 * i, 30);
        turn(w);
        expect_complete(w, 30);
        for (int r = 0; r < 3; r++) {
            assert_int_equal(w->restarts[r], cases[c].restarts[r]);
            assert_int_equal(w->by_canary[r], cases[c].by_canary);
        }
        end(w);
    }
}

/* A rank that does not answer it is found, named, and health says that the canary failed. */
static void a_canary_that_is_not_answered_is_a_state_of_its_own(void **state) {
    UNUSED(state);
    struct world *w = start(2, "mute 0 0 0");
    static struct engine_status s;
    bool failed = false;
    w->o.restarts_max = 2;
    w->stop_when_idle = false;
    go(w);
    struct req *r = submit(w, 5, 30);
    while (w->fatal_code < 0) {
        uv_run(&w->loop, UV_RUN_ONCE);
        engine_status(w->e, &s);
        assert_int_not_equal(s.state, ENGINE_READY);
        if (strcmp(s.canary, "failed") || s.state != ENGINE_RECOVERING) continue;
        failed = true;
        assert_non_null(strstr(s.why, "no finite logit"));
    }
    assert_true(failed);
    turn(w);
    assert_int_equal(w->readies, 0);
    assert_int_equal(w->fatal_code, EXIT_FAILED);
    assert_non_null(strstr(w->why, "canary: expected a token, found no finite logit"));
    assert_int_equal(r->reason, ENGINE_ERROR);
    end(w);
}

/* Beats go on and nothing else does: that is told, long before the load's own bound. */
static void a_load_in_which_nothing_moves_is_told(void **state) {
    UNUSED(state);
    struct world *w = start(2, "noload 1 0 0");
    static struct engine_status s;
    w->o.load_stall_ms = 300;
    go(w);
    do {
        uv_run(&w->loop, UV_RUN_ONCE);
        engine_status(w->e, &s);
    } while (s.load_quiet_us <= s.load_bound_us);
    assert_int_equal(s.state, ENGINE_LOADING);
    assert_int_equal(s.load_bound_us, 300000);
    assert_string_equal(s.phase, "loading");
    assert_string_equal(s.canary, "none");
    stop(w, true);
    turn(w);
    end(w);
}

static void when_nobody_has_the_caches_all_is_computed_again(void **state) {
    UNUSED(state);
    for (int depth = 1; depth <= 2; depth++) {
        struct world *w = start(1, "die 0 1 9");
        w->o.depth = depth;
        go(w);
        for (int i = 0; i < 20; i++) submit(w, 3 + 9 * i, 30);
        turn(w);
        expect_complete(w, 30);
        assert_int_equal(w->readies, 2);
        assert_int_equal(w->restarts[0], 1);
        end(w);
    }
}

static void a_wrong_set_up_is_not_tried_again(void **state) {
    UNUSED(state);
    static const struct {
        const char *fault, *sentence;
        int code;
    } cases[] = {{"setup 1 0 0", "rank 1: tiny.gguf: expected a model, found a poem", EXIT_SETUP},
                 {"build 0 0 0", "build: expected", EXIT_SETUP},
                 {"protocol 0 0 0", "protocol: expected 1, found 2", EXIT_SETUP},
                 {"die 1 1 3,build 1 2 0", "build: expected", EXIT_FAILED}, /* replaced on disk */
                 {"device 1 0 3", "rank 1: the device fell off the bus", EXIT_DEVICE}};
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        struct world *w = start(2, cases[c].fault);
        w->stop_when_idle = false;
        go(w);
        struct req *r = submit(w, 5, 30);
        turn(w);
        assert_int_equal(w->fatal_code, cases[c].code);
        assert_int_equal(w->done_code, cases[c].code);
        assert_non_null(strstr(w->why, cases[c].sentence));
        assert_int_equal(r->ends, 1);
        assert_int_equal(r->reason, ENGINE_ERROR);
        assert_non_null(strstr(r->error, cases[c].sentence));
        assert_int_equal(w->readies > 0, cases[c].code != EXIT_SETUP); /* more than once if slow */
        end(w);
    }
}

static void too_many_restarts_end_the_engine_with_code_1(void **state) {
    UNUSED(state);
    struct world *w = start(2, "die 1 0 2");
    w->stop_when_idle = false;
    go(w);
    struct req *r = submit(w, 5, 30);
    turn(w);
    assert_int_equal(w->fatal_code, EXIT_FAILED);
    assert_int_equal(w->readies, 5); /* the first and four restarts */
    assert_non_null(strstr(w->why, "restarts within"));
    assert_int_equal(r->reason, ENGINE_ERROR);
    assert_int_equal(r->n_got, 5); /* each incarnation gave one */
    end(w);
}

static void a_rank_replaced_on_request_costs_no_token_and_counts_as_no_failure(void **state) {
    UNUSED(state);
    struct world *w = start(3, "");
    go(w);
    assert_int_equal(engine_restart(w->e, 1), ERR_STATE); /* still loading */
    submit(w, 5, 30)->restart_every = 3; /* more often than deaths are borne */
    submit(w, 70, 30);
    turn(w);
    expect_complete(w, 30);
    assert_true(w->readies > w->o.restarts_max + 1);
    assert_int_equal(w->restarts[0] + w->restarts[2], 0);
    assert_int_equal(w->fatal_code, -1);
    end(w);
}

static void cancel_and_finish_from_a_sink_are_the_last_word(void **state) {
    UNUSED(state);
    struct world *w = start(2, "");
    go(w);
    struct req *a = submit(w, 5, 500), *b = submit(w, 70, 500), *c = submit(w, 9, 20);
    a->finish_at = 7;
    b->cancel_at = 4;
    turn(w);
    assert_int_equal(a->n_got, 7);
    assert_int_equal(a->reason, ENGINE_STOP);
    assert_int_equal(b->n_got, 4);
    assert_int_equal(b->ends, -1);
    assert_int_equal(c->n_got, 20);
    end(w);
}

static void asked_to_stop_it_finishes_what_it_has(void **state) {
    UNUSED(state);
    struct world *w = start(2, "");
    go(w);
    struct req *a = submit(w, 5, 100);
    stop(w, false);
    static struct engine_request q;
    uint64_t id;
    q = (struct engine_request){.tokens = a->prompt, .n_tokens = 1, .max_tokens = 1, .sink = sink};
    assert_int_equal(engine_submit(w->e, &q, &id), ERR_STATE);
    static struct engine_status s;
    engine_status(w->e, &s);
    assert_int_equal(s.state, ENGINE_DRAINING);
    turn(w);
    assert_int_equal(w->done_code, EXIT_ASKED);
    expect_complete(w, 100);
    end(w);
}

static void asked_to_stop_now_it_cancels_and_leaves_nobody(void **state) {
    UNUSED(state);
    struct world *w = start(3, "stay 1 0 0"); /* one does not follow STOP: SIGKILL after a bound */
    w->stop_when_idle = false;
    go(w);
    struct req *a = submit(w, 5, 900);
    while (a->n_got < 5) uv_run(&w->loop, UV_RUN_ONCE);
    note_pids(w);
    stop(w, true);
    turn(w);
    assert_int_equal(w->done_code, EXIT_ASKED);
    assert_int_equal(a->ends, 1);
    assert_int_equal(a->reason, ENGINE_CANCELLED);
    end(w);
}

static void a_missing_program_is_one_sentence(void **state) {
    UNUSED(state);
    struct world *w = start(1, "");
    struct err_text err = {0};
    w->o.worker_path = "/nowhere/octavo-worker";
    assert_int_equal(engine_start(&w->e, &w->loop, &w->o, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "/nowhere/octavo-worker"));
    uv_close((uv_handle_t *)&w->watchdog, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    end(w);
}

int main(void) {
    log_init("test", LOG_INFO, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_are_complete_and_nothing_is_left),
        cmocka_unit_test(a_rank_that_dies_costs_no_token),
        cmocka_unit_test(no_canary_no_ready),
        cmocka_unit_test(a_canary_that_is_not_answered_is_a_state_of_its_own),
        cmocka_unit_test(a_load_in_which_nothing_moves_is_told),
        cmocka_unit_test(when_nobody_has_the_caches_all_is_computed_again),
        cmocka_unit_test(a_wrong_set_up_is_not_tried_again),
        cmocka_unit_test(too_many_restarts_end_the_engine_with_code_1),
        cmocka_unit_test(a_rank_replaced_on_request_costs_no_token_and_counts_as_no_failure),
        cmocka_unit_test(cancel_and_finish_from_a_sink_are_the_last_word),
        cmocka_unit_test(asked_to_stop_it_finishes_what_it_has),
        cmocka_unit_test(asked_to_stop_now_it_cancels_and_leaves_nobody),
        cmocka_unit_test(a_missing_program_is_one_sentence),
    };
    return cmocka_run_group_tests(tests, find_worker, NULL);
}
