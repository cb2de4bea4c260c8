/* coordinator/inspect_check.h: `octavo inspect --check`: reads every tensor and looks at its scales.
 *
 * Called by: cmd_inspect.c.  Tested by: tests/serve/test_inspect.py
 */
#ifndef OCTAVO_COORDINATOR_INSPECT_CHECK_H
#define OCTAVO_COORDINATOR_INSPECT_CHECK_H

#include "proto/gguf.h"

/* Prints a line for each tensor with a scale that is no number, and how it went; *bad_blocks: how
 * many there were. ERR_SYS, ERR_FORMAT or ERR_NOMEM with a sentence when a file cannot be read. */
int inspect_check(const struct gguf *g, uint64_t *bad_blocks, struct err_text *err);

#endif
