/* coordinator/cmd_serve.c: `octavo serve`: engine, API and signals on one loop, from start to exit.
 *
 *   read settings ─> open model ─> start engine ─> listen ─> (ready) ─> asked to stop, or fatal
 *     ─> drain: API refuses, engine finishes what runs, workers stop ─> answers leave ─> API closes
 *
 * Owns: the loop, the model file's mapping, tokenizer, engine, API.
 * Called by: main.c.  Fails how: one sentence and exit code 2; later the engine's exit code.
 * Tested by: tests/faults, tests/serve
 *
 * It listens before the model is loaded: requests wait, and health says why. The API outlives the
 * engine's work by a moment, so that the last bytes of finished answers are written; a client that
 * does not read them cannot hold the exit up for longer than FLUSH_BOUND_US.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#include "coordinator/api.h"
#include "coordinator/cmd.h"
#include "coordinator/debris.h"
#include "coordinator/doctor.h"
#include "coordinator/engine.h"
#include "coordinator/inherited.h"
#include "coordinator/notify.h"
#include "coordinator/reap.h"
#include "coordinator/settings.h"
#include "proto/log.h"

#define FLUSH_BOUND_US 2000000 /* from the engine's end to closing connections */
#define DOOR_BOUND_US  300000  /* from the last new connection to closing connections */
#define FLUSH_LOOK_MS  10
#define LINKS_S        45  /* a link check, with the start of its processes */
#define DEBRIS_AGE_S   60  /* who makes a file maps it sooner */
#define SHARD_AGE_S    600 /* who writes one writes again sooner */

static const int signals_heard[] = {SIGTERM, SIGINT, SIGHUP};

struct serve {
    struct settings set;
    uv_loop_t loop;
    uv_signal_t signals[ARRAY_LEN(signals_heard)];
    uv_timer_t flush;
    uv_timer_t beat; /* what the service manager is told, and orphans */
    struct notify notify;
    struct gguf *g;
    struct tok *tok;
    struct engine *engine;
    struct api *api;
    uint64_t start_ns, flush_ns, door_ns;
    int asked; /* how often */
    bool told_ready, hurry, ending, reaps;
    int exit_code;
};

/* ---- the service manager, and orphans ---------------------------------------------------------- */

static void reap(const struct engine_status *st) {
    int64_t ours[LIMIT_RANKS];
    for (int i = 0; i < st->n_workers; i++) ours[i] = st->workers[i].pid;
    int n = reap_strangers(ours, st->n_workers);
    if (n) log_info("reaped", "orphans=%d", n);
}

static void beat(struct serve *s) {
    struct engine_status st;
    engine_status(s->engine, &st);
    notify_look(&s->notify, &st, st.state == ENGINE_READY, s->ending);
    if (s->reaps) reap(&st);
}

static void on_beat(uv_timer_t *t) {
    beat(t->data);
}

static void start_beat(struct serve *s) {
    notify_open(&s->notify);
    s->reaps = reap_is_owed();
    uv_timer_init(&s->loop, &s->beat);
    s->beat.data = s;
    uv_timer_start(&s->beat, on_beat, 0, s->notify.period_ms);
}

/* ---- the end --------------------------------------------------------------------------------- */

static void on_api_stopped(void *user) {
    struct serve *s = user;
    s->api = NULL;
    for (size_t i = 0; i < ARRAY_LEN(s->signals); i++) {
        uv_close((uv_handle_t *)&s->signals[i], NULL);
        signal(signals_heard[i], SIG_IGN); /* asked once more, the exit code stays ours */
    }
    uv_close((uv_handle_t *)&s->flush, NULL);
    uv_close((uv_handle_t *)&s->beat, NULL);
}

static void close_api(struct serve *s) {
    if (s->api)
        api_stop(s->api, on_api_stopped, s);
    else
        on_api_stopped(s);
}

/* Answers that are being written, and then whoever was let in before the door closed and has not
 * been told yet that nobody serves here any more. */
static bool owes_answers(struct serve *s) {
    uint64_t now_ns = uv_hrtime();
    if (!s->api || s->hurry || now_ns - s->flush_ns >= FLUSH_BOUND_US * 1000ull) return false;
    if (api_in_progress(s->api) > 0) return true;
    if (!s->door_ns) s->door_ns = now_ns;
    return api_finish(s->api) && now_ns - s->door_ns < DOOR_BOUND_US * 1000ull;
}

static void on_flush(uv_timer_t *t) {
    struct serve *s = t->data;
    if (owes_answers(s)) return;
    uv_timer_stop(t);
    close_api(s);
}

static void on_engine_done(void *user, int exit_code) {
    struct serve *s = user;
    if (exit_code) s->exit_code = exit_code;
    s->flush_ns = uv_hrtime();
    uv_timer_start(&s->flush, on_flush, 0, FLUSH_LOOK_MS);
}

static void stop(struct serve *s, bool now) {
    if (s->api) api_drain(s->api);
    engine_stop(s->engine, now, on_engine_done, s);
}

static void on_stop_signal(uv_signal_t *h, int signum) {
    struct serve *s = h->data;
    s->asked++;
    log_info("stopping", "signal=%d asked=%d", signum, s->asked);
    s->hurry = s->asked > 1;
    s->ending = true;
    stop(s, s->hurry);
    beat(s);
}

static void on_hang_up(uv_signal_t *h, int signum) {
    UNUSED(h), UNUSED(signum);
    log_reopen();
    log_info("log_reopened", "signal=%d", signum);
}

static void on_fatal(void *user, int exit_code) {
    struct serve *s = user;
    s->exit_code = exit_code;
    s->ending = true;
    beat(s);
    stop(s, true);
}

/* ---- the beginning --------------------------------------------------------------------------- */

static const char *url_host(const char *host, char *buf, size_t n) {
    snprintf(buf, n, strchr(host, ':') ? "[%s]" : "%s", host);
    return buf;
}

static void on_ready(void *user) {
    struct serve *s = user;
    char host[300];
    double seconds = (double)(uv_hrtime() - s->start_ns) / 1e9;
    uv_timer_start(&s->beat, on_beat, 0, s->notify.period_ms); /* tell it now */
    if (s->told_ready) return; /* the fleet tells of recoveries */
    s->told_ready = true;
    log_info("ready", "url=http://%s:%d model=\"%s\" ranks=%" PRId64 " seconds=%.2f",
             url_host(s->set.host, host, sizeof host), s->api ? api_port(s->api) : (int)s->set.port,
             s->set.model_name, s->set.tp, seconds);
}

static int open_model(struct serve *s, struct err_text *err) {
    if (gguf_open(&s->g, s->set.model, err) < 0) return ERR_SETUP;
    if (settings_fit(&s->set, s->g, err) < 0) return ERR_SETUP;
    return tok_open(&s->tok, s->g, err) < 0 ? ERR_SETUP : OK;
}

static int start_engine(struct serve *s, struct err_text *err) {
    const struct settings *set = &s->set;
    struct engine_options o = {.model_path = set->model,
                               .worker_path = set->worker,
                               .device = set->device,
                               .n_devices = set->n_devices,
                               .gpus = set->n_devices ? &set->gpus : NULL,
                               .collective = set->collective,
                               .shard_cache = set->shard_cache,
                               .tp = (int)set->tp,
                               .max_seqs = (int)set->max_seqs,
                               .max_step_rows = (int)set->max_step_tokens,
                               .context = set->ctx,
                               .cache_tokens = set->cache_tokens,
                               .prefix_cache = !strcmp(set->prefix_cache, "on"),
                               .gap_ms = (int)set->max_gap,
                               .queue_requests = (int)set->queue_requests,
                               .queue_tokens = set->queue_tokens,
                               .depth = (int)set->pipeline,
                               .load_timeout_s = (int)set->load_timeout,
                               .load_stall_ms = (int)set->load_stall_ms,
                               .restart_delay_ms = (int)set->restart_delay_ms,
                               .step_timeout_s = (int)set->step_timeout,
                               .drain_timeout_s = (int)set->drain_timeout,
                               .restarts_max = (int)set->restarts_max,
                               .reclaim_timeout_s = (int)set->reclaim_timeout,
                               .device_memory = set->device_memory,
                               .probe_port = (int)set->probe_port,
                               .progress_bar = isatty(2) && !set->log_file};
    o.eog = tok_eog(s->tok, &o.n_eog);
    TRY(engine_start(&s->engine, &s->loop, &o, err));
    engine_on_fatal(s->engine, on_fatal, s);
    engine_on_ready(s->engine, on_ready, s);
    return OK;
}

static int start_api(struct serve *s, struct err_text *err) {
    struct api_options o;
    char host[300];
    api_options_init(&o);
    api_options_from_gguf(&o, s->g);
    o.host = s->set.host;
    o.port = (int)s->set.port;
    o.model_name = s->set.model_name;
    o.api_key_file = s->set.api_key_file;
    o.context = s->set.ctx;
    o.key_concurrency = (int)s->set.key_concurrency;
    o.key_rate = (double)s->set.key_rate;
    o.request_timeout_s = (double)s->set.request_timeout;
    TRY(api_start(&s->api, &s->loop, s->engine, s->tok, chat_family_of(s->g), &o, err));
    log_info("listening", "url=http://%s:%d", url_host(s->set.host, host, sizeof host),
             api_port(s->api));
    return OK;
}

static void start_signals(struct serve *s) {
    for (size_t i = 0; i < ARRAY_LEN(signals_heard); i++) {
        uv_signal_init(&s->loop, &s->signals[i]);
        s->signals[i].data = s;
        uv_signal_start(&s->signals[i], signals_heard[i] == SIGHUP ? on_hang_up : on_stop_signal,
                        signals_heard[i]);
    }
    uv_timer_init(&s->loop, &s->flush);
    s->flush.data = s;
}

/* What predecessors left that were killed. */
static void clear_debris(const struct serve *s) {
    int64_t now = (int64_t)time(NULL);
    debris_clear_nccl("/dev/shm", now, DEBRIS_AGE_S);
    if (s->set.shard_cache) debris_clear_shards(s->set.shard_cache, now, SHARD_AGE_S);
}

/* In processes of their own: one that hangs costs nothing yet. */
static int check_links(const struct settings *set, struct err_text *err) {
    const struct doctor_ranks ranks = {.worker = set->worker,
                                       .gpus = set->n_devices ? &set->gpus : NULL,
                                       .collective = set->collective ? set->collective : "auto",
                                       .all = (int)set->tp,
                                       .limit_s = LINKS_S};
    const bool several = set->n_devices && set->tp > 1 && set->gpus.n_dealt > 1;
    if (!strcmp(set->link_check, "off") || (!strcmp(set->link_check, "auto") && !several)) return OK;
    return doctor_check_links(&ranks, err);
}

/* Until the loop hears signals itself. */
static volatile sig_atomic_t asked_early, hung_up_early;
static void on_early(int signum) {
    if (signum == SIGHUP) hung_up_early = 1;
    else asked_early = signum;
}

/* Workers may run already: the loop turns until all is gone, whatever went wrong. */
static int run(struct serve *s, struct err_text *err) {
    TRY(open_model(s, err));
    if (asked_early) return OK;
    if (uv_loop_init(&s->loop) < 0) return err_set(err, ERR_SETUP, "no event loop");
    clear_debris(s);
    int rc = check_links(&s->set, err);
    if (rc == OK) rc = start_engine(s, err);
    if (rc == OK) {
        start_signals(s);
        if (hung_up_early) on_hang_up(NULL, SIGHUP);
        start_beat(s);
        rc = start_api(s, err);
        if (rc < 0) stop(s, true);
        else if (asked_early) on_stop_signal(&s->signals[0], asked_early);
        uv_run(&s->loop, UV_RUN_DEFAULT);
    }
    engine_free(s->engine);
    int left = uv_loop_close(&s->loop);
    assert(left == 0);
    return rc;
}

int cmd_serve(int argc, char **argv) {
    static struct serve s = {.notify = {.fd = -1}};
    struct err_text err = {0};
    enum log_level level = LOG_INFO;
    signal(SIGHUP, on_early);  /* whoever rotates logs may come before the loop turns */
    signal(SIGTERM, on_early); /* asked in the first milliseconds, it ends with 0 too */
    signal(SIGINT, on_early);
    s.start_ns = uv_hrtime();
    int rc = settings_read(&s.set, argc, argv, &err);
    if (rc == ERR_CLOSED) return EXIT_ASKED;
    if (rc == OK) {
        signal(SIGPIPE, SIG_IGN);
        log_parse_level(s.set.log_level, &level);
        setenv("OCTAVO_LOG_LEVEL", s.set.log_level, 1); /* for the workers */
        if (log_init("coordinator", level, s.set.log_file) < 0)
            rc = err_set(&err, ERR_SETUP, "--log-file: expected a file to write to, found %.300s",
                         s.set.log_file);
    }
    if (rc == OK) rc = inherited_make_fit((int)s.set.tp, &err);
    if (rc == OK) {
        log_install_crash_report();
        /* The first line names whom to stop. */
        log_info("starting", "pid=%d build=%s", (int)getpid(), log_build());
        rc = run(&s, &err);
    }
    notify_close(&s.notify);
    tok_close(s.tok);
    if (s.g) gguf_close(s.g);
    if (rc < 0) {
        fprintf(stderr, "octavo serve: %s\n", err.text[0] ? err.text : err_name(rc));
        return rc == ERR_TIMEOUT ? EXIT_DEVICE : EXIT_SETUP; /* of a driver that does not answer */
    }
    log_info("stopped", "exit=%d", s.exit_code);
    return s.exit_code;
}
