/* coordinator/progress.c: how far the workers have come with loading. See progress.h.
 *
 * Owns: nothing but the bar's line.  Called by: fleet.c.  Fails how: it does not.
 *
 * A terminal gets one line that is redrawn ten times a second, with the cursor left at its
 * beginning, so that a log line of a worker writes over it and not behind it. Anything else (a
 * file, a journal) gets ordinary log lines, at most one a second, because a carriage return there
 * is rubbish.
 */
#include "coordinator/progress.h"

#include <inttypes.h>

#include "proto/log.h"

#define BAR_CELLS 40

static void draw(uint64_t bytes, uint64_t total) {
    int filled = total ? (int)(bytes * BAR_CELLS / total) : 0;
    char cells[BAR_CELLS + 1];
    for (int i = 0; i < BAR_CELLS; i++) cells[i] = i < filled ? '#' : '.';
    cells[BAR_CELLS] = 0;
    fprintf(stderr, "loading [%s] %3d%%  %.1f of %.1f MB\x1b[K\r", cells,
            total ? (int)(bytes * 100 / total) : 0, (double)bytes / 1e6, (double)total / 1e6);
    fflush(stderr);
}

void progress_show(struct progress *p, uint64_t bytes, uint64_t total, uint64_t now_us) {
    uint64_t every = p->bar ? 100000 : 1000000;
    if (bytes > total) bytes = total;
    if (p->last_us && (now_us - p->last_us < every || bytes == p->last_bytes)) return;
    p->last_us = now_us;
    p->last_bytes = bytes;
    if (p->bar) {
        draw(bytes, total);
        p->drawn = true;
        return;
    }
    log_info("loading", "bytes=%" PRIu64 " total=%" PRIu64 " percent=%d", bytes, total,
             total ? (int)(bytes * 100 / total) : 0);
}

void progress_end(struct progress *p) {
    if (p->drawn) fputs("\x1b[K", stderr);
    fflush(stderr);
    p->drawn = false;
    p->last_us = p->last_bytes = 0;
}
