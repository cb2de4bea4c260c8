/* coordinator/doctor_gpu.c: the GPUs as the driver tells of them: which, how full, who is in them,
 * who reaches whom; and NCCL.
 *
 * Owns: NCCL's library while it is asked for its version.  Called by: cmd_doctor.c.
 * Fails how: see doctor.h.  Limits: DEVICE_MAX.  Tested by: tests/unit/test_doctor.c
 *
 * Without the driver's library a GPU is still counted, as gpus.c counts for a service, so that a
 * broken driver shows as such and not as a machine without GPUs.
 */
#include <ctype.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/doctor.h"
#include "coordinator/nvml.h"

#define MIB (1 << 20)

/* "00000000:C1:00.0" as the kernel writes it: "0000:c1:00.0". */
static void kernel_address(char out[24], const char *nvml) {
    size_t skip = strcspn(nvml, ":") == 8 ? 4 : 0;
    snprintf(out, 24, "%.23s", nvml + skip);
    for (char *p = out; *p; p++) *p = (char)tolower((unsigned char)*p);
}

/* ---- who holds its memory -------------------------------------------------------------------- */

static void look_holder(struct doctor *d, json_t *list, int gpu, const struct device_holder *h,
                        uint64_t total) {
    char name[64], what[64], fix[200];
    bool known = h->bytes != DEVICE_BYTES_UNKNOWN;
    if (!doctor_read(d, name, sizeof name, "/proc/%" PRId64 "/comm", h->pid))
        strcpy(name, "not visible here");
    json_array_append_new(
        list, json_pack("{s:I, s:s, s:o}", "pid", (json_int_t)h->pid, "name", name, "bytes",
                        known ? json_integer((json_int_t)h->bytes) : json_null()));
    bool ours = !strncmp(name, "octavo-worker", 13), much = !known || h->bytes > total / 16;
    snprintf(what, sizeof what, "memory of GPU %d", gpu);
    if (ours)
        snprintf(fix, sizeof fix, "nothing, if that is the service you mean");
    else
        snprintf(fix, sizeof fix,
                 "stop that process (kill %" PRId64 "), or leave the GPU out with "
                 "--devices",
                 h->pid);
    doctor_find(d, ours || !much ? DOCTOR_NOTE : DOCTOR_STOPS, what, "no other process in it", fix,
                "process %" PRId64 " (%s) with %" PRIu64 " MiB", h->pid, name,
                known ? h->bytes / MIB : 0);
}

static void look_unbooked(struct doctor *d, int gpu, const struct device_sample *s) {
    uint64_t booked = 0;
    char what[64];
    for (int i = 0; i < s->n_holders; i++)
        booked += s->holders[i].bytes != DEVICE_BYTES_UNKNOWN ? s->holders[i].bytes : s->used_bytes;
    if (s->n_unlisted || s->used_bytes <= booked || s->used_bytes - booked <= s->total_bytes / 16)
        return;
    snprintf(what, sizeof what, "memory of GPU %d", gpu);
    doctor_find(d, DOCTOR_STOPS, what, "memory in use only where a process holds it",
                "look on the host, outside of this container; else nvidia-smi --gpu-reset -i, or a "
                "reboot",
                "%" PRIu64 " MiB that no process visible here holds",
                (s->used_bytes - booked) / MIB);
}

static void look_health(struct doctor *d, int gpu, const char *text,
                        const struct device_sample *s) {
    char what[300];
    snprintf(what, sizeof what, "GPU %d, %.200s", gpu, text);
    if (s->health == DEVICE_LOST)
        doctor_find(d, DOCTOR_STOPS, what, "a device that answers",
                    "dmesg | grep -i xid tells why; then power the machine off and on, and if it "
                    "comes again change the card",
                    "%s", s->error);
    if (s->health == DEVICE_UNREADABLE)
        doctor_find(d, DOCTOR_SLOWS, what, "a device that the driver can read",
                    "nvidia-smi -q says more; the driver may need to be loaded again", "%s",
                    s->error);
}

/* ---- the GPUs -------------------------------------------------------------------------------- */

static json_t *known(unsigned n) {
    return n ? json_integer(n) : json_null();
}

static void add_gpu(struct doctor *d, json_t *gpus, const struct device_memory *m, int index) {
    struct nvml_facts f;
    struct device_sample s;
    char pci[24], text[200];
    json_t *holders = json_array();
    nvml_facts(m, index, &f);
    kernel_address(pci, f.pci);
    device_memory_describe(m, index, text, sizeof text);
    device_memory_look(m, index, 1, &s);
    for (int i = 0; i < s.n_holders; i++)
        look_holder(d, holders, index, &s.holders[i], s.total_bytes);
    json_array_append_new(
        gpus,
        json_pack("{s:i, s:s, s:s, s:s, s:s, s:s, s:{s:I, s:I, s:I}, s:{s:o, s:o, s:o, s:o}, s:o}",
                  "index", index, "name", f.name[0] ? f.name : text, "uuid", f.uuid, "pci", pci,
                  "serial", f.serial, "health", s.health == DEVICE_FINE ? "fine" : s.error,
                  "memory", "total_bytes", (json_int_t)s.total_bytes, "used_bytes",
                  (json_int_t)s.used_bytes, "free_bytes",
                  (json_int_t)(s.total_bytes - MIN(s.used_bytes, s.total_bytes)), "pcie",
                  "generation", known(f.generation), "generation_max", known(f.generation_max),
                  "width", known(f.width), "width_max", known(f.width_max), "processes", holders));
    look_health(d, index, text, &s);
    if (s.health == DEVICE_FINE) look_unbooked(d, index, &s);
}

/* Every pair, and whether the driver lets one reach the other's memory. */
static void look_peers(struct doctor *d, const struct device_memory *m, int n) {
    json_t *p2p = json_array();
    char pairs[400] = "";
    const char *why = "";
    for (int a = 0; a < n; a++)
        for (int b = a + 1; b < n; b++) {
            const char *text = nvml_peer(m, a, b);
            json_array_append_new(p2p,
                                  json_pack("{s:i, s:i, s:s}", "a", a, "b", b, "driver", text));
            if (!strcmp(text, "yes") || !strcmp(text, "unknown")) continue;
            why = text;
            snprintf(pairs + strlen(pairs), sizeof pairs - strlen(pairs), "%s%d-%d",
                     pairs[0] ? " " : "", a, b);
        }
    json_object_set_new(d->report, "p2p", p2p);
    if (pairs[0])
        doctor_find(
            d, DOCTOR_SLOWS, "peer access", "each GPU reaches the memory of every other",
            "IOMMU off or pass-through, ACS off, Resizable BAR on; else ranks add up through "
            "the host",
            "%s for GPUs %s", why, pairs);
}

/* What the kernel module lists, where its library does not answer. */
static void count_gpus(struct doctor *d, json_t *gpus) {
    struct gpus found;
    gpus_find(&found, d->root, NULL);
    for (int i = 0; i < MIN(found.n, DEVICE_MAX); i++) {
        char text[2048], name[96] = "", *model;
        if (doctor_read(d, text, sizeof text, "/proc/driver/nvidia/gpus/%s/information",
                        found.gpu[i].pci) &&
            (model = strstr(text, "Model:"))) {
            model += 6 + strspn(model + 6, " \t");
            snprintf(name, sizeof name, "%.*s", (int)strcspn(model, "\n"), model);
        }
        json_array_append_new(
            gpus, json_pack("{s:i, s:s, s:s}", "index", i, "name", name, "pci", found.gpu[i].pci));
    }
    if (found.n > 0)
        doctor_find(d, DOCTOR_SLOWS, "NVML",
                    "the driver's library, which tells when memory returns",
                    "install libnvidia-ml.so.1 of the driver's version; in a container "
                    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
                    "%d GPUs and no such library", found.n);
}

static void look_driver(struct doctor *d, const struct device_memory *m) {
    char version[96] = "", text[512];
    nvml_driver(m, version, sizeof version);
    if (!version[0] && doctor_read(d, text, sizeof text, "/proc/driver/nvidia/version"))
        snprintf(version, sizeof version, "%.*s", (int)MIN(95, strcspn(text, "\n")), text);
    json_object_set_new(d->report, "driver", version[0] ? json_string(version) : json_null());
}

void doctor_look_gpus(struct doctor *d, const struct device_memory *m) {
    json_t *gpus = json_array();
    int n = device_memory_count(m);
    json_object_set_new(d->report, "gpus", gpus);
    for (int i = 0; i < n; i++) add_gpu(d, gpus, m, i);
    if (n == 0) count_gpus(d, gpus);
    look_driver(d, m);
    look_peers(d, m, n);
}

/* ---- NCCL ------------------------------------------------------------------------------------ */

/* A variable that changes what NCCL or CUDA do, and not where they are installed. */
static bool concerns(const char *name) {
    static const char *const prefixes[] = {"NCCL_",       "OCTAVO_NCCL_", "CUDA_VISIBLE",
                                           "CUDA_DEVICE", "CUDA_MODULE",  "CUDA_LAUNCH",
                                           "CUDA_MPS"};
    for (size_t i = 0; i < ARRAY_LEN(prefixes); i++)
        if (!strncmp(name, prefixes[i], strlen(prefixes[i]))) return true;
    return false;
}

/* Loading it starts nothing; the version is coded as the library's own header says. */
static json_t *nccl_state(const char *name) {
    void *lib = dlopen(name, RTLD_NOW | RTLD_LOCAL),
         *at = lib ? dlsym(lib, "ncclGetVersion") : NULL;
    int (*get)(int *) = NULL, v = 0;
    char version[32] = "";
    memcpy(&get, &at, sizeof get);
    const char *error = lib ? get ? "" : "no ncclGetVersion in it" : dlerror();
    if (get && get(&v) == 0)
        snprintf(version, sizeof version, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    json_t *state = json_pack("{s:s, s:o, s:s}", "library", name, "version",
                              version[0] ? json_string(version) : json_null(), "error", error);
    if (lib) dlclose(lib);
    return state;
}

void doctor_look_nccl(struct doctor *d, char **env) {
    const char *asked = getenv("OCTAVO_NCCL_LIBRARY");
    json_t *set = json_object(), *nccl = nccl_state(asked ? asked : "libnccl.so.2");
    size_t n_gpus = json_array_size(json_object_get(d->report, "gpus"));
    for (char **e = env; *e; e++) {
        char name[64];
        const char *eq = strchr(*e, '=');
        if (!eq || !concerns(*e)) continue;
        snprintf(name, sizeof name, "%.*s", (int)(eq - *e), *e);
        json_object_set_new(set, name, json_string(eq + 1));
    }
    json_object_set_new(nccl, "environment", set);
    json_object_set_new(d->report, "nccl", nccl);
    const char *off = json_string_value(json_object_get(set, "NCCL_P2P_DISABLE"));
    if (n_gpus > 1 && off && strcmp(off, "0"))
        doctor_find(d, DOCTOR_NOTE, "NCCL_P2P_DISABLE", "unset, where peers reach each other",
                    "unset it once the all-reduces below pass without it",
                    "%s: NCCL goes through "
                    "the host",
                    off);
    if (n_gpus > 1 && json_is_null(json_object_get(nccl, "version")))
        doctor_find(d, DOCTOR_SLOWS, "NCCL", "libnccl.so.2, for large sums",
                    "install libnccl2, or name the library in OCTAVO_NCCL_LIBRARY", "%s",
                    json_string_value(json_object_get(nccl, "error")));
}
