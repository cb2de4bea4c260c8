/* tests/faults/slow_read.c: preloaded into a worker, stops it when it has read so much of its model.
 *
 * READ_STOP="RANK BYTES" or several with commas between them: the first incarnation of that rank
 * stops itself (SIGSTOP) inside the read after BYTES. With "hang" behind it that read does not
 * return instead, while the file READ_HANG is there. Others, and the coordinator, are let alone.
 *
 * Called by: tests/faults/test_loading.py through LD_PRELOAD.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Atomic long long n_read;
static long long stop_at = -1;
static int hangs;

static long long option(const char *line, size_t n, const char *name) {
    for (const char *at = line; at < line + n; at += strlen(at) + 1)
        if (!strcmp(at, name)) return atoll(at + strlen(at) + 1);
    return -1;
}

__attribute__((constructor)) static void begin(void) {
    char line[16384] = "";
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
    if (fd >= 0) close(fd);
    if (n <= 0 || option(line, (size_t)n, "--incarnation") != 1) return;
    for (const char *s = getenv("READ_STOP"); s; s = strchr(s, ','), s = s ? s + 1 : NULL) {
        int rank;
        long long bytes;
        char how[8] = "";
        int found = sscanf(s, "%d %lld %7[a-z]", &rank, &bytes, how);
        if (found < 2 || rank != option(line, (size_t)n, "--rank")) continue;
        stop_at = bytes;
        hangs = found == 3;
    }
}

ssize_t pread64(int fd, void *out, size_t n, off64_t at) {
    static ssize_t (*next)(int, void *, size_t, off64_t);
    const char *file = getenv("READ_HANG");
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "pread64");
    ssize_t got = next(fd, out, n, at);
    if (got <= 0 || stop_at < 0) return got;
    long long before = atomic_fetch_add(&n_read, got);
    if (before + got <= stop_at) return got;
    while (hangs && file && access(file, F_OK) == 0) usleep(10000);
    if (!hangs && before <= stop_at) raise(SIGSTOP);
    return got;
}
