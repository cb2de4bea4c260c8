/* coordinator/inherited.h: what this process was given by whoever started it, made fit for a server.
 *
 * Owns: nothing; it changes the process.  Called by: cmd_serve.c, before anything is opened.
 * Fails how: ERR_SETUP with a sentence.  Tested by: tests/faults/test_inherited.py
 */
#ifndef OCTAVO_COORDINATOR_INHERITED_H
#define OCTAVO_COORDINATOR_INHERITED_H

#include "proto/base.h"

/* Raises the soft limit of open files to what LIMIT_CONNECTIONS need, as far as the hard one lets
 * it, and lifts a mask from the signals that stop a server. ERR_SETUP when `ranks` workers could
 * not be spoken to with so few open files. */
int inherited_make_fit(int ranks, struct err_text *err);

#endif
