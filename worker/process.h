/* worker/process.h: what the worker is to the operating system: child of its coordinator, on its
 * cores, near its memory.
 *
 * Owns: nothing.  Called by: main.c, self_test.c.
 * Fails how: process_pin returns ERR_SETUP with a sentence.
 */
#ifndef OCTAVO_WORKER_PROCESS_H
#define OCTAVO_WORKER_PROCESS_H

#include "proto/base.h"

/* Asks to be killed when the parent thread that made this process ends. */
void process_die_with_parent(void);

/* Field 22 of /proc/PID/stat, clock ticks since boot; 0 when there is no such process. */
uint64_t process_start_time(int64_t pid);

/* The parent is still the process that was told: same pid, same start time. */
bool process_has_parent(int64_t pid, uint64_t start_time);

/* Runs on these cores only ("0,2-3") and prefers the memory of the first one's node. */
int process_pin(const char *cpus, struct err_text *err);

#endif
