/* coordinator/cmd.h: the sub-commands of octavo. Each gets its own name as argv[0] and returns the
 * process's exit code.
 *
 * Called by: main.c.
 */
#ifndef OCTAVO_COORDINATOR_CMD_H
#define OCTAVO_COORDINATOR_CMD_H

int cmd_serve(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_probe(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_guard(int argc, char **argv);
int cmd_restart(int argc, char **argv);

#endif
