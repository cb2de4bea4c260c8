/* tests/unit/fake_nccl.h: knobs and counters of the stand-in for libnccl.so.2, which a test finds in
 * the library as fake_nccl_knobs.
 */
#ifndef OCTAVO_TESTS_UNIT_FAKE_NCCL_H
#define OCTAVO_TESTS_UNIT_FAKE_NCCL_H

#include <dlfcn.h>
#include <stdlib.h>

#include "worker/coll_nccl.h"

struct fake_nccl_knobs {
    int refuse_id;
    int hang_init; /* communicators never come about */
    int fail_sum;  /* the next sum reports a remote error */
    int graphs;    /* captured graphs that still exist */
    int aborts, inits, waits_for_graphs;
};

/* Loads it as the worker would, and once more to reach the knobs; NULL: said why not. */
static inline void *fake_nccl_load(struct nccl **lib, struct fake_nccl_knobs **knobs) {
    char path[512];
    struct err_text err = {0};
    const char *root = getenv("OCTAVO_BUILD_ROOT");
    snprintf(path, sizeof path, "%s/fake_nccl.so", root ? root : ".");
    setenv("OCTAVO_NCCL_LIBRARY", path, 1);
    void *fake = dlopen(path, RTLD_NOW);
    if (fake && nccl_load(lib, &err) == OK) {
        *knobs = (struct fake_nccl_knobs *)dlsym(fake, "fake_nccl_knobs");
        return fake;
    }
    fprintf(stderr, "%s: expected the stand-in library, found: %s\n", path,
            fake ? err.text : dlerror());
    return NULL;
}

#endif
