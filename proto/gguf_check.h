/* proto/gguf_check.h: are the scales of quantised blocks, and the values of plain tensors, numbers?
 *
 * Owns: nothing; pure.  Called by: coordinator/inspect_check.c.  Fails how: cannot.
 * Tested by: tests/unit/test_gguf_check.c
 */
#ifndef OCTAVO_PROTO_GGUF_CHECK_H
#define OCTAVO_PROTO_GGUF_CHECK_H

#include "proto/gguf.h"

/* How many of the n blocks of a storable type at p decode to infinity or NaN by a scale (or value)
 * of their own; *first: the first of them, if any. Integers are always numbers. */
uint64_t gguf_check_blocks(uint32_t type, const uint8_t *p, uint64_t n, uint64_t *first);

#endif
