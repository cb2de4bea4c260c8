/* coordinator/cmd_guard.c: `octavo guard`: is the device memory back, so that a start can succeed?
 *
 *   octavo guard                waits for what the driver still takes back, kills workers whose
 *                               coordinator is gone, names everybody else
 *   octavo guard --alone        does not let a start pass while others hold memory there
 * Exit code: 0 start · 2 asked wrongly · 3 not returned, held, or a device is lost.
 *
 * Owns: the source of device memory, the gate.  Called by: main.c; systemd's ExecStartPre, Slurm,
 * deploy/restart.  Fails how: see above, with a sentence.  Limits: DEVICE_MAX.
 * Tested by: tests/faults/test_guard.py
 *
 * It is the gate that `octavo serve` passes at its own start, for those who must know before: a
 * script that has stopped one server and has not yet started the next. Outside of containers it
 * also waits for memory that the driver still books to a process that has ended; inside one that
 * may be anybody's. Without a GPU driver there is nothing to wait for, and the answer is yes.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "coordinator/child.h"
#include "coordinator/cmd.h"
#include "coordinator/device_thread.h"
#include "coordinator/gpus.h"
#include "coordinator/proc.h"
#include "coordinator/reclaim.h"
#include "proto/log.h"
#include "proto/opt.h"

#define LOOK_MS               100
#define INITIAL_PID_NAMESPACE "pid:[4026531836]" /* the kernel's number of it */

struct guard {
    bool alone;
    int64_t timeout_s;
    const char *device, *devices, *source;
    struct device_memory memory;
    struct reclaim gate;
};

static const char usage[] =
    "usage: octavo guard [OPTION…]\n"
    "Waits until the memory of ended workers is back on the GPUs, and names who else holds some.\n"
    "Exit code: 0 start, 2 asked wrongly, 3 memory not returned or a device lost.";

static int read_options(struct guard *g, int argc, char **argv, struct err_text *err) {
    const struct opt rows[] = {
        {.name = "reclaim-timeout",
         .value = "SECONDS",
         .kind = OPT_INT,
         .out = &g->timeout_s,
         .min = 0,
         .max = 86400,
         .shown = "60",
         .help = "How long memory may take to return."},
        {.name = "alone",
         .kind = OPT_FLAG,
         .out = &g->alone,
         .help = "Wait until nobody at all holds memory there."},
        {.name = "device",
         .kind = OPT_CHOICE,
         .out = &g->device,
         .choices = "cpu|cuda",
         .shown = "cuda if there is a GPU",
         .help = "As for serve; cpu has nothing to wait for."},
        {.name = "devices",
         .value = "LIST",
         .kind = OPT_STRING,
         .out = &g->devices,
         .shown = "all of them",
         .help = "As for serve: look at these GPUs, like 0,1."},
        {.name = "device-memory",
         .value = "SOURCE",
         .kind = OPT_STRING,
         .out = &g->source,
         .help = "none, nvml or script:PATH.",
         .hidden = true},
    };
    return opt_parse(rows, ARRAY_LEN(rows), argc, argv, 0, usage, err);
}

static int open_memory(struct guard *g, struct err_text *err) {
    bool cpu = g->device && !strcmp(g->device, "cpu");
    const char *source = g->source ? g->source : cpu ? "none" : "nvml";
    int rc = device_thread_open(&g->memory, source, DEVICE_OPEN_MS, err);
    if (rc != ERR_NOT_FOUND) return rc;
    log_info("no_device_memory", "why=\"%s\"", err->text);
    return OK;
}

/* The devices of --devices and CUDA_VISIBLE_DEVICES, by address where the driver knows them, else by
 * their numbers. */
static int narrow(struct guard *g, struct err_text *err) {
    static struct gpus gpus;
    bool on[DEVICE_MAX] = {false};
    int n = device_memory_count(&g->memory);
    if (n == 0) return OK;
    if (!strcmp(g->memory.ops->name, "nvml"))
        gpus_find(&gpus, "", getenv("CUDA_VISIBLE_DEVICES"));
    bool known = gpus.n > 0;
    if (!known && !g->devices) return OK;
    if (!known) gpus.n = n;
    TRY(gpus_deal(&gpus, g->devices, err));
    if (!known || !gpus_devices(&gpus, gpus.n_dealt, &g->memory, on))
        for (int i = 0; i < gpus.n_dealt; i++)
            if (gpus.dealt[i] < DEVICE_MAX) on[gpus.dealt[i]] = true;
    reclaim_look_at(&g->gate, on);
    return OK;
}

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void wait_a_look(void) {
    nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000}, NULL);
}

/* Who holds memory on the devices looked at; says so when `tell`. */
static int others(const struct guard *g, bool tell) {
    int n = 0;
    for (int d = 0; d < DEVICE_MAX; d++) {
        struct device_sample s;
        if (!g->gate.on_device[d]) continue;
        device_memory_look(&g->memory, d, now_us(), &s);
        n += s.n_holders + s.n_unlisted + (s.health == DEVICE_SILENT); /* then nothing is known */
        for (int i = 0; tell && i < s.n_holders; i++) {
            char name[64];
            proc_name(s.holders[i].pid, name, sizeof name);
            log_error("held", "device=%d pid=%" PRId64 " name=\"%s\" bytes=%" PRIu64, d,
                      s.holders[i].pid, name,
                      s.holders[i].bytes == DEVICE_BYTES_UNKNOWN ? 0 : s.holders[i].bytes);
        }
    }
    return n;
}

/* Here every process of the machine can be seen, so that one that cannot has ended. */
static bool sees_all(void) {
    char name[64];
    ssize_t n = readlink("/proc/self/ns/pid", name, sizeof name - 1);
    name[MAX(n, 0)] = 0;
    return !strcmp(name, INITIAL_PID_NAMESPACE);
}

/* Memory that is booked to processes that have ended: the driver has not given it back. */
static bool is_booked_to_dead(const struct guard *g, char *why, size_t n) {
    for (int d = 0; d < DEVICE_MAX; d++) {
        struct device_sample s;
        if (!g->gate.on_device[d]) continue;
        device_memory_look(&g->memory, d, now_us(), &s);
        for (int i = 0; i < s.n_holders; i++) {
            if (child_start_time(s.holders[i].pid)) continue;
            snprintf(why, n,
                     "device %d: memory is still booked to process %" PRId64
                     ", which has ended: the driver holds it",
                     d, s.holders[i].pid);
            return true;
        }
    }
    return false;
}

static int wait_dead(const struct guard *g, uint64_t due_us) {
    char why[160];
    if (!sees_all()) return EXIT_ASKED;
    while (is_booked_to_dead(g, why, sizeof why)) {
        if (now_us() >= due_us) {
            printf("%s: %s\n", reclaim_verdict_name(RECLAIM_HELD_BY_NOBODY), why);
            return EXIT_DEVICE;
        }
        wait_a_look();
    }
    return EXIT_ASKED;
}

static int wait_alone(const struct guard *g, uint64_t due_us) {
    int n;
    while ((n = others(g, false)) > 0 && now_us() < due_us) wait_a_look();
    if (n == 0) return EXIT_ASKED;
    others(g, true);
    printf("held: %d processes hold memory on the devices, expected none\n", n);
    return EXIT_DEVICE;
}

static int stand(struct guard *g, struct err_text *err) {
    struct reclaim_host host = reclaim_host_here("");
    uint64_t begun_us = now_us(), bound_us = (uint64_t)g->timeout_s * 1000000;
    enum reclaim_verdict v;
    TRY(open_memory(g, err));
    reclaim_init(&g->gate, &g->memory, &host, bound_us);
    reclaim_begin_start(&g->gate, DEVICE_MAX, begun_us);
    TRY(narrow(g, err));
    while ((v = reclaim_poll(&g->gate, now_us())) == RECLAIM_WAITING) wait_a_look();
    if (v != RECLAIM_RETURNED) {
        printf("%s: %s\n", reclaim_verdict_name(v), reclaim_sentence(&g->gate));
        return EXIT_DEVICE;
    }
    if (wait_dead(g, begun_us + bound_us)) return EXIT_DEVICE;
    if (g->alone && wait_alone(g, begun_us + bound_us)) return EXIT_DEVICE;
    if (device_memory_count(&g->memory))
        printf("free: %s\n", reclaim_sentence(&g->gate));
    else
        printf("free: no device memory to wait for\n");
    return EXIT_ASKED;
}

int cmd_guard(int argc, char **argv) {
    static struct guard g = {.timeout_s = 60};
    struct err_text err = {0};
    log_init("guard", LOG_INFO, NULL);
    int rc = read_options(&g, argc, argv, &err);
    if (rc == ERR_CLOSED) return EXIT_ASKED;
    if (rc >= 0) rc = stand(&g, &err);
    if (g.memory.ops) device_memory_close(&g.memory);
    if (rc >= 0) return rc;
    fprintf(stderr, "octavo guard: %s\n", err.text);
    return rc == ERR_TIMEOUT ? EXIT_DEVICE : EXIT_SETUP;
}
