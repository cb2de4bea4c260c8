/* worker/self_test.h: `octavo-worker --self-test-collective`: one rank that adds up and ends.
 *
 * Called by: main.c, for octavo doctor.  Tested by: tests/faults/test_doctor.py
 */
#ifndef OCTAVO_WORKER_SELF_TEST_H
#define OCTAVO_WORKER_SELF_TEST_H

/* argv[0] is the option's name. Returns the process's exit code: 0 all sums were right, 1 one was
 * wrong or could not be made, 2 the set-up refuses. */
int self_test_main(int argc, char **argv);

#endif
