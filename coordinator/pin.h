/* coordinator/pin.h: which cores each worker may run on.
 *
 * Owns: nothing; pure.  Called by: launch.c, gpus.c.  Fails how: it does not.
 * Limits: CPU_SETSIZE cores.  Tested by: tests/unit/test_fleet.c
 */
#ifndef OCTAVO_COORDINATOR_PIN_H
#define OCTAVO_COORDINATOR_PIN_H

#include <sched.h>

#include "proto/base.h"

#define PIN_TEXT_BYTES 4096

/* The cores of `rank` of `world`, all taken from `allowed`. */
void pin_plan(cpu_set_t *out, const cpu_set_t *allowed, int rank, int world);

/* "0-3,8", as --cpus takes it. */
void pin_text(char out[PIN_TEXT_BYTES], const cpu_set_t *set);

#endif
