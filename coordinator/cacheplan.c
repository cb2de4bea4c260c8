/* coordinator/cacheplan.c: how many cache pages every rank is told to hold. See cacheplan.h.
 *
 * Owns: nothing.  Called by: fleet_join.c.  Fails how: see cacheplan.h.  Tested by: tests/unit/test_fleet.c
 *
 * More pages than all sequences at full length can use would be waste, so that is the upper end.
 * Below it, on a device of its own: nine tenths of what is free after loading. On the host's memory
 * a quarter of what is available, over all ranks: it is somebody's laptop and not ours alone. The
 * latent cache is the same on every rank, so on the CPU backend the pages are paid for world times.
 */
#include "coordinator/cacheplan.h"

#include <inttypes.h>

#include "proto/limits.h"
#include "proto/log.h"

int64_t cache_plan_pages(const struct cache_room *r) {
    assert(r->world > 0 && r->ranks_per_device > 0 && r->context > 0);
    int64_t per_seq = (r->context + LIMIT_PAGE_TOKENS - 1) / LIMIT_PAGE_TOKENS;
    int64_t want = r->max_seqs * (per_seq + 1);
    if (r->cache_tokens > 0)
        return MIN((r->cache_tokens + LIMIT_PAGE_TOKENS - 1) / LIMIT_PAGE_TOKENS, INT32_MAX);
    uint64_t room = r->host_memory ? r->host_available_bytes / 4 / (uint64_t)r->world
                                   : r->free_bytes / 10 * 9 / (uint64_t)r->ranks_per_device;
    uint64_t fit = r->page_bytes ? room / r->page_bytes : (uint64_t)want;
    return (int64_t)MIN(MIN(fit, (uint64_t)want), (uint64_t)INT32_MAX);
}

int cache_plan(const struct cache_room *r, int64_t *pages, struct err_text *err) {
    const uint64_t free = r->host_memory ? r->host_available_bytes : r->free_bytes;
    const uint64_t sharing = (uint64_t)(r->host_memory ? r->world : r->ranks_per_device);
    const uint64_t most = r->page_bytes ? free / r->page_bytes / sharing : INT32_MAX;
    *pages = cache_plan_pages(r);
    if (*pages == 0)
        return err_set(err, ERR_SETUP,
                       "cache: expected memory for a page of %d tokens, %" PRIu64
                       " bytes for each of %" PRIu64 " ranks, found %" PRIu64 " bytes free",
                       LIMIT_PAGE_TOKENS, r->page_bytes, sharing, free);
    if (free && (uint64_t)*pages > most) /* 0: not known */
        return err_set(err, ERR_SETUP,
                       "--cache-tokens: expected at most the %" PRIu64 " that %" PRIu64
                       " free bytes hold for %" PRIu64 " ranks, found %" PRId64,
                       most * LIMIT_PAGE_TOKENS, free, sharing, r->cache_tokens);
    log_info("cache_planned",
             "tokens=%" PRId64 " pages=%" PRId64 " page_bytes=%" PRIu64 " bytes_per_rank=%" PRIu64
             " free_bytes=%" PRIu64 " ranks_sharing=%" PRIu64 " full_sequences=%.1f",
             *pages * LIMIT_PAGE_TOKENS, *pages, r->page_bytes, (uint64_t)*pages * r->page_bytes,
             free, sharing, (double)*pages * LIMIT_PAGE_TOKENS / (double)r->context);
    return OK;
}

uint64_t cache_host_available(void) {
    FILE *f = fopen("/proc/meminfo", "re");
    char line[128];
    uint64_t kb = 0;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %" SCNu64, &kb) == 1) break;
    if (f) fclose(f);
    return kb * 1024;
}
