/* coordinator/nvml.h: device memory as the driver accounts for it, through libnvidia-ml.so.1.
 *
 * Owns: the library's handle, an event set.  Called by: device_memory.c, doctor_gpu.c.
 * Fails how: ERR_NOT_FOUND with a sentence when there is no library or it has no devices here;
 * later in the samples: a lost GPU is DEVICE_LOST, whatever else fails is DEVICE_UNREADABLE.
 * Limits: DEVICE_MAX.  Tested by: tests/unit/test_nvml.c (with tests/unit/fake_nvml.c), tests/gpu
 */
#ifndef OCTAVO_COORDINATOR_NVML_H
#define OCTAVO_COORDINATOR_NVML_H

#include "coordinator/device_memory.h"

int device_memory_open_nvml(struct device_memory *m, struct err_text *err);

/* For an inventory: empty or 0 is what the driver does not tell, everything for another source. */
struct nvml_facts {
    char name[96], uuid[96], pci[32], serial[96];
    unsigned generation, generation_max, width, width_max; /* of its PCIe link */
};
void nvml_facts(const struct device_memory *m, int device, struct nvml_facts *out);
void nvml_driver(const struct device_memory *m, char *version, unsigned n);

/* Whether device a may reach the memory of b over the bus: "yes", "unknown", or what forbids it. */
const char *nvml_peer(const struct device_memory *m, int a, int b);

#endif
