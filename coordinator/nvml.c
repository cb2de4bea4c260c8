/* coordinator/nvml.c: device memory as the driver accounts for it. See nvml.h.
 *
 * Owns: the library's handle, an event set.  Called by: device_memory.c.  Fails how: see nvml.h.
 * Limits: DEVICE_MAX.  Tested by: tests/unit/test_nvml.c (with tests/unit/fake_nvml.c)
 *
 * The library comes with the driver and its header with the toolkit, which a machine that serves has
 * not, so the few declarations needed are written out here; their layout is fixed by the version in
 * the symbol's name. The library is opened while running: the same program serves without a GPU.
 *
 * OCTAVO_NVML names another library, for tests. The memory counted as used is the device's and
 * includes what the driver keeps for itself: only differences of it mean something.
 */
#include "coordinator/nvml.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libnvidia-ml.so.1"

/* ---- the declarations ------------------------------------------------------------------------ */

enum {
    NVML_OK = 0,
    NVML_NOT_SUPPORTED = 3,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_GPU_IS_LOST = 15,
    NVML_RESET_REQUIRED = 16,
};

#define NVML_EVENT_XID      0x8ull
#define NVML_BYTES_UNKNOWN  UINT64_MAX
#define XID_OFF_THE_BUS     79

typedef void *nvml_device;

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml_process { /* of _v2 and _v3 */
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

struct nvml_pci {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

struct nvml_event {
    nvml_device device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

typedef int nvml_processes(nvml_device, unsigned *count, struct nvml_process *out);
typedef int nvml_text(nvml_device, char *out, unsigned n);
typedef int nvml_number(nvml_device, unsigned *out);

struct nvml_calls {
    int (*init)(void);
    int (*shutdown)(void);
    const char *(*error_text)(int);
    int (*count)(unsigned *);
    int (*by_index)(unsigned, nvml_device *);
    int (*memory)(nvml_device, struct nvml_memory *);
    int (*pci)(nvml_device, struct nvml_pci *);
    nvml_text *name, *uuid, *serial;
    nvml_processes *computing, *drawing;
    int (*set_new)(void **);
    int (*set_add)(nvml_device, unsigned long long types, void *set);
    int (*set_wait)(void *set, struct nvml_event *, unsigned timeout_ms);
    int (*set_free)(void *);
    int (*driver)(char *out, unsigned n);
    nvml_number *generation, *generation_max, *width, *width_max;
    int (*peer)(nvml_device, nvml_device, int what, int *status);
};

struct nvml_symbol {
    size_t at; /* in struct nvml_calls */
    const char *names[2];
    bool needed;
};

#define SYMBOL(field, need, ...)                                                                   \
    {.at = offsetof(struct nvml_calls, field), .names = {__VA_ARGS__}, .needed = need}

static const struct nvml_symbol symbols[] = {
    SYMBOL(init, true, "nvmlInit_v2"),
    SYMBOL(shutdown, true, "nvmlShutdown"),
    SYMBOL(error_text, true, "nvmlErrorString"),
    SYMBOL(count, true, "nvmlDeviceGetCount_v2"),
    SYMBOL(by_index, true, "nvmlDeviceGetHandleByIndex_v2"),
    SYMBOL(memory, true, "nvmlDeviceGetMemoryInfo"),
    SYMBOL(pci, false, "nvmlDeviceGetPciInfo_v3"),
    SYMBOL(name, false, "nvmlDeviceGetName"),
    SYMBOL(uuid, false, "nvmlDeviceGetUUID"),
    SYMBOL(serial, false, "nvmlDeviceGetSerial"),
    SYMBOL(computing, true, "nvmlDeviceGetComputeRunningProcesses_v3",
           "nvmlDeviceGetComputeRunningProcesses_v2"),
    SYMBOL(drawing, false, "nvmlDeviceGetGraphicsRunningProcesses_v3",
           "nvmlDeviceGetGraphicsRunningProcesses_v2"),
    SYMBOL(set_new, false, "nvmlEventSetCreate"),
    SYMBOL(set_add, false, "nvmlDeviceRegisterEvents"),
    SYMBOL(set_wait, false, "nvmlEventSetWait_v2"),
    SYMBOL(set_free, false, "nvmlEventSetFree"),
    SYMBOL(driver, false, "nvmlSystemGetDriverVersion"),
    SYMBOL(generation, false, "nvmlDeviceGetCurrPcieLinkGeneration"),
    SYMBOL(generation_max, false, "nvmlDeviceGetMaxPcieLinkGeneration"),
    SYMBOL(width, false, "nvmlDeviceGetCurrPcieLinkWidth"),
    SYMBOL(width_max, false, "nvmlDeviceGetMaxPcieLinkWidth"),
    SYMBOL(peer, false, "nvmlDeviceGetP2PStatus"),
};

/* ---- life ------------------------------------------------------------------------------------ */

struct device {
    nvml_device handle;
    char text[200];
    uint64_t xid; /* the last one told, 0: none */
};

struct nvml {
    void *library;
    struct nvml_calls c;
    bool running; /* init went well */
    void *events; /* NULL: this driver tells no events */
    int n;
    struct device d[DEVICE_MAX];
};

static void nvml_close(void *ctx) {
    struct nvml *v = ctx;
    if (v->events) v->c.set_free(v->events);
    if (v->running) v->c.shutdown();
    if (v->library) dlclose(v->library);
    free(v);
}

static int find_symbols(struct nvml *v, const char *path, struct err_text *err) {
    for (size_t i = 0; i < ARRAY_LEN(symbols); i++) {
        const struct nvml_symbol *s = &symbols[i];
        void *at = dlsym(v->library, s->names[0]);
        if (!at && s->names[1]) at = dlsym(v->library, s->names[1]);
        if (!at && s->needed)
            return err_set(err, ERR_NOT_FOUND, "%.200s: expected %s, found nothing of that name",
                           path, s->names[0]);
        memcpy((char *)&v->c + s->at, &at, sizeof at);
    }
    return OK;
}

static void read_text(nvml_text *call, nvml_device handle, char out[96]) {
    out[0] = 0;
    if (!call || call(handle, out, 96) != NVML_OK) out[0] = 0;
    out[95] = 0;
}

static void read_names(struct nvml *v, nvml_device handle, struct nvml_facts *f) {
    struct nvml_pci pci = {0};
    read_text(v->c.name, handle, f->name);
    read_text(v->c.uuid, handle, f->uuid);
    read_text(v->c.serial, handle, f->serial);
    if (!v->c.pci || v->c.pci(handle, &pci) != NVML_OK) pci.bus_id[0] = 0;
    snprintf(f->pci, sizeof f->pci, "%.31s", pci.bus_id);
}

static void open_device(struct nvml *v, int index) {
    struct device *d = &v->d[index];
    struct nvml_facts f;
    if (v->c.by_index((unsigned)index, &d->handle) != NVML_OK) d->handle = NULL;
    if (!d->handle) {
        snprintf(d->text, sizeof d->text, "GPU %d", index);
        return;
    }
    read_names(v, d->handle, &f);
    snprintf(d->text, sizeof d->text, "%.60s %.48s %.31s%s%.40s", f.name, f.uuid, f.pci,
             f.serial[0] ? " serial " : "", f.serial);
    if (v->events) v->c.set_add(d->handle, NVML_EVENT_XID, v->events); /* a GPU without: no Xids */
}

static int start(struct nvml *v, const char *path, struct err_text *err) {
    unsigned n = 0;
    v->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!v->library) return err_set(err, ERR_NOT_FOUND, "%.400s", dlerror());
    TRY(find_symbols(v, path, err));
    int rc = v->c.init();
    v->running = rc == NVML_OK;
    if (rc == NVML_OK) rc = v->c.count(&n);
    if (rc != NVML_OK || n == 0)
        return err_set(err, ERR_NOT_FOUND, "%.200s: expected devices, found: %.200s", path,
                       rc == NVML_OK ? "none" : v->c.error_text(rc));
    bool events = v->c.set_new && v->c.set_add && v->c.set_wait && v->c.set_free;
    if (!events || v->c.set_new(&v->events) != NVML_OK) v->events = NULL;
    v->n = MIN((int)n, DEVICE_MAX);
    for (int i = 0; i < v->n; i++) open_device(v, i);
    return OK;
}

/* ---- looking --------------------------------------------------------------------------------- */

static int nvml_count(void *ctx) {
    return ((struct nvml *)ctx)->n;
}

static void nvml_describe(void *ctx, int device, char *out, size_t n) {
    const struct nvml *v = ctx;
    snprintf(out, n, "%s", v->d[device].text);
}

static void take_events(struct nvml *v) {
    struct nvml_event e;
    if (!v->events) return;
    for (int k = 0; k < DEVICE_MAX && v->c.set_wait(v->events, &e, 0) == NVML_OK; k++)
        for (int i = 0; i < v->n; i++)
            if (v->d[i].handle == e.device && e.type == NVML_EVENT_XID) v->d[i].xid = e.data;
}

/* Fails the sample if rc is an error that tells of the device; true: go on. */
static bool judge(struct nvml *v, int rc, const struct device *d, struct device_sample *out) {
    char xid[40] = "";
    if (rc == NVML_OK) return true;
    bool lost = rc == NVML_GPU_IS_LOST || rc == NVML_RESET_REQUIRED;
    if (d->xid) snprintf(xid, sizeof xid, ", last Xid %" PRIu64, d->xid);
    device_sample_fail(out, lost ? DEVICE_LOST : DEVICE_UNREADABLE, "%.100s%s",
                       v->c.error_text(rc), xid);
    return false;
}

static int list_holders(nvml_processes *call, nvml_device handle, struct device_sample *out) {
    struct nvml_process list[2 * DEVICE_HOLDERS_MAX];
    unsigned n = ARRAY_LEN(list);
    int rc = call ? call(handle, &n, list) : NVML_NOT_SUPPORTED;
    if (rc == NVML_INSUFFICIENT_SIZE) out->n_unlisted += (int)MIN(n, 1u << 20);
    if (rc != NVML_OK) return rc;
    for (unsigned i = 0; i < n && i < ARRAY_LEN(list); i++)
        device_sample_add(out, list[i].pid, list[i].bytes == NVML_BYTES_UNKNOWN
                                                ? DEVICE_BYTES_UNKNOWN : list[i].bytes);
    return NVML_OK;
}

static void nvml_look(void *ctx, int device, uint64_t now_us, struct device_sample *out) {
    struct nvml *v = ctx;
    struct device *d = &v->d[device];
    struct nvml_memory memory = {0};
    UNUSED(now_us);
    take_events(v);
    if (!d->handle) open_device(v, device);
    if (!d->handle) {
        device_sample_fail(out, DEVICE_LOST, "the driver no longer knows it");
        return;
    }
    if (d->xid == XID_OFF_THE_BUS) {
        device_sample_fail(out, DEVICE_LOST, "Xid %d, it fell off the bus", XID_OFF_THE_BUS);
        return;
    }
    if (!judge(v, v->c.memory(d->handle, &memory), d, out)) return;
    out->total_bytes = memory.total;
    out->used_bytes = memory.used;
    int rc = list_holders(v->c.computing, d->handle, out);
    if (rc != NVML_NOT_SUPPORTED && rc != NVML_INSUFFICIENT_SIZE && !judge(v, rc, d, out)) return;
    rc = list_holders(v->c.drawing, d->handle, out);
    if (rc == NVML_GPU_IS_LOST) judge(v, rc, d, out);
}

static const struct device_memory_ops nvml_ops = {"nvml", nvml_count, nvml_look, nvml_describe,
                                                  nvml_close};

int device_memory_open_nvml(struct device_memory *m, struct err_text *err) {
    const char *path = getenv("OCTAVO_NVML");
    struct nvml *v = calloc(1, sizeof *v);
    if (!v) return err_set(err, ERR_NOMEM, "out of memory");
    int rc = start(v, path && *path ? path : LIBRARY, err);
    if (rc < 0) {
        nvml_close(v);
        return rc;
    }
    *m = (struct device_memory){&nvml_ops, v};
    return OK;
}

/* ---- for an inventory ------------------------------------------------------------------------ */

static struct nvml *nvml_of(const struct device_memory *m) {
    return m->ops == &nvml_ops ? m->ctx : NULL;
}

static unsigned read_number(nvml_number *call, nvml_device handle) {
    unsigned n = 0;
    return call && call(handle, &n) == NVML_OK ? n : 0;
}

void nvml_facts(const struct device_memory *m, int device, struct nvml_facts *out) {
    struct nvml *v = nvml_of(m);
    nvml_device handle = v ? v->d[device].handle : NULL;
    *out = (struct nvml_facts){0};
    if (!handle) return;
    read_names(v, handle, out);
    out->generation = read_number(v->c.generation, handle);
    out->generation_max = read_number(v->c.generation_max, handle);
    out->width = read_number(v->c.width, handle);
    out->width_max = read_number(v->c.width_max, handle);
}

void nvml_driver(const struct device_memory *m, char *version, unsigned n) {
    struct nvml *v = nvml_of(m);
    version[0] = 0;
    if (!v || !v->c.driver || v->c.driver(version, n) != NVML_OK) version[0] = 0;
}

/* Both ways of reaching: the worse answer counts. */
const char *nvml_peer(const struct device_memory *m, int a, int b) {
    static const char *const text[] = {"yes", "the chipset forbids it", "the GPU cannot",
                                       "the I/O hub forbids it", "switched off in the driver",
                                       "not supported", "unknown"};
    enum { READ, WRITE };
    struct nvml *v = nvml_of(m);
    int worst = 0, status = (int)ARRAY_LEN(text) - 1;
    if (!v || !v->c.peer || !v->d[a].handle || !v->d[b].handle) return "unknown";
    for (int what = READ; what <= WRITE; what++) {
        if (v->c.peer(v->d[a].handle, v->d[b].handle, what, &status) != NVML_OK) return "unknown";
        worst = MAX(worst, status);
    }
    return text[MIN((unsigned)worst, ARRAY_LEN(text) - 1)];
}
