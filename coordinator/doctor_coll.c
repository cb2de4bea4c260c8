/* coordinator/doctor_coll.c: all-reduces of two, four and all ranks, in processes that may hang.
 *
 * Owns: the processes of one trial, their shared memory, a loop of its own while it runs.
 * Called by: cmd_doctor.c, cmd_serve.c.  Fails how: every failure is a row of "collectives" and a
 * finding. Limits: limit_s a trial, LIMIT_RANKS, TALK_BYTES of what a rank says. Tested by:
 * tests/faults/test_doctor.py
 *
 * Each rank is a worker of the service's own program, without a model, that says on its standard
 * output what it is about to do. When the time is up, the rank that has said least is the one that
 * the others wait for; if all have said the same, it is the link between them. A rank that ends by
 * itself with an error ends the trial soon: the others would wait for it to no purpose.
 *
 * What two ranks can do four may not, and the other way round: all sizes are tried after a failure,
 * and then, of more than two GPUs, each two.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <uv.h>

#include "coordinator/doctor.h"
#include "proto/limits.h"
#include "proto/log.h"

#define TALK_BYTES 8192
#define SHM_BYTES  (40 << 20) /* the worker takes parts as large as fit */
#define GRACE_MS   300        /* for the others, after one failed */
#define WEDGED_MS  5000       /* for a killed process to end */
#define SUMS_MAX   8
#define PAIRS_S    60 /* for looking which pair of GPUs is the bad one, */
#define PAIR_S     10 /* and for each */

struct talker {
    uv_process_t process;
    uv_pipe_t out, err;
    int64_t pid; /* 0: not started */
    bool ended;
    int64_t status;
    int signal;
    char said[TALK_BYTES], cried[TALK_BYTES];
    size_t n_said, n_cried;
};

struct trial {
    const struct doctor_ranks *r;
    const char *collective;
    int world, shm_fd;
    uv_loop_t loop;
    uv_timer_t clock;
    int running;
    bool late, hurried, wedged;
    char failure[600]; /* empty: all sums were right */
    bool refused;      /* by the set-up, with a sentence */
    struct talker rank[LIMIT_RANKS];
};

/* ---- what a rank said ------------------------------------------------------------------------ */

/* Its last line that begins with word, without it; "" if there is none. */
static const char *last_line(const char *text, const char *word, char out[200]) {
    size_t n = strlen(word);
    out[0] = 0;
    for (const char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n')
        if (!strncmp(line, word, n))
            snprintf(out, 200, "%.*s", (int)MIN(199, strcspn(line + n, "\n")), line + n);
    return out;
}

static int lines_said(const struct talker *t) {
    int n = 0;
    for (size_t i = 0; i < t->n_said; i++) n += t->said[i] == '\n';
    return n;
}

static const char *stage_of(const struct talker *t, char out[200]) {
    last_line(t->said, "stage ", out);
    return out[0] ? out : strcpy(out, "start");
}

/* How the operating system has it: "T (stopped)". */
static void state_of(int64_t pid, char out[32]) {
    char path[64], text[1024] = "", *at;
    snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
    FILE *f = fopen(path, "re");
    if (f) {
        size_t n = fread(text, 1, sizeof text - 1, f);
        text[n] = 0;
        fclose(f);
    }
    at = strrchr(text, ')');
    char state = at && at[1] ? at[2] : '?';
    snprintf(out, 32, "%c%s", state,
             state == 'T'   ? " (stopped)"
             : state == 'D' ? " (in the kernel)"
             : state == 'R' ? " (running)"
             : state == 'S' ? " (sleeping)"
                            : "");
}

/* The time is up: whoever said least keeps the others waiting. */
static void blame_the_slowest(struct trial *t) {
    char text[200], others[200] = "", state[32];
    int least = INT32_MAX, most = 0;
    size_t n;
    for (int r = 0; r < t->world; r++) {
        int lines = lines_said(&t->rank[r]);
        least = MIN(least, lines);
        most = MAX(most, lines);
        if (lines == most) stage_of(&t->rank[r], others);
    }
    if (least == most) {
        snprintf(t->failure, sizeof t->failure, "all %d ranks wait in: %s", t->world, others);
        return;
    }
    for (int r = 0; r < t->world; r++) {
        if (lines_said(&t->rank[r]) != least) continue;
        n = strlen(t->failure);
        state_of(t->rank[r].pid, state);
        snprintf(t->failure + n, sizeof t->failure - n,
                 "%srank %d is stuck in: %.100s, process %" PRId64 " in state %s", n ? "; " : "", r,
                 stage_of(&t->rank[r], text), t->rank[r].pid, state);
    }
    n = strlen(t->failure);
    snprintf(t->failure + n, sizeof t->failure - n, "; the others wait in: %s", others);
}

static void blame_the_dead(struct trial *t, int rank) {
    struct talker *k = &t->rank[rank];
    char own[24], text[200], stage[200];
    snprintf(own, sizeof own, "rank %d: ", rank);
    last_line(k->cried, own, text);
    stage_of(k, stage);
    t->refused = k->status == EXIT_SETUP && !k->signal;
    if (k->signal)
        snprintf(t->failure, sizeof t->failure, "rank %d died of signal %d in: %s", rank, k->signal,
                 stage);
    else if (text[0])
        snprintf(t->failure, sizeof t->failure, "rank %d: %s", rank, text);
    else
        snprintf(t->failure, sizeof t->failure, "rank %d ended with exit code %" PRId64 " in: %s",
                 rank, k->status, stage);
}

static void judge(struct trial *t) {
    for (int pass = 0; pass < 2 && !t->late; pass++) /* who died first of a signal explains more */
        for (int r = 0; r < t->world && !t->failure[0]; r++) {
            const struct talker *k = &t->rank[r];
            if (k->ended && (k->signal || (pass && k->status))) blame_the_dead(t, r);
        }
}

/* ---- the processes --------------------------------------------------------------------------- */

static void kill_all(struct trial *t) {
    for (int r = 0; r < t->world; r++)
        if (t->rank[r].pid && !t->rank[r].ended) kill((pid_t)-t->rank[r].pid, SIGKILL);
}

static void on_time(uv_timer_t *clock) {
    struct trial *t = clock->data;
    if (t->late) { /* killed, and still there */
        t->wedged = true;
        uv_stop(&t->loop);
        return;
    }
    judge(t);
    if (!t->failure[0]) blame_the_slowest(t);
    t->late = true;
    kill_all(t);
    uv_timer_start(clock, on_time, WEDGED_MS, 0);
}

static void on_exit_note(uv_process_t *p, int64_t status, int signum) {
    struct trial *t = p->loop->data;
    struct talker *k = p->data;
    k->ended = true;
    k->status = status;
    k->signal = signum;
    uv_close((uv_handle_t *)p, NULL);
    if (--t->running == 0) {
        uv_close((uv_handle_t *)&t->clock, NULL);
    } else if ((status || signum) && !t->hurried && !t->late) {
        t->hurried = true;
        uv_timer_start(&t->clock, on_time, GRACE_MS, 0);
    }
}

/* The end of what it says is kept on its output, the beginning is not what matters of its log. */
static void on_buffer(uv_handle_t *h, size_t suggested, uv_buf_t *buf) {
    struct talker *k = h->data;
    bool out = h == (uv_handle_t *)&k->out;
    char *text = out ? k->said : k->cried;
    size_t *n = out ? &k->n_said : &k->n_cried;
    UNUSED(suggested);
    if (*n > TALK_BYTES / 2 && !out) {
        memmove(text, text + TALK_BYTES / 4, *n - TALK_BYTES / 4);
        *n -= TALK_BYTES / 4;
    }
    *buf = uv_buf_init(text + *n, (unsigned)(TALK_BYTES - 1 - *n));
}

static void on_read(uv_stream_t *s, ssize_t got, const uv_buf_t *buf) {
    struct talker *k = s->data;
    UNUSED(buf);
    if (got < 0) {
        uv_close((uv_handle_t *)s, NULL);
        return;
    }
    bool out = s == (uv_stream_t *)&k->out;
    size_t *n = out ? &k->n_said : &k->n_cried;
    *n += (size_t)got;
    (out ? k->said : k->cried)[*n] = 0;
}

static void listen_to(struct trial *t, struct talker *k, uv_pipe_t *pipe) {
    pipe->data = k;
    if (uv_read_start((uv_stream_t *)pipe, on_buffer, on_read) < 0)
        snprintf(t->failure, sizeof t->failure, "expected to hear the ranks, found no pipe");
}

static void start_rank(struct trial *t, int rank) {
    const struct doctor_ranks *r = t->r;
    struct talker *k = &t->rank[rank];
    char words[8][32], shm[64];
    snprintf(words[0], 32, "%d", rank);
    snprintf(words[1], 32, "%d", t->world);
    snprintf(words[2], 32, "%d", r->gpus ? gpus_of_rank(r->gpus, rank) : 0);
    snprintf(words[3], 32, "%d", SHM_BYTES);
    snprintf(words[4], 32, "%d", r->gpus ? 16 << 20 : 1 << 20);
    snprintf(shm, sizeof shm, "/proc/%d/fd/%d", (int)getpid(), t->shm_fd);
    char worker[1200], collective[16];
    snprintf(worker, sizeof worker, "%s", r->worker);
    snprintf(collective, sizeof collective, "%s", t->collective);
    char *argv[] = {worker,
                    "--self-test-collective",
                    "--rank",
                    words[0],
                    "--world",
                    words[1],
                    "--device-index",
                    words[2],
                    "--collective",
                    collective,
                    "--shm",
                    shm,
                    "--shm-bytes",
                    words[3],
                    "--bytes-max",
                    words[4],
                    NULL};
    uv_pipe_init(&t->loop, &k->out, 0);
    uv_pipe_init(&t->loop, &k->err, 0);
    uv_stdio_container_t io[3] = {
        {.flags = UV_IGNORE},
        {.flags = UV_CREATE_PIPE | UV_WRITABLE_PIPE, .data.stream = (uv_stream_t *)&k->out},
        {.flags = UV_CREATE_PIPE | UV_WRITABLE_PIPE, .data.stream = (uv_stream_t *)&k->err}};
    uv_process_options_t o = {.exit_cb = on_exit_note,
                              .file = worker,
                              .args = argv,
                              .flags = UV_PROCESS_DETACHED,
                              .stdio = io,
                              .stdio_count = 3};
    k->process.data = k;
    int rc = uv_spawn(&t->loop, &k->process, &o);
    if (rc == 0) {
        k->pid = k->process.pid;
        t->running++;
        listen_to(t, k, &k->out);
        listen_to(t, k, &k->err);
        return;
    }
    snprintf(t->failure, sizeof t->failure, "%.300s: expected to start it, found: %s", worker,
             uv_strerror(rc));
    uv_close((uv_handle_t *)&k->process, NULL);
    uv_close((uv_handle_t *)&k->out, NULL);
    uv_close((uv_handle_t *)&k->err, NULL);
}

/* ---- a trial --------------------------------------------------------------------------------- */

/* The slowest rank's time of each size. */
static json_t *sums_of(const struct trial *t) {
    struct {
        long long bytes;
        double us;
    } sum[SUMS_MAX] = {0};
    json_t *sums = json_array();
    int n = 0;
    for (int r = 0; r < t->world; r++) {
        int at = 0;
        for (const char *line = t->rank[r].said; *line && at < SUMS_MAX;
             line += strcspn(line, "\n"), line += *line == '\n') {
            double us;
            if (sscanf(line, "sum %lld %lf", &sum[at].bytes, &us) != 2) continue;
            sum[at].us = MAX(sum[at].us, us);
            at++;
            n = MAX(n, at);
        }
    }
    for (int i = 0; i < n; i++)
        json_array_append_new(sums, json_pack("{s:I, s:f}", "bytes", (json_int_t)sum[i].bytes,
                                              "microseconds", sum[i].us));
    return sums;
}

static void mend(struct doctor *d, const struct trial *t) {
    char what[96], expected[96];
    const char *fix;
    bool cuda = t->r->gpus, asked = strcmp(t->r->collective, "auto") != 0;
    if (t->refused && !asked)
        fix = "nothing, if another way passes below: --collective auto takes that";
    else if (t->refused)
        fix = "what the sentence says, or another --collective";
    else if (strstr(t->failure, "wrong"))
        fix = "do not serve on it: a link or a memory changes data. Look for Xid and ECC errors "
              "(dmesg, nvidia-smi -q), try the devices in pairs with --devices";
    else if (cuda && strcmp(t->collective, "shm"))
        fix = "IOMMU to pass-through and ACS off (see above), look for Xid in dmesg; until then "
              "--collective shm, or NCCL_P2P_DISABLE=1 with --collective nccl";
    else
        fix =
            "look at that process and at the kernel's log: stopped, starved of cores or memory, or "
            "killed from outside";
    snprintf(what, sizeof what, "all-reduce of %d ranks over %s", t->world, t->collective);
    snprintf(expected, sizeof expected, "right sums within %d s", t->r->limit_s);
    doctor_find(d, t->refused && !asked ? DOCTOR_SLOWS : DOCTOR_STOPS, what, expected, fix, "%s",
                t->failure);
}

static void report(struct doctor *d, const struct trial *t, double seconds) {
    char name[200];
    last_line(t->rank[0].said, "opened ", name);
    json_array_append_new(json_object_get(d->report, "collectives"),
                          json_pack("{s:s, s:s, s:i, s:b, s:f, s:s, s:b, s:o}", "asked",
                                    t->collective, "used", name, "ranks", t->world, "right",
                                    !t->failure[0], "seconds", seconds, "failure", t->failure,
                                    "late", t->late && !t->hurried, "sums", sums_of(t)));
    if (t->failure[0]) mend(d, t);
}

static void run_trial(struct trial *t) {
    t->shm_fd = memfd_create("octavo-doctor", MFD_CLOEXEC);
    if (t->shm_fd < 0 || ftruncate(t->shm_fd, SHM_BYTES) < 0)
        snprintf(t->failure, sizeof t->failure, "expected %d bytes of shared memory, found: %s",
                 SHM_BYTES, strerror(errno));
    uv_loop_init(&t->loop);
    t->loop.data = t;
    uv_timer_init(&t->loop, &t->clock);
    t->clock.data = t;
    uv_timer_start(&t->clock, on_time, (uint64_t)t->r->limit_s * 1000, 0);
    for (int r = 0; r < t->world && !t->failure[0]; r++) start_rank(t, r);
    if (t->failure[0]) kill_all(t);
    if (t->running == 0) uv_close((uv_handle_t *)&t->clock, NULL);
    uv_run(&t->loop, UV_RUN_DEFAULT);
    if (t->shm_fd >= 0) close(t->shm_fd);
    judge(t);
    for (int r = 0; r < t->world && t->wedged; r++) {
        size_t n = strlen(t->failure);
        if (!t->rank[r].ended && n < sizeof t->failure)
            snprintf(t->failure + n, sizeof t->failure - n,
                     "; process %" PRId64 " cannot be killed", t->rank[r].pid);
    }
}

static struct trial *new_trial(const struct doctor_ranks *r, const char *collective, int world) {
    struct trial *t = calloc(1, sizeof *t);
    assert(t);
    t->r = r, t->collective = collective, t->world = world;
    return t;
}

/* A process that cannot be killed keeps its handles, and so this memory. */
static void free_trial(struct trial *t) {
    if (t->wedged) return;
    uv_loop_close(&t->loop);
    free(t);
}

/* True if it hung, died or gave a wrong sum; being refused is no fault of a link. */
static bool try_one(struct doctor *d, const struct doctor_ranks *r, const char *collective,
                    int world) {
    struct trial *t = new_trial(r, collective, world);
    uint64_t start = uv_hrtime();
    fprintf(stderr, "octavo doctor: all-reduce of %d ranks over %s …\n", world, collective);
    run_trial(t);
    bool broken = t->failure[0] && !t->refused;
    report(d, t, (double)(uv_hrtime() - start) / 1e9);
    free_trial(t);
    return broken;
}

static bool pair_adds_up(const struct doctor_ranks *pair, const char *collective) {
    struct trial *t = new_trial(pair, collective, 2);
    run_trial(t);
    bool right = !t->failure[0];
    free_trial(t);
    return right;
}

/* A link is between two: which two do not add up, as far as PAIRS_S go. */
static void find_pairs(struct doctor *d, const struct doctor_ranks *r, const char *collective) {
    struct gpus two = *r->gpus;
    struct doctor_ranks pair = *r;
    char bad[300] = "", what[64];
    int tried = 0;
    uint64_t until = uv_hrtime() + (uint64_t)PAIRS_S * 1000000000;
    fprintf(stderr, "octavo doctor: all-reduce of each two GPUs over %s …\n", collective);
    pair.gpus = &two, pair.all = 2, pair.limit_s = MIN(r->limit_s, PAIR_S);
    two.n_dealt = 2;
    for (int a = 0; a < r->gpus->n_dealt; a++)
        for (int b = a + 1; b < r->gpus->n_dealt && uv_hrtime() < until; b++) {
            two.dealt[0] = r->gpus->dealt[a], two.dealt[1] = r->gpus->dealt[b];
            if (two.dealt[0] == two.dealt[1]) continue;
            tried++;
            if (pair_adds_up(&pair, collective)) continue;
            snprintf(bad + strlen(bad), sizeof bad - strlen(bad), "%s%d-%d", bad[0] ? " " : "",
                     two.dealt[0], two.dealt[1]);
        }
    snprintf(what, sizeof what, "pairs of GPUs over %s", collective);
    doctor_find(d, bad[0] ? DOCTOR_STOPS : DOCTOR_NOTE, what, "each two add up",
                "a GPU in all of them is the one to look at: its slot, riser and the bridges above "
                "it; until then leave it out with --devices",
                "%s%s of %d pairs tried", bad[0] ? "not GPUs " : "nothing wrong", bad, tried);
}

int doctor_check_links(const struct doctor_ranks *r, struct err_text *err) {
    struct trial *t = new_trial(r, r->collective, r->all);
    uint64_t start = uv_hrtime();
    char used[200];
    int rc = OK;
    run_trial(t);
    if (t->failure[0])
        rc = err_set(err, ERR_SETUP,
                     "link check: expected %d ranks to add up over %s within %d s, "
                     "found: %.250s; octavo doctor says more",
                     r->all, r->collective, r->limit_s, t->failure);
    else
        log_info("links_checked", "ranks=%d asked=%s used=%s seconds=%.2f", r->all, r->collective,
                 last_line(t->rank[0].said, "opened ", used), (double)(uv_hrtime() - start) / 1e9);
    free_trial(t);
    return rc;
}

static bool share_a_device(const struct doctor_ranks *r) {
    return r->gpus && r->all > r->gpus->n_dealt;
}

void doctor_try_collectives(struct doctor *d, const struct doctor_ranks *r) {
    static const char *const on_gpus[] = {"ipc", "nccl", "shm"}, *const on_cpu[] = {"shm"};
    const char *const *names = r->gpus ? on_gpus : on_cpu;
    int n = r->gpus ? (int)ARRAY_LEN(on_gpus) : 1;
    bool asked = strcmp(r->collective, "auto") != 0;
    json_object_set_new(d->report, "collectives", json_array());
    for (int c = 0; c < (asked ? 1 : n); c++) {
        const char *name = asked ? r->collective : r->all == 1 ? "auto" : names[c];
        if (!strcmp(name, "nccl") && !asked && share_a_device(r)) continue; /* NCCL refuses that */
        if (!strcmp(name, "nccl") && !asked &&
            json_is_null(json_object_get(json_object_get(d->report, "nccl"), "version")))
            continue;
        bool broken = false;
        for (int world = MIN(2, r->all);; world = 2 * world < r->all ? 2 * world : r->all) {
            if (world == 2 || world == 4 || world == r->all) broken |= try_one(d, r, name, world);
            if (world == r->all) break;
        }
        if (broken && r->gpus && r->gpus->n_dealt > 2) find_pairs(d, r, name);
        if (r->all == 1) break;
    }
}
