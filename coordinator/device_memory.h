/* coordinator/device_memory.h: who holds how much of which device's memory, seen from outside.
 *
 * One interface, three sources:
 *   none     the CPU backend, whose memory is gone with the process: no devices
 *   nvml     the driver's own account (nvml.h)
 *   script   a text file, so that every verdict of the reclaim gate can be met without a GPU
 *
 * A script is read again at each look; whoever writes it replaces it by rename. Of its lines, those
 * before the first "at" hold always, those after "at S" from S seconds after the first look on, and
 * the last that speaks of a device counts:
 *   devices N
 *   at SECONDS
 *   device I used BYTES of BYTES [pid PID BYTES]…     BYTES of a pid may be "unknown"
 *   device I lost SENTENCE
 *   device I unreadable SENTENCE
 * An empty line or one that starts with # says nothing.
 *
 * Owns: what the source needs (a library handle, a path).
 * Called by: reclaim.c, cmd_guard.c, the doctor; a driver's source by device_thread.c alone, which
 * stands between it and a loop that may not wait.
 * Fails how: device_memory_open with ERR_SETUP and a sentence; a look says so in its sample.
 * Limits: DEVICE_MAX devices, DEVICE_HOLDERS_MAX processes on one; more are counted, not listed.
 * Tested by: tests/unit/test_reclaim.c, tests/unit/test_nvml.c
 */
#ifndef OCTAVO_COORDINATOR_DEVICE_MEMORY_H
#define OCTAVO_COORDINATOR_DEVICE_MEMORY_H

#include "proto/base.h"

#define DEVICE_MAX           32
#define DEVICE_HOLDERS_MAX   64
#define DEVICE_BYTES_UNKNOWN UINT64_MAX

enum device_health {
    DEVICE_FINE,
    DEVICE_UNREADABLE, /* this look failed, the next may not */
    DEVICE_SILENT,     /* the driver has not answered yet; see device_thread.h */
    DEVICE_LOST,       /* off the bus, or in need of a reset: only a person can help */
};

struct device_holder {
    int64_t pid;    /* in a container perhaps one of the host's, which means nothing here */
    uint64_t bytes; /* or DEVICE_BYTES_UNKNOWN */
};

struct device_sample {
    enum device_health health;
    char error[160];          /* when not DEVICE_FINE */
    uint64_t asked_us;        /* of the time given to the look that asked for it */
    uint64_t total_bytes, used_bytes;
    int n_holders, n_unlisted;
    struct device_holder holders[DEVICE_HOLDERS_MAX];
};

struct device_memory_ops {
    const char *name;
    int (*count)(void *ctx);
    void (*look)(void *ctx, int device, uint64_t now_us, struct device_sample *out);
    /* "NVIDIA H200 GPU-uuid 00000000:01:00.0 serial 123" */
    void (*describe)(void *ctx, int device, char *out, size_t n);
    void (*close)(void *ctx);
};

struct device_memory {
    const struct device_memory_ops *ops;
    void *ctx;
};

/* source: "none", "nvml" or "script:PATH". ERR_NOT_FOUND: there is no NVML on this machine. */
int device_memory_open(struct device_memory *m, const char *source, struct err_text *err);
void device_memory_close(struct device_memory *m); /* {0} is fine */

int device_memory_count(const struct device_memory *m); /* at most DEVICE_MAX */
void device_memory_look(const struct device_memory *m, int device, uint64_t now_us,
                        struct device_sample *out);
void device_memory_describe(const struct device_memory *m, int device, char *out, size_t n);

/* The device that a worker's HELLO names by UUID or PCI address; -1: it names none of ours. */
int device_memory_find(const struct device_memory *m, const char *text);

/* For the sources. */
int device_memory_open_script(struct device_memory *m, const char *path, struct err_text *err);
void device_sample_add(struct device_sample *s, int64_t pid, uint64_t bytes);
PRINTF_LIKE(3, 4)
void device_sample_fail(struct device_sample *s, enum device_health health, const char *fmt, ...);

#endif
