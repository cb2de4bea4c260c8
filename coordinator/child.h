/* coordinator/child.h: one worker process: started, watched, killed.
 *
 * Owns: the process handle and what is known of the process from the outside.
 * Called by: fleet.c, on the loop thread only (the parent-death signal is tied to the thread).
 * Fails how: child_spawn gives ERR_SETUP with a sentence.  Tested by: tests/unit/test_fleet.c
 */
#ifndef OCTAVO_COORDINATOR_CHILD_H
#define OCTAVO_COORDINATOR_CHILD_H

#include <uv.h>

#include "proto/base.h"

struct child {
    uv_process_t process;
    bool open;             /* from child_spawn until the handle is closed after the exit */
    bool exited;           /* noted by the callback */
    bool killed;           /* by us */
    int64_t pid;
    uint64_t start_time;   /* field 22 of /proc/PID/stat; tells a pid from its reuse */
    int64_t exit_status;
    int signal;
};

/* Who started it, said on its command line so that it can check. */
struct child_parent {
    int64_t pid;
    uint64_t start_time;
};

/* argv and env end with NULL. c must not be open. stderr is inherited; stdout goes there too. */
int child_spawn(struct child *c, uv_loop_t *loop, char **argv, char **env, struct err_text *err);
void child_signal(struct child *c, int signum);
void child_kill(struct child *c); /* SIGKILL; nothing if it is gone */

/* "signal 9" or "exit code 1" */
const char *child_ending(const struct child *c, char *buf, size_t n);

bool child_is_stopped(const struct child *c); /* by a signal, or a debugger */
uint64_t child_start_time(int64_t pid); /* 0: no such process */

#endif
