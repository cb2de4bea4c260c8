/* coordinator/notify.c: what the service manager is told. See notify.h.
 *
 * Owns, called by, fails how, limits, tested by: see notify.h.
 *
 * The sign of life is sent from the loop, so a loop that does not turn is silent by itself. A loop
 * that turns while nothing is decided would be worse than silent: a step in flight is given up when
 * its bound has passed, so one that is older than that by STUCK_US says that nobody decides any
 * more, and then we are silent too. A rank that is stuck, a drain, a wait for device memory are no
 * reason: all of them are bounded and end in an exit code, which a kill would hide.
 *
 * How long loading and draining take depends on the model and on the clients, so the manager's
 * fixed limits are moved ahead of us for as long as the loop turns; the bounds that count are ours
 * (--load-timeout, --drain-timeout), because they know what they wait for.
 *
 * Why not libsystemd: its sd_notify waits while the manager's queue of ten or so is full, and with
 * it would wait every client. What cannot be sent now is said again at the next look.
 */
#include "coordinator/notify.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/log.h"

#define PERIOD_MS 1000
#define EXTEND_US 30000000ull /* from one "still at it" to the next, generously */
#define STUCK_US  10000000ull

/* A path, or with @ before it a name in the abstract name space. -1: nobody there. */
static int connect_to(const char *name) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    size_t n = name ? strlen(name) : 0;
    if (n < 2 || n >= sizeof at.sun_path || (*name != '/' && *name != '@')) return -1;
    memcpy(at.sun_path, name, n);
    if (*name == '@') at.sun_path[0] = 0;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&at, bytes) == 0) return fd;
    log_warn("no_notify", "socket=\"%s\" why=\"%s\"", name, strerror(errno));
    if (fd >= 0) close(fd);
    return -1;
}

void notify_open(struct notify *n) {
    const char *usec = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
    uint64_t watchdog_us = usec ? strtoull(usec, NULL, 10) : 0;
    if (pid && strtoll(pid, NULL, 10) != getpid()) watchdog_us = 0;
    *n = (struct notify){.period_ms = PERIOD_MS, .fd = connect_to(getenv("NOTIFY_SOCKET"))};
    n->watchdog = n->fd >= 0 && watchdog_us > 0;
    if (n->watchdog) n->period_ms = (unsigned)MAX(10, MIN(PERIOD_MS, watchdog_us / 4000));
}

void notify_close(struct notify *n) {
    if (n->fd >= 0) close(n->fd);
    n->fd = -1;
}

static void loading(const struct engine_status *st, char line[NOTIFY_LINE_BYTES]) {
    uint64_t bytes = 0, total = 0;
    for (int i = 0; i < st->n_workers; i++) {
        bytes += st->workers[i].load_bytes;
        total += st->workers[i].load_total;
    }
    int n = snprintf(line, NOTIFY_LINE_BYTES, "%s", st->why[0] ? st->why : "loading");
    if (total)
        snprintf(line + n, NOTIFY_LINE_BYTES - (size_t)n, ": %" PRIu64 " of %" PRIu64 " MiB",
                 bytes >> 20, total >> 20);
}

static void line_of(const struct engine_status *st, bool stopping, char line[NOTIFY_LINE_BYTES]) {
    const char *state = engine_state_name(st->state);
    if (st->state < ENGINE_READY)
        loading(st, line);
    else if (st->state == ENGINE_READY && !stopping)
        snprintf(line, NOTIFY_LINE_BYTES, "%s: %d ranks, %d running, %d waiting", state,
                 st->n_workers, st->running, st->waiting);
    else if (st->state == ENGINE_DRAINING || st->state == ENGINE_READY)
        snprintf(line, NOTIFY_LINE_BYTES, "stopping: %d running", st->running);
    else
        snprintf(line, NOTIFY_LINE_BYTES, "%s: %s", state, st->why);
    for (char *c = line; *c; c++)
        if (*c == '\n') *c = ' ';
}

static bool decides(const struct engine_status *st) {
    return !st->step || st->step_age_us <= st->step_bound_us + STUCK_US;
}

static PRINTF_LIKE(2, 3) void add(char *out, const char *fmt, ...) {
    size_t n = strlen(out);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(out + n, NOTIFY_BYTES - n, fmt, ap);
    va_end(ap);
}

const char *notify_text(struct notify *n, const struct engine_status *st, bool ready, bool stopping,
                        char out[NOTIFY_BYTES]) {
    char line[NOTIFY_LINE_BYTES];
    out[0] = 0;
    if (stopping && !n->stopping) {
        n->stopping = true;
        add(out, "STOPPING=1\n");
    }
    if (ready && !n->ready && !stopping) {
        n->ready = true;
        add(out, "READY=1\n");
    }
    if (!n->ready || n->stopping) add(out, "EXTEND_TIMEOUT_USEC=%llu\n", EXTEND_US);
    if (n->watchdog && decides(st)) add(out, "WATCHDOG=1\n");
    line_of(st, stopping, line);
    if (strcmp(line, n->line)) {
        memcpy(n->line, line, sizeof n->line);
        add(out, "STATUS=%s\n", line);
    }
    return out;
}

void notify_look(struct notify *n, const struct engine_status *st, bool ready, bool stopping) {
    char text[NOTIFY_BYTES];
    struct notify then = *n; /* what is known to have been told, once it is sent */
    if (n->fd < 0 || !*notify_text(&then, st, ready, stopping, text)) return;
    if (send(n->fd, text, strlen(text), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) *n = then;
}
