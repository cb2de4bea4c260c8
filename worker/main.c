/* worker/main.c: octavo-worker: one process, one rank, one device.
 *
 *   start ── HELLO ── load ── LOADED ──> wait <──────────────────────────────┐
 *                                          ├─ JOIN: caches, communicator ── JOINED
 *                                          ├─ ADMIT, STEP ── TOKENS or DONE ─┤
 *                                          ├─ COPY ── DONE, RESTORE ──────────┤
 *                                          ├─ ABORT (out of the step) ── ABORTED
 *                                          └─ STOP: exit 0
 *
 * This is the step thread; control.c is the other one.
 *
 * Owns: the model, the stepper, the communicator, the step socket.
 * Called by: the coordinator (as a process), or by a unit of its own on another host.
 * Fails how: FAILED with a sentence, then the exit code it names: 2 for a wrong set-up, 1 for the
 * rest. A worker never tries to go on after an error: the process is the unit of failure.
 * Limits: LIMIT_STEP_*.  Tested by: tests/unit/test_worker.c, tests/serve
 *
 * SIGTERM, SIGINT and SIGHUP reach the whole process group at a terminal, but when to stop is the
 * coordinator's decision: a worker that has one ignores them. If the coordinator dies, the kernel
 * kills the worker.
 */
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "proto/log.h"
#include "proto/wire.h"
#include "worker/bench.h"
#include "worker/coll_open.h"
#include "worker/control.h"
#include "worker/copy.h"
#include "worker/dump.h"
#include "worker/graphs.h"
#include "worker/options.h"
#include "worker/process.h"
#include "worker/self_test.h"
#include "worker/step.h"
#include "worker/switches.h"

#define WAIT_MS 1000  /* longest sleep between two looks at the sockets */
#define LOOK_NS 5000  /* with a step in flight: between two looks at it */

struct worker {
    struct options o;
    struct model model;
    struct stepper *stepper;
    struct coll_maker *maker;
    struct coll *coll;
    struct control *control;
    struct dumper *dumper;
    struct wire *steps;
    struct msg *in, *out; /* large, reused */
    int rows_behind;      /* of the step queued last, when another is in flight before it */
    bool loaded;
    bool aborted; /* the communicator is of no use until the next JOIN */
    bool stopping;
};

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* ---- set-up ------------------------------------------------------------------------------ */

static void init_signals(const struct options *o) {
    signal(SIGPIPE, SIG_IGN);
    if (!o->parent_pid) return;
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
}

/* A probe that cannot listen is a wrong set-up at the first start. Later it is not worth the service:
 * who has the address now may be a predecessor on its way out. */
static int open_probe(const struct options *o, struct probe **out, struct err_text *err) {
    const struct probe_options p = {.socket = o->probe_socket, .port = (int)o->probe_port};
    if (!p.socket && !p.port) return OK;
    int rc = probe_open(out, &p, err);
    if (rc == OK || o->incarnation <= 1) return rc;
    log_warn("no_probe", "why=\"%s\"", err->text);
    return OK;
}

static int start_control(struct worker *w, struct probe *probe, struct err_text *err) {
    const struct options *o = &w->o;
    struct control_options c = {
        .endpoint = o->endpoint,
        .rank = (int32_t)o->rank,
        .incarnation = (uint32_t)o->incarnation,
        .world = (int32_t)o->world,
        .parent_pid = o->parent_pid,
        .probe = probe,
        .step_limit_s = (uint32_t)o->step_limit,
        .hello = {.protocol = MSG_PROTOCOL,
                  .limits = limits_digest(),
                  .rank = (int32_t)o->rank,
                  .pid = getpid(),
                  .start_time = process_start_time(getpid())},
    };
    const char *cookie = getenv("OCTAVO_COOKIE");
    snprintf(c.hello.build, sizeof c.hello.build, "%s", log_build());
    snprintf(c.hello.cookie, sizeof c.hello.cookie, "%s", cookie ? cookie : "");
    unsetenv("OCTAVO_COOKIE");
    return control_start(&w->control, &c, err);
}

static int open_device(struct worker *w, struct err_text *err) {
    struct kdevice_info info;
    TRY(model_open(&w->model, (int)w->o.device_index, err));
    w->model.k->info(w->model.ctx, &info);
    control_name_device(w->control, info.name);
    return OK;
}

static uint64_t free_bytes(struct worker *w) {
    struct kdevice_info info;
    w->model.k->info(w->model.ctx, &info);
    return info.free_bytes;
}

/* The step graphs come after the caches, so their memory is kept free of them. */
static uint64_t free_for_caches(struct worker *w) {
    uint64_t bytes = free_bytes(w);
    return bytes - MIN(bytes, w->model.graph_bytes);
}

static void report_memory(struct worker *w) {
    const struct model *m = &w->model;
    control_set_memory(w->control,
                       m->weight_bytes + m->scratch_bytes + m->page_bytes * (uint64_t)m->n_pages,
                       free_bytes(w));
}

static void report_progress(void *user, uint64_t bytes, uint64_t total) {
    struct worker *w = user;
    control_post(w->control, &(struct note){.type = MSG_PROGRESS, .progress = {bytes, total}});
}

/* The largest thing that travels: the residual of all rows, or one rank's logits. */
static uint64_t message_bytes(const struct model *m) {
    uint64_t residual = (uint64_t)m->max_rows * (uint64_t)m->hp.dims.d_model;
    return 4 * MAX(residual, (uint64_t)m->max_outs * (uint64_t)m->output.rows);
}

static int load(struct worker *w, struct err_text *err) {
    const struct options *o = &w->o;
    const struct model_options mo = {
        .rank = (int)o->rank,
        .world = (int)o->world,
        .device = (int)o->device_index,
        .max_slots = (int)o->max_slots,
        .max_rows = (int)o->max_rows,
        .max_outs = (int)MIN(MIN(4 * o->max_slots, o->max_rows), LIMIT_STEP_SAMPLES),
        .context = o->context,
        .print_plan = o->rank == 0,
        .load_share = o->load_share,
        .shard_dir = o->shard_cache,
    };
    struct model *m = &w->model;
    struct gguf *g;
    uint64_t start = now_us();
    control_set_state(w->control, WORKER_LOADING);
    TRY(gguf_open(&g, o->model, err));
    int rc = model_load(m, g, &mo, (struct load_progress){report_progress, w}, err);
    gguf_close(g);
    TRY(rc);
    TRY(stepper_new(&w->stepper, m));
    TRY(coll_maker_new(&w->maker, m->k, m->ctx, m->rank, m->world, o->collective, err));
    if (o->dump) {
        char path[512];
        snprintf(path, sizeof path, "%s.%d", o->dump_to ? o->dump_to : "octavo-dump", (int)o->rank);
        TRY(dumper_open(&w->dumper, m, o->dump, path, err));
    }
    struct note n = {.type = MSG_LOADED,
                     .loaded = {.weight_bytes = m->weight_bytes,
                                .scratch_bytes = m->scratch_bytes,
                                .page_bytes = m->page_bytes,
                                .free_bytes = free_for_caches(w),
                                .shm_bytes = coll_shm_bytes(m->world, message_bytes(m)),
                                .seconds = (double)(now_us() - start) / 1e6}};
    w->loaded = true;
    report_memory(w);
    control_set_state(w->control, WORKER_LOADED);
    control_post(w->control, &n);
    log_info("loaded",
             "weight_bytes=%llu scratch_bytes=%llu page_bytes=%llu source=%s asked_bytes=%llu "
             "staging_bytes=%llu seconds=%.2f",
             (unsigned long long)m->weight_bytes, (unsigned long long)m->scratch_bytes,
             (unsigned long long)m->page_bytes, m->from_shard ? "shard" : "file",
             (unsigned long long)m->asked_bytes, (unsigned long long)m->staging_bytes,
             n.loaded.seconds);
    return OK;
}

/* ---- what the coordinator says ----------------------------------------------------------- */

/* The control thread knows the shared memory first: a peer may die while the others wait for it. */
static int open_coll(struct worker *w, const struct msg_join *j, struct err_text *err) {
    struct coll *shm = NULL;
    if (w->model.world > 1) {
        TRY(coll_open_shm(&shm, j->shm_path, j->shm_bytes, w->model.rank, w->model.world,
                          j->generation, err));
        control_set_coll(w->control, shm);
    }
    int rc = coll_maker_open(&w->coll, w->maker, shm, j->generation, err);
    if (rc < 0 && shm) {
        control_set_coll(w->control, NULL);
        coll_close(shm);
    }
    return rc;
}

static void close_coll(struct worker *w) {
    if (!w->coll) return;
    control_set_coll(w->control, NULL);
    coll_close(w->coll);
    w->coll = NULL;
}

static bool has_notes(void *user) {
    const struct worker *w = user;
    return control_has_next(w->control);
}

/* ERR_ABORTED: left unfinished, since there is news. */
static int capture(struct worker *w) {
    struct graphs_report r;
    if (!forward_in_graphs(&w->model, w->coll, NULL)) return OK;
    control_set_state(w->control, WORKER_CAPTURING);
    TRY(graphs_capture(&w->model, w->coll, has_notes, w, &r));
    if (r.made == 0) return OK; /* those of before still hold */
    control_set_graphs(w->control, r.made, r.bytes, r.seconds);
    log_info("captured", "graphs=%d bytes=%llu set_aside_bytes=%llu seconds=%.2f", r.made,
             (unsigned long long)r.bytes, (unsigned long long)w->model.graph_bytes, r.seconds);
    return OK;
}

static int join(struct worker *w, const struct msg_join *j, struct err_text *err) {
    struct model *m = &w->model;
    if (j->world != m->world)
        return err_set(err, ERR_FORMAT, "join: expected a group of %d, found %d", m->world,
                       j->world);
    if (m->n_pages && j->pages != m->n_pages)
        return err_set(err, ERR_FORMAT, "join: expected the %lld pages of before, found %lld",
                       (long long)m->n_pages, (long long)j->pages);
    close_coll(w);
    if (!m->n_pages) TRY(model_alloc_caches(m, j->pages, err));
    if (!j->caches_valid) stepper_forget(w->stepper);
    int rc = open_coll(w, j, err);
    if (rc == ERR_ABORTED) return OK; /* ABORT is on its way to us */
    TRY(rc);
    control_set_coll(w->control, w->coll);
    if (capture(w) == ERR_ABORTED) return OK;
    w->aborted = false;
    report_memory(w);
    control_set_state(w->control, WORKER_READY);
    control_post(w->control, &(struct note){.type = MSG_JOINED, .generation = {j->generation}});
    log_info("joined", "generation=%u collective=%s pages=%lld", j->generation, w->coll->ops->name,
             (long long)m->n_pages);
    return OK;
}

/* Heard between steps, so the step that was aborted, if any, has been left. Closing here and not at
 * the next JOIN lets go of a dead peer's memory, which does not return to its device before. */
static void hear_abort(struct worker *w, uint32_t generation) {
    if (w->coll && w->coll->generation <= generation) {
        w->aborted = true;
        close_coll(w);
        control_set_state(w->control, WORKER_LOADED);
    }
    control_post(w->control, &(struct note){.type = MSG_ABORTED, .generation = {generation}});
    log_info("aborted", "generation=%u", generation);
}

static int answer(struct worker *w, struct err_text *err) {
    int rc = wire_send(w->steps, (struct wire_peer){0}, w->out);
    return rc < 0 ? err_set(err, rc, "answer: expected the coordinator to take it, found %s",
                            err_name(rc))
                  : OK;
}

static int answer_step(struct worker *w, uint64_t wait_us, struct err_text *err) {
    if (w->model.rank != 0) {
        const struct msg_tokens *t = &w->out->tokens;
        struct msg_done done = {.step_id = t->step_id,
                                .generation = t->generation,
                                .step_us = t->step_us,
                                .wait_us = wait_us};
        w->out->type = MSG_DONE;
        w->out->done = done;
    }
    return answer(w, err);
}

/* ERR_ABORTED: what was in flight is gone, and the next JOIN is waited for. */
static void leave_steps(struct worker *w) {
    control_step_left(w->control);
    w->aborted = true;
}

static int finish_step(struct worker *w, struct err_text *err) {
    w->out->type = MSG_TOKENS;
    int rc = stepper_collect(w->stepper, w->coll, &w->out->tokens);
    if (rc == ERR_ABORTED) {
        leave_steps(w);
        return OK;
    }
    TRY(rc);
    const struct step_times t = stepper_times(w->stepper);
    const uint64_t wait_us = w->coll->wait_us;
    w->coll->wait_us = 0;
    log_debug("step", "id=%llu us=%llu device_us=%.1f gap_us=%.1f ahead=%d wait_us=%llu",
              (unsigned long long)w->out->tokens.step_id,
              (unsigned long long)w->out->tokens.step_us, (double)t.device_us, (double)t.gap_us,
              t.ahead, (unsigned long long)wait_us);
    control_step_done(w->control, w->out->tokens.step_id);
    if (stepper_in_flight(w->stepper))
        control_step_begin(w->control, w->rows_behind);
    else
        control_set_state(w->control, WORKER_READY);
    return answer_step(w, wait_us, err);
}

static int finish_steps(struct worker *w, struct err_text *err) {
    while (stepper_in_flight(w->stepper)) TRY(finish_step(w, err));
    return OK;
}

static int take_notes(struct worker *w, struct err_text *err) {
    struct note n = {0};
    while (!w->stopping && control_next(w->control, &n)) {
        TRY(finish_steps(w, err));
        switch (n.type) {
        case MSG_JOIN:
            TRY(join(w, &n.join, err));
            break;
        case MSG_ABORT:
            hear_abort(w, n.generation.generation);
            break;
        case MSG_STOP:
            w->stopping = true;
            break;
        default:
            assert(!"not a note for the step thread");
        }
    }
    return OK;
}

/* Said under a generation that is over, or not yet joined. */
static bool is_late(const struct worker *w, uint32_t generation) {
    return !w->coll || w->aborted || generation != w->coll->generation;
}

static int run_copy(struct worker *w, const struct msg_copy *c, struct err_text *err) {
    uint64_t start = now_us();
    if (is_late(w, c->generation)) return OK;
    int rc = copy_pages(&w->model, w->coll, c, err);
    if (rc == ERR_ABORTED) {
        w->aborted = true;
        return OK;
    }
    TRY(rc);
    w->out->type = MSG_DONE;
    w->out->done = (struct msg_done){
        .step_id = c->id, .generation = c->generation, .step_us = now_us() - start};
    return answer(w, err);
}

/* Queued behind the one in flight where the device works by itself; its answer comes when it is
 * done. Elsewhere the work is done by now, and waiting for the next message would only delay it. */
static int run_step(struct worker *w, const struct msg_step *s, struct err_text *err) {
    if (is_late(w, s->generation)) {
        log_debug("step_dropped", "step=%llu generation=%u", (unsigned long long)s->id,
                  s->generation);
        return OK;
    }
    const struct dump *dump = dumper_hook(w->dumper);
    w->rows_behind = s->n_tokens + s->n_entries;
    if (!stepper_in_flight(w->stepper)) control_step_begin(w->control, w->rows_behind);
    int rc = stepper_submit(w->stepper, w->coll, s, dump, err);
    if (rc == ERR_ABORTED) {
        leave_steps(w);
        return OK;
    }
    TRY(rc);
    return forward_in_graphs(&w->model, w->coll, dump) ? OK : finish_step(w, err);
}

static int hear_step_socket(struct worker *w, struct err_text *err) {
    struct wire_peer peer;
    int rc = wire_recv(w->steps, &peer, w->in, 0);
    if (rc == ERR_FORMAT)
        return err_set(
            err, rc,
            "step socket: expected a message of protocol %d, found bytes that do not parse",
            MSG_PROTOCOL);
    TRY(rc);
    switch (w->in->type) {
    case MSG_ADMIT:
        return w->model.n_pages ? stepper_admit(w->stepper, &w->in->admit, err) : OK;
    case MSG_COPY:
        TRY(finish_steps(w, err));
        return run_copy(w, &w->in->copy, err);
    case MSG_RESTORE:
        TRY(finish_steps(w, err));
        return is_late(w, w->in->restore.generation)
                   ? OK
                   : stepper_restore(w->stepper, &w->in->restore, err);
    case MSG_STEP:
        /* token path 7/9: the step thread of every rank takes the same rows from its own socket. */
        return run_step(w, &w->in->step, err);
    default:
        return err_set(err, ERR_FORMAT, "step socket: expected ADMIT, COPY, RESTORE or STEP, found %d",
                       (int)w->in->type);
    }
}

/* With a step in flight there is no descriptor that tells of its end, so it is looked at. */
static void wait_for_news(struct worker *w) {
    const bool full = stepper_in_flight(w->stepper) == STEPPER_DEPTH;
    struct pollfd fds[] = {{.fd = control_fd(w->control), .events = POLLIN},
                           {.fd = wire_fd(w->steps), .events = POLLIN}};
    const struct timespec look = {.tv_nsec = LOOK_NS}, sleep = {.tv_sec = WAIT_MS / 1000};
    ppoll(fds, full ? 1 : 2, stepper_in_flight(w->stepper) ? &look : &sleep, NULL);
}

/* Until STOP (OK) or an error. */
static int serve(struct worker *w, struct err_text *err) {
    for (;;) {
        TRY(take_notes(w, err));
        if (w->stopping) return OK;
        if (stepper_is_done(w->stepper)) {
            TRY(finish_step(w, err));
            continue;
        }
        int rc = stepper_in_flight(w->stepper) < STEPPER_DEPTH ? hear_step_socket(w, err) : ERR_AGAIN;
        if (rc == ERR_AGAIN) wait_for_news(w);
        else TRY(rc);
    }
}

/* ---- life -------------------------------------------------------------------------------- */

/* HELLO and beats come before the device, whose driver may take long: who is silent then is frozen.
 * The probe is opened before there is a thread for it, and its failure is reported after HELLO. */
static int run(struct worker *w, struct err_text *err) {
    struct err_text probe_err = {0};
    struct probe *probe = NULL;
    const struct options *o = &w->o;
    int probe_rc = open_probe(o, &probe, &probe_err);
    TRY(start_control(w, probe, err));
    if (probe_rc < 0) return err_set(err, probe_rc, "%s", probe_err.text);
    TRY(open_device(w, err));
    w->in = malloc(sizeof *w->in);
    w->out = malloc(sizeof *w->out);
    if (!w->in || !w->out)
        return err_set(err, ERR_NOMEM, "worker: expected memory for two messages, found none");
    TRY(wire_connect(&w->steps, o->endpoint,
                     (struct wire_peer){(int32_t)o->rank, (uint32_t)o->incarnation, 's'}, err));
    TRY(load(w, err));
    prctl(PR_SET_TIMERSLACK, 1000); /* or the short looks of wait_for_news are long ones */
    return serve(w, err);
}

/* What keeps a worker from loading, or does not fit, will do so next time too. */
static int exit_code_of(const struct worker *w, int rc) {
    if (rc == OK) return EXIT_ASKED;
    return !w->loaded || rc == ERR_SETUP || rc == ERR_NOMEM ? EXIT_SETUP : EXIT_FAILED;
}

static int finish(struct worker *w, int rc, const struct err_text *err) {
    struct note n = {.type = MSG_FAILED, .failed = {.exit_code = exit_code_of(w, rc)}};
    int code = n.failed.exit_code;
    snprintf(n.failed.text, sizeof n.failed.text, "%s", err->text[0] ? err->text : err_name(rc));
    if (rc < 0)
        log_error("failed", "exit=%d error=\"%s\"", code, n.failed.text);
    else
        log_info("stopped", "rank=%d", (int)w->o.rank);
    if (rc < 0 && w->control) control_post(w->control, &n);
    close_coll(w);
    coll_maker_free(w->maker);
    if (w->steps) wire_close(w->steps);
    if (w->control) control_stop(w->control);
    dumper_close(w->dumper);
    stepper_free(w->stepper);
    model_unload(&w->model);
    free(w->in);
    free(w->out);
    return code;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) return bench_main(argc - 2, argv + 2);
    if (argc > 1 && strcmp(argv[1], "--switches") == 0) {
        switches_print(stdout, kernels_table());
        return EXIT_ASKED;
    }
    if (argc > 1 && strcmp(argv[1], "--self-test-collective") == 0)
        return self_test_main(argc - 1, argv + 1);
    process_die_with_parent();
    static struct worker w = {.o = {.world = 1,
                                    .device = "cpu",
                                    .collective = "auto",
                                    .max_slots = 64,
                                    .max_rows = 512}};
    struct err_text err = {0};
    int rc = options_parse(&w.o, argc, argv, &err);
    if (rc == ERR_CLOSED) return EXIT_ASKED;
    enum log_level level = LOG_INFO;
    if (rc == OK && w.o.log_level && !log_parse_level(w.o.log_level, &level))
        rc = err_set(&err, ERR_SETUP, "--log-level: expected debug, info, warn or error, found %s",
                     w.o.log_level);
    if (rc < 0) {
        fprintf(stderr, "octavo-worker: %s\n", err.text);
        return EXIT_SETUP;
    }
    char who[32];
    snprintf(who, sizeof who, "worker/%d", (int)w.o.rank);
    log_init(who, level, NULL);
    log_install_crash_report();
    if (w.o.parent_pid && !process_has_parent(w.o.parent_pid, (uint64_t)w.o.parent_start)) {
        log_warn("orphaned", "parent=%lld", (long long)w.o.parent_pid);
        return EXIT_FAILED;
    }
    init_signals(&w.o);
    rc = w.o.cpus ? process_pin(w.o.cpus, &err) : OK;
    if (rc == OK) rc = run(&w, &err);
    return finish(&w, rc, &err);
}
