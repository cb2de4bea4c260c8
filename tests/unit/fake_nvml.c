/* tests/unit/fake_nvml.c: a stand-in for libnvidia-ml.so.1: two devices whose state the test sets.
 *
 * The layouts are written out a second time, from the driver's interface and not from nvml.c, so
 * that a slip there is met here.
 *
 * Called by: nvml.c through dlopen, tests/unit/test_nvml.c.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/fake_nvml.h"

struct fake_nvml fake_nvml_state;

typedef struct fake_nvml_device *handle;

static void hang(int least) {
    const char *file = getenv("FAKE_NVML_HANG");
    while (fake_nvml_state.hang >= least || (least == 1 && file && access(file, F_OK) == 0))
        usleep(1000);
}

int nvmlInit_v2(void) {
    const char *devices = getenv("FAKE_NVML_DEVICES");
    hang(2);
    if (devices) fake_nvml_state.n = (unsigned)atoi(devices);
    fake_nvml_state.n_open++;
    return fake_nvml_state.init_result;
}

int nvmlShutdown(void) {
    fake_nvml_state.n_open--;
    fake_nvml_state.n_shut++;
    return 0;
}

const char *nvmlErrorString(int rc) {
    switch (rc) {
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 9: return "Driver Not Loaded";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *n) {
    *n = fake_nvml_state.n;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned i, handle *out) {
    *out = &fake_nvml_state.device[i];
    return fake_nvml_state.device[i].handle_result;
}

int nvmlDeviceGetMemoryInfo(handle d, unsigned long long out[3]) {
    hang(1);
    out[0] = d->total;
    out[1] = d->total - d->used;
    out[2] = d->used;
    return d->result;
}

int nvmlDeviceGetName(handle d, char *out, unsigned n) {
    (void)d;
    strncpy(out, "Fake GPU", n);
    return 0;
}

int nvmlDeviceGetUUID(handle d, char *out, unsigned n) {
    strncpy(out, d->uuid, n);
    return 0;
}

int nvmlDeviceGetSerial(handle d, char *out, unsigned n) {
    (void)d, (void)out, (void)n;
    return 3; /* not supported */
}

struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(handle d, struct pci *out) {
    strcpy(out->bus_id, d->bus_id);
    return 0;
}

struct process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

int nvmlDeviceGetComputeRunningProcesses_v3(handle d, unsigned *n, struct process *out) {
    if (d->list_result) return d->list_result;
    if (*n < d->n) {
        *n = d->n;
        return 7; /* insufficient size */
    }
    *n = d->n;
    for (unsigned i = 0; i < d->n; i++) out[i] = (struct process){d->pid[i], d->bytes[i], ~0u, ~0u};
    return 0;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(handle d, unsigned *n, struct process *out) {
    *n = d->drawing ? 1 : 0;
    if (d->drawing) out[0] = (struct process){d->drawing, 4096, ~0u, ~0u};
    return 0;
}

struct event {
    handle device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

int nvmlEventSetCreate(void **out) {
    *out = &fake_nvml_state;
    return 0;
}

int nvmlDeviceRegisterEvents(handle d, unsigned long long types, void *set) {
    d->watched = types == 8 && set == &fake_nvml_state;
    return 0;
}

int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout_ms) {
    (void)set;
    for (unsigned i = 0; i < fake_nvml_state.n && timeout_ms == 0; i++) {
        struct fake_nvml_device *d = &fake_nvml_state.device[i];
        if (!d->xid || !d->watched) continue;
        *out = (struct event){d, 8, d->xid, 0, 0};
        d->xid = 0;
        return 0;
    }
    return 10; /* timeout */
}

int nvmlEventSetFree(void *set) {
    (void)set;
    return 0;
}

int nvmlSystemGetDriverVersion(char *out, unsigned n) {
    strncpy(out, "580.00.01", n);
    return 0;
}

static int link_number(handle d, int which, unsigned *out) {
    *out = d->link[which];
    return d->link[which] ? 0 : 3;
}

int nvmlDeviceGetCurrPcieLinkGeneration(handle d, unsigned *out) {
    return link_number(d, 0, out);
}

int nvmlDeviceGetMaxPcieLinkGeneration(handle d, unsigned *out) {
    return link_number(d, 1, out);
}

int nvmlDeviceGetCurrPcieLinkWidth(handle d, unsigned *out) {
    return link_number(d, 2, out);
}

int nvmlDeviceGetMaxPcieLinkWidth(handle d, unsigned *out) {
    return link_number(d, 3, out);
}

int nvmlDeviceGetP2PStatus(handle a, handle b, int what, int *status) {
    if (a == b || what > 4) return 2;
    *status = what == 0 ? fake_nvml_state.peer : 0;
    return 0;
}
