/* coordinator/proc.c: what the operating system says of a process that holds device memory. See
 * proc.h.
 *
 * Owns: nothing.  Called by: reclaim.c.  Fails how: see proc.h.  Limits: PROC_TEXT_BYTES.
 * Tested by: tests/unit/test_reclaim.c
 *
 * A pid alone names nobody: it may have been given to another process between two looks. So a
 * process is held fast by a pidfd first and compared then; the signal reaches the one compared.
 */
#include "coordinator/proc.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "coordinator/child.h"

#define PROC_TEXT_BYTES (128u << 10)

/* The strings of /proc/PID/NAME, each ended by a zero byte and the last by two; NULL: unreadable. */
static char *read_strings(int64_t pid, const char *name) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%" PRId64 "/%s", pid, name);
    FILE *f = fopen(path, "re");
    char *text = f ? calloc(1, PROC_TEXT_BYTES + 2) : NULL;
    size_t n = text ? fread(text, 1, PROC_TEXT_BYTES, f) : 0;
    if (f) fclose(f);
    if (n > 0) return text;
    free(text);
    return NULL;
}

bool proc_has_cookie(int64_t pid, const char *cookie) {
    char *all = read_strings(pid, "environ");
    bool found = false;
    for (char *p = all; p && *p && !found; p += strlen(p) + 1)
        found = !strncmp(p, "OCTAVO_COOKIE=", 14) && !strcmp(p + 14, cookie);
    free(all);
    return found;
}

static const char *option(const char *all, const char *name) {
    for (const char *p = all; *p; p += strlen(p) + 1)
        if (!strcmp(p, name)) return p + strlen(p) + 1;
    return NULL;
}

bool proc_is_abandoned(int64_t pid) {
    char *all = read_strings(pid, "cmdline");
    if (!all) return false;
    const char *slash = strrchr(all, '/');
    const char *parent = option(all, "--parent-pid"), *start = option(all, "--parent-start");
    bool abandoned = !strncmp(slash ? slash + 1 : all, "octavo-worker", 13) && parent && start &&
                     strtoll(parent, NULL, 10) > 0 &&
                     child_start_time(strtoll(parent, NULL, 10)) != strtoull(start, NULL, 10);
    free(all);
    return abandoned;
}

int proc_kill(int64_t pid, uint64_t start_time) {
    int fd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    if (fd < 0) return errno == ESRCH ? ERR_NOT_FOUND : ERR_SYS;
    int rc = child_start_time(pid) == start_time ? OK : ERR_NOT_FOUND;
    if (rc == OK && syscall(SYS_pidfd_send_signal, fd, SIGKILL, NULL, 0) < 0)
        rc = errno == ESRCH ? ERR_NOT_FOUND : ERR_SYS;
    close(fd);
    return rc;
}

void proc_name(int64_t pid, char *out, size_t n) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%" PRId64 "/comm", pid);
    FILE *f = fopen(path, "re");
    if (!f || !fgets(out, (int)n, f)) snprintf(out, n, "not visible here");
    if (f) fclose(f);
    out[strcspn(out, "\n")] = 0;
}
