/* coordinator/launch.c: how a worker is called. See launch.h.
 *
 * Owns: the cookie, copies of the environment.  Called by: fleet.c.
 * Fails how: ERR_NOMEM, ERR_SYS.  Tested by: tests/unit/test_fleet.c
 *
 * The endpoint is an abstract socket named after this process and its start time: no file is left
 * behind by a kill -9, and a successor with the same pid listens elsewhere. Everybody on the host
 * can see such names, so a worker proves with the cookie that it is ours; the cookie travels in the
 * environment, which only the same user can read, and not on the command line, which all can.
 */
#include "coordinator/launch.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "coordinator/gpus.h"
#include "coordinator/pin.h"

#define WORDS_BYTES (32u << 10)
#define PROBE_PATIENCE 20 /* a probe knows no measured rate, so it calls a step stuck later than we */
#define SHARE_BYTES 4096 /* CONVOY_SHARE_BYTES of the worker */

extern char **environ;

static unsigned n_launches; /* several fleets in one process, as tests have */

/* The cookie of somebody else, and what a service manager said to us. */
static bool is_ours_alone(const char *entry) {
    static const char *const names[] = {"OCTAVO_COOKIE=", "NOTIFY_SOCKET=", "WATCHDOG_USEC=",
                                        "WATCHDOG_PID="};
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (!strncmp(entry, names[i], strlen(names[i]))) return true;
    return false;
}

int launch_init(struct launch *l) {
    *l = (struct launch){.self = {getpid(), child_start_time(getpid())}, .share_fd = -1};
    uint8_t random[32];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) return ERR_SYS;
    for (size_t i = 0; i < sizeof random; i++) snprintf(l->cookie + 2 * i, 3, "%02x", random[i]);
    snprintf(l->endpoint, sizeof l->endpoint, "ipc://@octavo-%" PRId64 "-%" PRIu64 "-%u",
             l->self.pid, l->self.start_time, n_launches++);
    CPU_ZERO(&l->allowed);
    if (sched_getaffinity(0, sizeof l->allowed, &l->allowed) < 0 || CPU_COUNT(&l->allowed) == 0)
        return ERR_SYS;
    size_t n = 0, kept = 0;
    while (environ[n]) n++;
    l->env = calloc(n + 2, sizeof *l->env);
    l->words = malloc(WORDS_BYTES);
    l->cookie_entry = malloc(sizeof "OCTAVO_COOKIE=" + sizeof l->cookie);
    if (!l->env || !l->words || !l->cookie_entry) {
        launch_deinit(l);
        return ERR_NOMEM;
    }
    for (size_t i = 0; i < n; i++)
        if (!is_ours_alone(environ[i])) l->env[kept++] = environ[i];
    sprintf(l->cookie_entry, "OCTAVO_COOKIE=%s", l->cookie);
    l->env[kept] = l->cookie_entry;
    /* One for life: a rank that starts again finds the others marked as done. */
    l->share_fd = memfd_create("octavo-load", MFD_CLOEXEC);
    if (l->share_fd < 0 || ftruncate(l->share_fd, SHARE_BYTES) < 0) {
        launch_deinit(l);
        return ERR_SYS;
    }
    return OK;
}

void launch_deinit(struct launch *l) {
    if (l->cookie_entry && l->share_fd >= 0) close(l->share_fd); /* may be zeroed, not started */
    free(l->env);
    free(l->words);
    free(l->cookie_entry);
    *l = (struct launch){0};
}

/* Appends the two words "--name value" to argv. */
struct writer {
    struct launch *l;
    size_t at;
    int n;
};

static PRINTF_LIKE(3, 4) void word(struct writer *w, const char *name, const char *fmt, ...) {
    assert(w->n + 3 <= LAUNCH_ARGS_MAX);
    char *p = w->l->words + w->at;
    size_t room = WORDS_BYTES - w->at;
    int name_n = name ? snprintf(p, room, "%s", name) + 1 : 0;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(p + name_n, room - (size_t)name_n, fmt, ap);
    va_end(ap);
    if (name) w->l->argv[w->n++] = p;
    w->l->argv[w->n++] = p + name_n;
    w->l->argv[w->n] = NULL;
    w->at += (size_t)(name_n + n + 1);
}

int launch_argv(struct launch *l, const struct engine_options *o, int rank, uint32_t incarnation) {
    size_t dir = o->shard_cache ? strlen(o->shard_cache) : 0;
    if (strlen(o->worker_path) + strlen(o->model_path) + dir > WORDS_BYTES / 2) return ERR_LIMIT;
    struct writer w = {.l = l};
    char cpus[PIN_TEXT_BYTES];
    cpu_set_t mine;
    if (o->gpus)
        gpus_cores(o->gpus, &mine, &l->allowed, rank, o->tp);
    else
        pin_plan(&mine, &l->allowed, rank, o->tp);
    pin_text(cpus, &mine);
    word(&w, NULL, "%s", o->worker_path);
    word(&w, "--rank", "%d", rank);
    word(&w, "--world", "%d", o->tp);
    word(&w, "--model", "%s", o->model_path);
    word(&w, "--device", "%s", o->device);
    int device = o->n_devices > 0 ? rank % o->n_devices : 0;
    word(&w, "--device-index", "%d", o->gpus ? gpus_of_rank(o->gpus, rank) : device);
    word(&w, "--context", "%" PRId64, o->context);
    word(&w, "--max-slots", "%d", o->max_seqs);
    word(&w, "--max-rows", "%d", o->max_step_rows);
    word(&w, "--connect", "%s", l->endpoint);
    word(&w, "--incarnation", "%u", incarnation);
    word(&w, "--parent-pid", "%" PRId64, l->self.pid);
    word(&w, "--parent-start", "%" PRIu64, l->self.start_time);
    word(&w, "--cpus", "%s", cpus);
    if (o->tp > 1) word(&w, "--load-share", "/proc/%" PRId64 "/fd/%d", l->self.pid, l->share_fd);
    if (o->collective) word(&w, "--collective", "%s", o->collective);
    if (o->shard_cache) word(&w, "--shard-cache", "%s", o->shard_cache);
    word(&w, "--probe-socket", "@octavo-probe-%" PRId64 "-%d", l->self.pid, rank);
    word(&w, "--probe-port", "%d", o->probe_port ? o->probe_port + rank : 0);
    word(&w, "--step-limit", "%d", PROBE_PATIENCE * o->step_timeout_s);
    return OK;
}
