/* proto/log.c: one line per event, one write(2) per line, and the last lines for a crash report.
 *
 * Owns: the sink and the ring.  Called by: everyone but kernels; any thread.
 * Fails how: never; a line that cannot be written whole is counted (log_lost).
 * Limits: LINE_BYTES per line (longer ones are cut and say so), RING_LINES lines kept.
 * Tested by: tests/unit/test_log.c
 *
 * A line is formatted on the caller's stack and handed to the kernel in one piece, so lines of
 * several threads, and of several processes that share one stderr, never interleave and no lock is
 * held while a slow terminal blocks. Reopening replaces the file under the same descriptor with
 * dup3, so a writer in flight never meets a closed or recycled number. The ring is plain memory
 * with the length stored last: the crash report may read it from a signal handler, where the lock
 * cannot be taken, and at worst sees one line cut.
 */
#include "proto/log.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef OCTAVO_BUILD
#define OCTAVO_BUILD "unknown"
#endif

#define LINE_BYTES 1024
#define RING_LINES 64

static struct {
    char who[32];
    char path[PATH_MAX];
    atomic_int level;
    int fd;
    atomic_ullong lost;
} sink = {.who = "octavo", .level = LOG_INFO, .fd = STDERR_FILENO};

static struct {
    pthread_mutex_t lock;
    atomic_uint next;
    struct {
        atomic_uint n; /* 0: empty or being written */
        char text[LINE_BYTES];
    } lines[RING_LINES];
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char *const level_names[] = {"debug", "info", "warn", "error"};

const char *log_build(void) {
    return OCTAVO_VERSION "-" OCTAVO_BUILD;
}

uint64_t log_lost(void) {
    return atomic_load(&sink.lost);
}

static int open_sink(const char *path) {
    return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0640);
}

int log_init(const char *who, enum log_level level, const char *path) {
    snprintf(sink.who, sizeof sink.who, "%s", who);
    atomic_store(&sink.level, level);
    if (path && strlen(path) >= sizeof sink.path) return ERR_LIMIT;
    int fd = path ? open_sink(path) : STDERR_FILENO;
    if (fd < 0) return ERR_SYS;
    if (sink.fd != STDERR_FILENO) close(sink.fd);
    snprintf(sink.path, sizeof sink.path, "%s", path ? path : "");
    sink.fd = fd;
    return OK;
}

void log_reopen(void) {
    if (!sink.path[0]) return;
    int fd = open_sink(sink.path);
    if (fd < 0) {
        log_warn("log-reopen", "path=\"%s\" error=\"%s\"", sink.path, strerror(errno));
        return;
    }
    if (dup3(fd, sink.fd, O_CLOEXEC) < 0) atomic_fetch_add(&sink.lost, 1);
    close(fd);
}

bool log_parse_level(const char *name, enum log_level *out) {
    for (int i = 0; i < (int)ARRAY_LEN(level_names); i++)
        if (!strcmp(name, level_names[i])) {
            *out = (enum log_level)i;
            return true;
        }
    return false;
}

/* The whole line in one call where the kernel takes it; the rest after a short write. */
static void write_line(int fd, const char *p, size_t n) {
    while (n > 0) {
        ssize_t w = write(fd, p, n);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) {
            atomic_fetch_add(&sink.lost, 1);
            return;
        }
        p += w;
        n -= (size_t)w;
    }
}

static void remember(const char *p, size_t n) {
    pthread_mutex_lock(&ring.lock);
    unsigned at = atomic_load(&ring.next);
    atomic_store(&ring.lines[at % RING_LINES].n, 0);
    memcpy(ring.lines[at % RING_LINES].text, p, n);
    atomic_store(&ring.lines[at % RING_LINES].n, (unsigned)n);
    atomic_store(&ring.next, at + 1);
    pthread_mutex_unlock(&ring.lock);
}

static size_t format_head(char *line, size_t cap, enum log_level level, const char *event) {
    struct timespec now;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    size_t n = strftime(line, cap, "%Y-%m-%dT%H:%M:%S", &tm);
    int k = snprintf(line + n, cap - n, ".%03dZ %s %s %s", (int)(now.tv_nsec / 1000000),
                     level_names[level], sink.who, event);
    return MIN(n + (size_t)MAX(k, 0), cap - 1);
}

void log_event(enum log_level level, const char *event, const char *fmt, ...) {
    if ((int)level < atomic_load(&sink.level)) return;
    int saved_errno = errno;
    char line[LINE_BYTES];
    static const char cut[] = " cut=1";
    const size_t cap = sizeof line - sizeof cut - 1; /* room for the mark and the newline */
    size_t n = format_head(line, cap, level, event);
    if (fmt[0] && n + 2 < cap) {
        line[n++] = ' ';
        va_list ap;
        va_start(ap, fmt);
        errno = saved_errno; /* for %m */
        int k = vsnprintf(line + n, cap - n, fmt, ap);
        va_end(ap);
        if (k < 0) k = 0;
        bool whole = (size_t)k < cap - n;
        n = whole ? n + (size_t)k : cap - 1;
        if (!whole) {
            memcpy(line + n, cut, sizeof cut - 1);
            n += sizeof cut - 1;
        }
    }
    /* What a stranger sent must not be able to start a line of its own. */
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)line[i] < ' ' || line[i] == 127) line[i] = '?';
    line[n++] = '\n';
    remember(line, n);
    write_line(sink.fd, line, n);
    errno = saved_errno;
}

void log_dump_recent(int fd) {
    unsigned end = atomic_load(&ring.next);
    unsigned n = MIN(end, (unsigned)RING_LINES);
    for (unsigned i = end - n; i != end; i++) {
        unsigned len = MIN(atomic_load(&ring.lines[i % RING_LINES].n), (unsigned)LINE_BYTES);
        if (len) write_line(fd, ring.lines[i % RING_LINES].text, len);
    }
}

/* ---- crash report: nothing below may allocate, lock or use stdio ---- */

static char crash_head[160]; /* formatted at install time */

static size_t append(char *to, size_t n, size_t cap, const char *text) {
    while (*text && n < cap) to[n++] = *text++;
    return n;
}

static size_t append_number(char *to, size_t n, size_t cap, uint64_t v, unsigned base) {
    char digits[24];
    int k = 0;
    do digits[k++] = "0123456789abcdef"[v % base];
    while ((v /= base) && k < (int)sizeof digits);
    while (k > 0 && n < cap) to[n++] = digits[--k];
    return n;
}

static void on_crash(int sig, siginfo_t *info, void *context) {
    UNUSED(context);
    char line[320];
    size_t n = append(line, 0, sizeof line, crash_head);
    n = append(line, n, sizeof line, " pid=");
    n = append_number(line, n, sizeof line, (uint64_t)getpid(), 10);
    n = append(line, n, sizeof line, " signal=");
    n = append_number(line, n, sizeof line, (uint64_t)sig, 10);
    if (sig == SIGSEGV || sig == SIGBUS || sig == SIGFPE || sig == SIGILL) {
        n = append(line, n, sizeof line, " address=0x");
        n = append_number(line, n, sizeof line, (uint64_t)(uintptr_t)info->si_addr, 16);
    }
    n = append(line, n, sizeof line, ", last log lines:\n");
    write_line(sink.fd, line, n);
    log_dump_recent(sink.fd);
    static const char end[] = "crash report ends\n";
    write_line(sink.fd, end, sizeof end - 1);
    if (getpid() == 1) _exit(128 + sig); /* a container's first process does not die of raise */
    raise(sig); /* the default action is back (SA_RESETHAND); it strikes when we return */
}

void log_install_crash_report(void) {
    static char stack[64 << 10]; /* a stack overflow leaves none of its own */
    stack_t alt = {.ss_sp = stack, .ss_size = sizeof stack};
    sigaltstack(&alt, NULL);
    snprintf(crash_head, sizeof crash_head, "crash build=%s who=%s", log_build(), sink.who);
    struct sigaction sa = {.sa_sigaction = on_crash,
                           .sa_flags = SA_SIGINFO | SA_ONSTACK | (int)SA_RESETHAND};
    sigemptyset(&sa.sa_mask);
    static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    for (int i = 0; i < (int)ARRAY_LEN(signals); i++) sigaction(signals[i], &sa, NULL);
}
