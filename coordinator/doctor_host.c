/* coordinator/doctor_host.c: the host: cores, memory, limits, shared memory, huge pages.
 *
 * Owns: nothing.  Called by: cmd_doctor.c.  Fails how: see doctor.h.
 * Limits: none.  Tested by: tests/unit/test_doctor.c
 *
 * Limits are read as text from /proc/self/limits and not with getrlimit, so that a test's folder
 * can say them; the free space of /dev/shm is no file, and is asked of whatever lies below root.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <time.h>

#include "coordinator/doctor.h"
#include "proto/limits.h"
#include "proto/log.h"

#define MIB           (1 << 20)
#define SHM_LEAST     ((int64_t)1 << 30) /* NCCL's segments of sixteen ranks, with room */
#define CGROUP_LEAST  ((int64_t)2 << 30)
#define MEMLOCK_LEAST ((int64_t)64 << 20)

/* A line "NAME   123 kB" of /proc/meminfo, in bytes; -1: none. */
static int64_t meminfo(const char *text, const char *name) {
    size_t n = strlen(name);
    for (const char *line = text; line; line = (line = strchr(line, '\n')) ? line + 1 : NULL)
        if (!strncmp(line, name, n) && line[n] == ':') {
            int64_t value = strtoll(line + n + 1, NULL, 10);
            return strstr(line, "kB") && strstr(line, "kB") < line + strcspn(line, "\n")
                       ? value * 1024
                       : value;
        }
    return -1;
}

static json_t *bytes_or_null(int64_t n) {
    return n < 0 ? json_null() : json_integer(n);
}

/* ---- limits ---------------------------------------------------------------------------------- */

/* The soft limit of a row "Max open files   1024   4096   files"; INT64_MAX: unlimited; -1: none.
 */
static int64_t soft_limit(const char *text, const char *name) {
    const char *row = strstr(text, name);
    if (!row) return -1;
    row += strlen(name);
    row += strspn(row, " ");
    return !strncmp(row, "unlimited", 9) ? INT64_MAX : strtoll(row, NULL, 10);
}

/* "name 123" as a line of its own; 0: none. */
static int64_t stat_row(const char *text, const char *name) {
    size_t n = strlen(name);
    for (const char *line = text; line; line = (line = strchr(line, '\n')) ? line + 1 : NULL)
        if (!strncmp(line, name, n) && line[n] == ' ') return strtoll(line + n, NULL, 10);
    return 0;
}

/* What a group uses and the kernel cannot take back at once: files that were read count as in use
 * up to the bound, and are no reason to worry. prefix: "total_" in version 1. */
static int64_t group_used(const struct doctor *d, const char *folder, const char *current,
                          const char *prefix) {
    char text[8192], idle[40], busy[40];
    int64_t used = doctor_number(d, -1, "%s/%s", folder, current);
    if (used < 0 || !doctor_read(d, text, sizeof text, "%s/memory.stat", folder)) return used;
    snprintf(idle, sizeof idle, "%sinactive_file", prefix);
    snprintf(busy, sizeof busy, "%sactive_file", prefix);
    return MAX(0, used - stat_row(text, idle) - stat_row(text, busy));
}

/* The smallest bound of this process's control group and those above it; -1: none. */
static int64_t cgroup_limit(const struct doctor *d, int64_t *used) {
    char text[4096], path[1024] = "";
    int64_t least = -1;
    *used = -1;
    if (doctor_read(d, text, sizeof text, "/proc/self/cgroup")) {
        const char *unified = strstr(text, "0::/");
        if (unified)
            snprintf(path, sizeof path, "%.*s", (int)strcspn(unified + 3, "\n"), unified + 3);
    }
    for (;;) {
        char *slash;
        int64_t n = doctor_number(d, -1, "/sys/fs/cgroup%s/memory.max", path);
        if (n >= 0 && (least < 0 || n < least)) {
            least = n;
            char folder[1100];
            snprintf(folder, sizeof folder, "/sys/fs/cgroup%s", path);
            *used = group_used(d, folder, "memory.current", "");
        }
        if (!(slash = strrchr(path, '/'))) break;
        *slash = 0;
    }
    int64_t v1 = doctor_number(d, -1, "/sys/fs/cgroup/memory/memory.limit_in_bytes");
    if (least >= 0 || v1 < 0 || v1 > (int64_t)1 << 60) return least; /* v1 says "none" so */
    *used = group_used(d, "/sys/fs/cgroup/memory", "memory.usage_in_bytes", "total_");
    return v1;
}

static json_t *limit_json(int64_t n) {
    return n == INT64_MAX ? json_string("unlimited") : bytes_or_null(n);
}

static void look_limits(struct doctor *d) {
    char text[8192] = "";
    int64_t used;
    doctor_read(d, text, sizeof text, "/proc/self/limits");
    int64_t files = soft_limit(text, "Max open files"),
            locked = soft_limit(text, "Max locked memory"), group = cgroup_limit(d, &used);
    json_object_set_new(d->report, "limits",
                        json_pack("{s:o, s:o, s:o, s:o}", "nofile", limit_json(files),
                                  "memlock_bytes", limit_json(locked), "cgroup_memory_bytes",
                                  bytes_or_null(group), "cgroup_memory_used_bytes",
                                  bytes_or_null(used)));
    const int64_t files_least = LIMIT_CONNECTIONS + LIMIT_DESCRIPTORS_KEPT;
    if (files >= 0 && files < files_least)
        doctor_find(d, DOCTOR_SLOWS, "open files", "at least 4224, one for each connection",
                    "LimitNOFILE=65536 in the unit, or ulimit -n 65536 before the start",
                    "%" PRId64, files);
    if (locked >= 0 && locked < MEMLOCK_LEAST &&
        json_array_size(json_object_get(d->report, "gpus")))
        doctor_find(d, DOCTOR_NOTE, "locked memory", "unlimited, where NCCL uses RDMA",
                    "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
                    "%" PRId64 " bytes", locked);
    if (group >= 0 && used >= 0 && group - used < CGROUP_LEAST)
        doctor_find(d, DOCTOR_STOPS, "memory of the control group",
                    "at least 2 GiB free, for workers and the page cache they load through",
                    "raise MemoryMax= of the unit, or the container's memory limit",
                    "%" PRId64 " MiB of %" PRId64 " MiB in use", used / MIB, group / MIB);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void look_shm(struct doctor *d) {
    char path[512];
    struct statvfs v;
    snprintf(path, sizeof path, "%.400s/dev/shm", d->root);
    if (statvfs(path, &v) < 0) {
        json_object_set_new(d->report, "shm", json_null());
        doctor_find(d, DOCTOR_SLOWS, "/dev/shm", "a tmpfs, which NCCL needs between processes",
                    "mount -t tmpfs -o size=8g tmpfs /dev/shm", "nothing mounted there");
        return;
    }
    int64_t total = (int64_t)(v.f_blocks * v.f_frsize), left = (int64_t)(v.f_bavail * v.f_frsize);
    json_object_set_new(
        d->report, "shm",
        json_pack("{s:I, s:I}", "total_bytes", (json_int_t)total, "free_bytes", (json_int_t)left));
    if (left < SHM_LEAST && json_array_size(json_object_get(d->report, "gpus")))
        doctor_find(d, DOCTOR_SLOWS, "/dev/shm",
                    "at least 1024 MiB free, for NCCL between processes",
                    "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm; remove "
                    "/dev/shm/nccl-* that no process holds",
                    "%" PRId64 " MiB free", left / MIB);
}

static void look_memory(struct doctor *d, json_t *host) {
    char text[DOCTOR_TEXT_BYTES], thp[128];
    doctor_read(d, text, sizeof text, "/proc/meminfo");
    int64_t total = meminfo(text, "MemTotal"), pages = meminfo(text, "HugePages_Total"),
            size = meminfo(text, "Hugepagesize");
    json_object_set_new(host, "memory_bytes", bytes_or_null(total));
    json_object_set_new(host, "available_bytes", bytes_or_null(meminfo(text, "MemAvailable")));
    doctor_read(d, thp, sizeof thp, "/sys/kernel/mm/transparent_hugepage/enabled");
    json_object_set_new(d->report, "huge_pages",
                        json_pack("{s:s, s:o, s:o}", "transparent", thp, "reserved",
                                  bytes_or_null(pages), "size_bytes", bytes_or_null(size)));
    if (pages > 0 && size > 0 && total > 0 && pages > total / 2 / size)
        doctor_find(d, DOCTOR_SLOWS, "huge pages", "few reserved: the page cache cannot use them",
                    "sysctl vm.nr_hugepages=0", "%" PRId64 " MiB of %" PRId64 " MiB reserved",
                    pages * (size / 1024) / 1024, total / MIB);
}

void doctor_look_host(struct doctor *d) {
    char name[256], kernel[256], when[32], nodes[256], cores[256];
    struct utsname u;
    time_t now = time(NULL);
    struct tm utc;
    if (!doctor_read(d, name, sizeof name, "/proc/sys/kernel/hostname")) strcpy(name, "?");
    if (!doctor_read(d, kernel, sizeof kernel, "/proc/sys/kernel/osrelease"))
        snprintf(kernel, sizeof kernel, "%s", uname(&u) == 0 ? u.release : "?");
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    doctor_read(d, nodes, sizeof nodes, "/sys/devices/system/node/online");
    doctor_read(d, cores, sizeof cores, "/sys/devices/system/cpu/online");
    json_t *host = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s}", "build", log_build(), "time", when,
                             "name", name, "kernel", kernel, "numa_nodes", nodes, "cores", cores);
    json_object_set_new(d->report, "host", host);
    look_memory(d, host);
    look_limits(d);
    look_shm(d);
}
