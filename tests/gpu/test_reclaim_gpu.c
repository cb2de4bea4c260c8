/* tests/gpu/test_reclaim_gpu.c: the reclaim gate on a real GPU: processes that hold device memory are
 * killed, and the gate says when it is back.
 *
 * Needs a GPU with its driver and nothing else: libcuda and NVML are opened while running. Built by
 * name and never by the test runner. Exit code 0: all was as expected.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "coordinator/child.h"
#include "coordinator/reclaim.h"
#include "proto/log.h"

#define MIB    ((uint64_t)1 << 20)
#define COOKIE "a-cookie-of-the-gpu-test"

struct holder {
    pid_t pid;
    struct reclaim_rank rank;
};

static struct device_memory memory;
static struct reclaim gate;
static char self[4096];

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void expect(bool good, const char *what) {
    printf("%s %s\n", good ? "ok    " : "not ok", what);
    if (!good) exit(1);
}

/* ---- a process that holds memory ------------------------------------------------------------- */

static void *call(void *library, const char *name) {
    void *at = dlsym(library, name);
    if (!at) _exit(70);
    return at;
}

static int hold(uint64_t bytes) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context, *init = NULL;
    unsigned long long at;
    int device;
    if (!cuda) return 71;
    int (*cu_init)(unsigned), (*get)(int *, int), (*retain)(void **, int), (*current)(void *),
        (*alloc)(unsigned long long *, size_t);
    init = call(cuda, "cuInit");
    memcpy(&cu_init, &init, sizeof init);
    init = call(cuda, "cuDeviceGet");
    memcpy(&get, &init, sizeof init);
    init = call(cuda, "cuDevicePrimaryCtxRetain");
    memcpy(&retain, &init, sizeof init);
    init = call(cuda, "cuCtxSetCurrent");
    memcpy(&current, &init, sizeof init);
    init = call(cuda, "cuMemAlloc_v2");
    memcpy(&alloc, &init, sizeof init);
    if (cu_init(0) || get(&device, 0) || retain(&context, device) || current(context)) return 72;
    if (alloc(&at, bytes)) return 73;
    if (write(1, "x", 1) != 1) return 74;
    for (;;) pause();
}

static struct holder start(int rank, uint64_t bytes, bool ours) {
    struct holder h = {0};
    char number[32], byte;
    int ends[2];
    snprintf(number, sizeof number, "%" PRIu64, bytes);
    expect(pipe(ends) == 0, "a pipe");
    fflush(stdout);
    h.pid = fork();
    if (h.pid == 0) {
        dup2(ends[1], 1);
        if (ours) setenv("OCTAVO_COOKIE", COOKIE, 1);
        execl(self, self, number, (char *)NULL);
        _exit(75);
    }
    close(ends[1]);
    expect(read(ends[0], &byte, 1) == 1, "a process holds device memory");
    close(ends[0]);
    h.rank = (struct reclaim_rank){rank, h.pid, child_start_time(h.pid), 0, bytes};
    return h;
}

static void end(const struct holder *h) {
    kill(h->pid, SIGKILL);
    waitpid(h->pid, NULL, 0);
}

/* ---- what is tried --------------------------------------------------------------------------- */

static enum reclaim_verdict wait_for(const struct reclaim_rank *dead, int n) {
    enum reclaim_verdict v;
    reclaim_begin(&gate, dead, n, now_us());
    while ((v = reclaim_poll(&gate, now_us())) == RECLAIM_WAITING) usleep(5000);
    printf("       %s: %s\n", reclaim_verdict_name(v), reclaim_sentence(&gate));
    return v;
}

static void watch(const struct reclaim_rank *ranks, int n) {
    for (int i = 0; i < 2 * device_memory_count(&memory); i++)
        reclaim_watch(&gate, ranks, n, 0, now_us()); /* a look counts when the next confirms it */
}

static void show(void) {
    struct device_sample s;
    uint64_t began = now_us();
    device_memory_look(&memory, 0, now_us(), &s);
    printf("       used %" PRIu64 " MiB, %d processes, %s, looked in %" PRIu64 " us\n",
           s.used_bytes / MIB, s.n_holders, s.health ? s.error : "fine", now_us() - began);
    for (int i = 0; i < s.n_holders; i++)
        printf("       pid %" PRId64 " %" PRIu64 " MiB\n", s.holders[i].pid, s.holders[i].bytes / MIB);
    fflush(stdout);
    reclaim_print(stdout, &gate);
}

static void one_dies(void) {
    struct holder h = start(0, 20000 * MIB, true);
    watch(&h.rank, 1);
    show();
    expect(gate.held[0].bytes >= 20000 * MIB, "the gate knows what it holds");
    end(&h);
    expect(wait_for(&h.rank, 1) == RECLAIM_RETURNED, "its memory returns");
}

static void one_of_two_dies(void) {
    struct holder a = start(0, 10000 * MIB, true), b = start(1, 15000 * MIB, true);
    struct reclaim_rank both[] = {a.rank, b.rank};
    watch(both, 2);
    show();
    end(&b);
    expect(wait_for(&b.rank, 1) == RECLAIM_RETURNED, "the memory of one of two returns");
    expect(waitpid(a.pid, NULL, WNOHANG) == 0, "the other lives");
    end(&a);
    expect(wait_for(&a.rank, 1) == RECLAIM_RETURNED, "and then that of the other");
}

/* Another takes the memory at once: not returned, and who has it is said if the driver tells. */
static void another_takes_it(void) {
    struct holder h = start(0, 20000 * MIB, true);
    watch(&h.rank, 1);
    end(&h);
    struct holder thief = start(5, 20000 * MIB, false);
    gate.bound_us = 2000000;
    enum reclaim_verdict v = wait_for(&h.rank, 1);
    expect(v == RECLAIM_HELD_BY_STRANGER || v == RECLAIM_HELD_BY_NOBODY, "memory another took is missing");
    expect(waitpid(thief.pid, NULL, WNOHANG) == 0, "the other is left alone");
    end(&thief);
    gate.bound_us = 60000000;
}

static void an_orphan_has_it(void) {
    struct holder h = start(0, 20000 * MIB, true);
    watch(&h.rank, 1);
    struct holder orphan = start(5, 20000 * MIB, true);
    end(&h);
    gate.bound_us = 5000000;
    enum reclaim_verdict v = wait_for(&h.rank, 1);
    bool killed = waitpid(orphan.pid, NULL, WNOHANG) == orphan.pid;
    /* Where the driver lists pids of the host, nobody can tell whose it is. */
    expect((v == RECLAIM_RETURNED && killed) || (!killed && !gate.dead[0].listed),
           "an orphan of ours is killed where it can be seen");
    if (!killed) end(&orphan);
    gate.bound_us = 60000000;
}

int main(int argc, char **argv) {
    struct err_text err = {0};
    if (argc > 1) return hold(strtoull(argv[1], NULL, 10));
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    expect(n > 0, "this program's path");
    log_init("gpu-test", LOG_DEBUG, NULL);
    if (device_memory_open(&memory, "nvml", &err) < 0) fprintf(stderr, "%s\n", err.text);
    expect(device_memory_count(&memory) > 0, "NVML has devices");
    char text[200];
    device_memory_describe(&memory, 0, text, sizeof text);
    printf("       %s\n", text);
    expect(device_memory_find(&memory, text) == 0, "the device is found by its names");
    struct reclaim_host host = reclaim_host_here(COOKIE);
    reclaim_init(&gate, &memory, &host, 60000000);
    show();
    reclaim_begin_start(&gate, 1, now_us());
    while (reclaim_poll(&gate, now_us()) == RECLAIM_WAITING) usleep(5000);
    expect(gate.verdict == RECLAIM_RETURNED, "nothing is in the way at the start");
    one_dies();
    one_of_two_dies();
    another_takes_it();
    an_orphan_has_it();
    device_memory_close(&memory);
    return 0;
}
