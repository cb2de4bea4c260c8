/* tests/unit/fake_nccl.h: knobs and counters of the stand-in for libnccl.so.2, which a test finds in
 * the library as fake_nccl_knobs.
 */
#ifndef OCTAVO_TESTS_UNIT_FAKE_NCCL_H
#define OCTAVO_TESTS_UNIT_FAKE_NCCL_H

struct fake_nccl_knobs {
    int refuse_id;
    int hang_init; /* communicators never come about */
    int fail_sum;  /* the next sum reports a remote error */
    int graphs;    /* captured graphs that still exist */
    int aborts, inits, waits_for_graphs;
};

#endif
