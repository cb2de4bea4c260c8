/* tests/unit/fake_worker.c: a worker without a model, for tests of the coordinator.
 *
 * Speaks the protocol; samples token 100 + hash(seed, all tokens of the slot) mod 800, so that a
 * test can tell what every stream must be. FAKE_FAULT="KIND RANK INCARNATION STEP", or several with
 * commas between them, makes one rank of one incarnation (0: of every one) misbehave, at its STEPth
 * step where that has a meaning:
 *   die     exits by SIGKILL                 hang    beats, but never answers again
 *   stop    stops itself (SIGSTOP)           slow    answers when it is asked to abort the step
 *   lie     answers for a slot that was not asked for
 *   setup   FAILED with exit code 2 instead of LOADED
 *   device  FAILED with exit code 3 at that step
 *   unload  dies before LOADED               unjoin  dies when it is told to JOIN
 *   uncopy  dies when it is told to COPY     unabort dies when it is told to ABORT
 *   build, protocol  says HELLO with another one
 *   stay    does not follow STOP
 *   unsing  dies at the canary               hush    does not answer the canary
 *   mute    has no token for the canary      off     has another one, a little likelier
 *   capture beats that it captures graphs, and is never JOINED
 *   noload  beats, but never is LOADED       halt    stops itself (SIGSTOP) before HELLO
 * The canary, which slot generation 0 tells, is not counted as a step.
 *
 * Owns: its slots.  Called by: fleet.c through test_fleet.c and test_engine.c.
 * Fails how: exit code 1.
 */
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "proto/log.h"
#include "proto/opt.h"
#include "proto/wire.h"

#define CONTEXT_MAX 4096

struct slot {
    uint32_t generation;
    uint64_t seed;
    int n;
    int32_t last, tokens[CONTEXT_MAX];
};

static struct {
    int64_t rank, world, context, slots, rows, incarnation, parent_pid, parent_start, index;
    int64_t probe_port, step_limit;
    const char *model, *device, *connect, *cpus, *probe_socket, *load_share, *shard_cache, *collective;
    char kind[16];
    int at;
} o;
static struct slot slots[LIMIT_SLOTS];
static struct wire *control, *steps;
static struct msg in, out;
static uint32_t generation;
static int n_steps;
static bool hanging, slow, capturing;

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static bool fault(const char *kind) {
    return !strcmp(o.kind, kind);
}

static void say(struct wire *w, enum msg_type type) {
    out.type = type;
    if (wire_send(w, (struct wire_peer){0}, &out) < 0) exit(EXIT_FAILED);
}

static void fail_with(int code, const char *text) {
    out.failed = (struct msg_failed){.exit_code = code};
    snprintf(out.failed.text, sizeof out.failed.text, "%s", text);
    say(control, MSG_FAILED);
    wire_close_within(control, 1000);
    exit(code);
}

/* The same as in test_engine.c. */
static uint64_t mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9E3779B97F4A7C15ull;
    return h ^ h >> 29;
}

static int32_t sample(const struct slot *s) {
    uint64_t h = s->seed;
    for (int i = 0; i < s->n; i++) h = mix(h, (uint64_t)s->tokens[i]);
    return (int32_t)(100 + h % 800);
}

static void run_step(const struct msg_step *s) {
    if (s->generation != generation) return;
    bool canary = s->entries[0].slot_generation == 0;
    n_steps += !canary;
    if (slow) return;
    if (canary && fault("unsing")) raise(SIGKILL);
    if (canary && fault("hush")) return;
    if (o.at == n_steps && !canary) {
        if (fault("die")) raise(SIGKILL);
        if (fault("stop")) raise(SIGSTOP);
        if (fault("device")) fail_with(EXIT_DEVICE, "the device fell off the bus");
        if (fault("hang")) hanging = true;
        if (fault("slow")) slow = true;
    }
    if (hanging || slow) return;
    memset(&out.tokens, 0, offsetof(struct msg_tokens, tokens));
    out.tokens.step_id = s->id;
    out.tokens.generation = s->generation;
    for (int i = 0; i < s->n_entries; i++) {
        const struct msg_entry *e = &s->entries[i];
        struct slot *q = &slots[e->slot];
        if (q->generation != e->slot_generation || q->n != e->pos)
            fail_with(EXIT_FAILED, "an entry that does not fit its slot");
        for (int k = 0; k < e->count; k++)
            q->tokens[q->n++] = e->token_at < 0 ? q->last : s->tokens[e->token_at + k];
        if (q->tokens[q->n - 1] < 0) fail_with(EXIT_FAILED, "nothing was sampled here");
        if (!e->samples) continue;
        q->last = sample(q);
        if (canary && fault("mute")) q->last = -1;
        if (canary && fault("off")) q->last++;
        out.tokens.tokens[out.tokens.n++] =
            (struct msg_token){.slot = e->slot,
                               .slot_generation = e->slot_generation,
                               .pos = q->n,
                               .token = q->last,
                               .logprob = -1,
                               .n_top = canary && fault("off"),
                               .top_token = {q->last - 1},
                               .top_logprob = {-1.05f}};
    }
    if (fault("lie") && o.at == n_steps && !canary) out.tokens.tokens[0].slot ^= 1;
    if (o.rank == 0) {
        say(steps, MSG_TOKENS);
        return;
    }
    out.done = (struct msg_done){.step_id = s->id, .generation = s->generation};
    say(steps, MSG_DONE);
}

static void restore(const struct msg_step *s) {
    for (int i = 0; i < s->n_entries; i++) {
        const struct msg_entry *e = &s->entries[i];
        struct slot *q = &slots[e->slot];
        if (q->generation != e->slot_generation || q->n != e->pos || e->samples)
            fail_with(EXIT_FAILED, "a history that does not fit its slot");
        for (int k = 0; k < e->count; k++) q->tokens[q->n++] = s->tokens[e->token_at + k];
    }
}

static void hear(struct wire *w, const struct msg *m) {
    UNUSED(w);
    switch (m->type) {
    case MSG_JOIN:
        if (fault("unjoin")) raise(SIGKILL);
        capturing = fault("capture");
        if (capturing) break;
        generation = m->join.generation;
        if (m->join.shm_bytes && access(m->join.shm_path, R_OK | W_OK) < 0)
            fail_with(EXIT_FAILED, "the shared memory is not there");
        out.joined.generation = generation;
        say(control, MSG_JOINED);
        break;
    case MSG_ADMIT:
        slots[m->admit.slot].generation = m->admit.slot_generation;
        slots[m->admit.slot].seed = m->admit.sampling.seed;
        slots[m->admit.slot].n = 0;
        slots[m->admit.slot].last = -1;
        break;
    case MSG_ABORT:
        if (fault("unabort")) raise(SIGKILL);
        if (hanging) break;
        slow = false;
        if (m->abort.generation == generation) generation = 0;
        out.aborted.generation = m->abort.generation;
        say(control, MSG_ABORTED);
        break;
    case MSG_COPY:
        if (m->copy.generation != generation) break;
        if (fault("uncopy")) raise(SIGKILL);
        out.done = (struct msg_done){.step_id = m->copy.id, .generation = generation};
        say(steps, MSG_DONE);
        break;
    case MSG_RESTORE:
        if (m->restore.generation == generation) restore(&m->restore);
        break;
    case MSG_STEP:
        run_step(&m->step);
        break;
    case MSG_STOP:
        if (fault("stay")) break;
        exit(EXIT_ASKED);
    default:
        break;
    }
}

static void hear_all(struct wire *w) {
    while (wire_recv(w, NULL, &in, 0) == OK) hear(w, &in);
}

static void parse(int argc, char **argv) {
    const struct opt rows[] = {
        {.name = "rank", .value = "N", .kind = OPT_INT, .out = &o.rank, .max = 99},
        {.name = "world", .value = "N", .kind = OPT_INT, .out = &o.world, .max = 99},
        {.name = "device-index", .value = "N", .kind = OPT_INT, .out = &o.index, .max = 99},
        {.name = "context", .value = "N", .kind = OPT_INT, .out = &o.context, .max = 1 << 30},
        {.name = "max-slots", .value = "N", .kind = OPT_INT, .out = &o.slots, .max = 1 << 30},
        {.name = "max-rows", .value = "N", .kind = OPT_INT, .out = &o.rows, .max = 1 << 30},
        {.name = "incarnation",
         .value = "N",
         .kind = OPT_INT,
         .out = &o.incarnation,
         .max = 1 << 30},
        {.name = "parent-pid", .value = "N", .kind = OPT_INT, .out = &o.parent_pid, .max = 1 << 30},
        {.name = "parent-start",
         .value = "N",
         .kind = OPT_INT,
         .out = &o.parent_start,
         .max = INT64_MAX},
        {.name = "model", .value = "S", .kind = OPT_STRING, .out = &o.model},
        {.name = "device", .value = "S", .kind = OPT_STRING, .out = &o.device},
        {.name = "connect", .value = "S", .kind = OPT_STRING, .out = &o.connect},
        {.name = "load-share", .value = "S", .kind = OPT_STRING, .out = &o.load_share},
        {.name = "collective", .value = "S", .kind = OPT_STRING, .out = &o.collective},
        {.name = "shard-cache", .value = "S", .kind = OPT_STRING, .out = &o.shard_cache},
        {.name = "cpus", .value = "S", .kind = OPT_STRING, .out = &o.cpus},
        {.name = "probe-socket", .value = "S", .kind = OPT_STRING, .out = &o.probe_socket},
        {.name = "probe-port", .value = "N", .kind = OPT_INT, .out = &o.probe_port, .max = 65535},
        {.name = "step-limit", .value = "N", .kind = OPT_INT, .out = &o.step_limit, .max = 86400},
    };
    struct err_text err = {0};
    if (opt_parse(rows, ARRAY_LEN(rows), argc, argv, 0, "fake worker", &err) < 0 || !o.connect) {
        fprintf(stderr, "fake-worker: %s\n", err.text);
        exit(EXIT_SETUP);
    }
    for (const char *f = getenv("FAKE_FAULT"); f; f = strchr(f, ','), f = f ? f + 1 : NULL) {
        int rank, incarnation, n = sscanf(f, "%15s %d %d %d", o.kind, &rank, &incarnation, &o.at);
        if (n >= 3 && rank == o.rank && (!incarnation || incarnation == o.incarnation)) return;
        o.kind[0] = 0;
    }
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--build")) return puts(log_build()) < 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    parse(argc, argv);
    if (getppid() != o.parent_pid) return EXIT_FAILED;
    if (fault("halt")) raise(SIGSTOP);
    struct wire_peer self = {(int32_t)o.rank, (uint32_t)o.incarnation, 'c'};
    struct err_text err;
    if (wire_connect(&control, o.connect, self, &err) < 0) return EXIT_FAILED;
    self.channel = 's';
    if (wire_connect(&steps, o.connect, self, &err) < 0) return EXIT_FAILED;
    const char *cookie = getenv("OCTAVO_COOKIE");
    out.hello = (struct msg_hello){.protocol = MSG_PROTOCOL,
                                   .limits = limits_digest(),
                                   .rank = (int32_t)o.rank,
                                   .pid = getpid(),
                                   .device = "fake"};
    snprintf(out.hello.build, sizeof out.hello.build, "%s", fault("build") ? "other" : log_build());
    snprintf(out.hello.cookie, sizeof out.hello.cookie, "%s", cookie ? cookie : "");
    if (fault("protocol")) out.hello.protocol = MSG_PROTOCOL + 1;
    say(control, MSG_HELLO);
    if (fault("setup")) fail_with(EXIT_SETUP, "tiny.gguf: expected a model, found a poem");
    if (fault("unload")) raise(SIGKILL);
    out.progress = (struct msg_progress){50, 100};
    say(control, MSG_PROGRESS);
    while (fault("noload")) {
        out.beat = (struct msg_beat){.state = WORKER_LOADING};
        say(control, MSG_BEAT);
        hear_all(control);
        poll(&(struct pollfd){.fd = wire_fd(control), .events = POLLIN}, 1, MSG_BEAT_MS);
    }
    out.loaded = (struct msg_loaded){
        .page_bytes = 1000, .free_bytes = 1 << 30, .shm_bytes = o.world > 1 ? 4096 : 0};
    say(control, MSG_LOADED);
    uint64_t beat = now_ms();
    for (;;) {
        if (now_ms() >= beat) {
            beat = now_ms() + MSG_BEAT_MS;
            out.beat = (struct msg_beat){.state = capturing ? WORKER_CAPTURING : WORKER_READY};
            say(control, MSG_BEAT);
        }
        hear_all(control);
        hear_all(steps);
        struct pollfd fds[] = {{.fd = wire_fd(control), .events = POLLIN},
                               {.fd = wire_fd(steps), .events = POLLIN}};
        poll(fds, 2, 20);
    }
}
