/* coordinator/launch.h: how a worker is called: its command line and its environment.
 *
 * Owns: the cookie, the endpoint's name, copies of the environment.  Called by: fleet.c.
 * Fails how: ERR_NOMEM, ERR_SYS.  Tested by: tests/unit/test_fleet.c
 */
#ifndef OCTAVO_COORDINATOR_LAUNCH_H
#define OCTAVO_COORDINATOR_LAUNCH_H

#include <sched.h>

#include "coordinator/child.h"
#include "coordinator/engine.h"
#include "proto/base.h"

#define LAUNCH_ARGS_MAX 48

struct launch {
    char endpoint[80];
    char cookie[65];
    struct child_parent self;
    cpu_set_t allowed;
    int share_fd;        /* the page that ranks share while they load; -1: none */
    char **env;          /* ours and OCTAVO_COOKIE; NULL-terminated */
    char *cookie_entry;  /* the only entry of env that is ours to free */
    /* the command line of one worker, rebuilt by launch_argv */
    char *argv[LAUNCH_ARGS_MAX];
    char *words;         /* what argv points into */
};

int launch_init(struct launch *l);
void launch_deinit(struct launch *l);

/* Fills l->argv for one rank of one incarnation. */
int launch_argv(struct launch *l, const struct engine_options *o, int rank, uint32_t incarnation);

#endif
