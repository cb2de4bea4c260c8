/* worker/switches.h: debug switches: words that say how the backend computes something.
 *
 * For comparing and bisecting, not for operators: they may cost speed or memory and may go away.
 * The rows are the backend's (kernels.h); `octavo-worker --switches` prints them, `--switch
 * NAME=VALUE,…` or OCTAVO_SWITCH sets them, which workers started by a coordinator inherit.
 *
 * Owns: nothing.  Called by: options.c, main.c, bench.c, tests; before the device is opened.
 * Fails how: ERR_SETUP with a sentence.  Limits: none.  Tested by: tests/unit/test_switches.c
 */
#ifndef OCTAVO_WORKER_SWITCHES_H
#define OCTAVO_WORKER_SWITCHES_H

#include "kernels/kernels.h"
#include "proto/base.h"

/* "name=value,name=value"; NULL or "": nothing to set. Refused whole or obeyed whole. */
int switches_set(const struct kernels *k, const char *list, struct err_text *err);

/* A line per switch: name, value, choices, what it does. */
void switches_print(FILE *f, const struct kernels *k);

#endif
