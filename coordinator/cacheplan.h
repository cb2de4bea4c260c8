/* coordinator/cacheplan.h: how many cache pages every rank is told to hold.
 *
 * Owns: nothing; pure but for cache_host_available and what cache_plan logs.  Called by: fleet_join.c.
 * Fails how: 0 or ERR_SETUP when not even one page fits, or not as many as were asked for.  Tested by: tests/unit/test_fleet.c
 */
#ifndef OCTAVO_COORDINATOR_CACHEPLAN_H
#define OCTAVO_COORDINATOR_CACHEPLAN_H

#include "proto/base.h"

struct cache_room {
    bool host_memory;        /* CPU backend: all ranks share the memory of the host */
    uint64_t host_available_bytes;
    uint64_t free_bytes;     /* the least any rank's device has free */
    int ranks_per_device;    /* the most that share one device */
    int world;
    uint64_t page_bytes;     /* the most any rank needs for a page */
    int64_t context;         /* tokens of the longest sequence */
    int max_seqs;
    int64_t cache_tokens;    /* asked for; 0: as many as make sense */
};

int64_t cache_plan_pages(const struct cache_room *r);

/* The same, printed with what it is made of. ERR_SETUP with both numbers when what was asked for is
 * more than there is, or when there is room for no page. */
int cache_plan(const struct cache_room *r, int64_t *pages, struct err_text *err);

uint64_t cache_host_available(void); /* MemAvailable in bytes, 0 if unknown */

#endif
