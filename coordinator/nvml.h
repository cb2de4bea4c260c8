/* coordinator/nvml.h: device memory as the driver accounts for it, through libnvidia-ml.so.1.
 *
 * Owns: the library's handle, an event set.  Called by: device_memory.c.
 * Fails how: ERR_NOT_FOUND with a sentence when there is no library or it has no devices here;
 * later in the samples: a lost GPU is DEVICE_LOST, whatever else fails is DEVICE_UNREADABLE.
 * Limits: DEVICE_MAX.  Tested by: tests/unit/test_nvml.c (with tests/unit/fake_nvml.c), tests/gpu
 */
#ifndef OCTAVO_COORDINATOR_NVML_H
#define OCTAVO_COORDINATOR_NVML_H

#include "coordinator/device_memory.h"

int device_memory_open_nvml(struct device_memory *m, struct err_text *err);

#endif
