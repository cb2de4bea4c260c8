/* coordinator/device_thread.h: a source of device memory whose driver may hang, asked from a thread
 * of its own.
 *
 * Owns: the thread, the source behind it.  Called by: fleet_gate.c, cmd_guard.c.
 * Fails how: ERR_TIMEOUT with a sentence when opening takes too long, else as device_memory_open; a
 * look that is not answered is DEVICE_SILENT.
 * Limits: DEVICE_MAX; see the file for how long the caller may be held up.
 * Tested by: tests/unit/test_nvml.c, tests/faults/test_driver.py
 */
#ifndef OCTAVO_COORDINATOR_DEVICE_THREAD_H
#define OCTAVO_COORDINATOR_DEVICE_THREAD_H

#include "coordinator/device_memory.h"

#define DEVICE_OPEN_MS 20000 /* the driver's own start */

/* As device_memory_open; a source without a driver needs no thread and gets none. Where there is
 * no driver *m is the source none all the same. bound_ms: how long opening may take. */
int device_thread_open(struct device_memory *m, const char *source, int bound_ms,
                       struct err_text *err);

#endif
