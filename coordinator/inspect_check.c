/* coordinator/inspect_check.c: reads every tensor and looks at its scales. See inspect_check.h.
 *
 * Owns: one buffer while it runs.  Called by: cmd_inspect.c.
 * Fails how: ERR_SYS, ERR_FORMAT, ERR_NOMEM with a sentence that names part and tensor.
 * Limits: BUFFER_BYTES at a time.  Tested by: tests/serve/test_inspect.py
 *
 * Read, not mapped: a file that is cut meanwhile is then a sentence and not a signal. The disk is
 * the bound; one thread looks at blocks many times faster than any disk gives them.
 */
#include "coordinator/inspect_check.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/gguf_check.h"

#define BUFFER_BYTES ((uint64_t)4 << 20)

static int read_at(const struct gguf *g, const struct gguf_tensor *t, uint64_t at, uint8_t *dst,
                   uint64_t n, struct err_text *err) {
    for (uint64_t done = 0; done < n;) {
        ssize_t got =
            pread(gguf_part_fd(g, t->part), dst + done, n - done, (off_t)(t->offset + at + done));
        if (got > 0) done += (uint64_t)got;
        if (got > 0 || (got < 0 && errno == EINTR)) continue;
        return err_set(err, got < 0 ? ERR_SYS : ERR_FORMAT,
                       "%.300s: %s: expected %" PRIu64 " bytes at %" PRIu64 ", found: %s",
                       gguf_part_path(g, t->part), t->name, n - done, t->offset + at + done,
                       got < 0 ? strerror(errno) : "the end of the file");
    }
    return OK;
}

static int check_tensor(const struct gguf *g, const struct gguf_tensor *t, uint8_t *buffer,
                        uint64_t *bad, struct err_text *err) {
    const struct gguf_type_info *type = gguf_type_info(t->type);
    uint64_t piece = BUFFER_BYTES / type->block_bytes * type->block_bytes, first = 0, found = 0;
    for (uint64_t at = 0; at < t->bytes; at += piece) {
        uint64_t n = MIN(piece, t->bytes - at), where = 0, here;
        TRY(read_at(g, t, at, buffer, n, err));
        here = gguf_check_blocks(t->type, buffer, n / type->block_bytes, &where);
        if (here && !found) first = at / type->block_bytes + where;
        found += here;
    }
    *bad += found;
    if (!found) return OK;
    uint64_t row_blocks = t->ne[0] / type->block_elems;
    printf("%s: %s: expected finite scales, found %" PRIu64 " of %" PRIu64
           " blocks with another, the first in row %" PRIu64 " of %" PRIu64
           ", columns from %" PRIu64 "\n",
           t->name, type->name, found, t->bytes / type->block_bytes, first / row_blocks,
           t->ne[1] * t->ne[2] * t->ne[3], first % row_blocks * type->block_elems);
    return OK;
}

/* Bytes of a part behind its last tensor, more than padding could be. */
static void print_surplus(const struct gguf *g, int part) {
    uint64_t end = 0;
    struct stat st;
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        if (t->part == part) end = MAX(end, t->offset + t->bytes);
    }
    if (end == 0 || fstat(gguf_part_fd(g, part), &st) < 0) return;
    if ((uint64_t)st.st_size > end + 4096)
        printf("%s: note: %" PRIu64 " bytes behind the last tensor, which nothing reads\n",
               gguf_part_path(g, part), (uint64_t)st.st_size - end);
}

int inspect_check(const struct gguf *g, uint64_t *bad_blocks, struct err_text *err) {
    uint8_t *buffer = malloc(BUFFER_BYTES);
    uint64_t tensors = gguf_n_tensors(g);
    int rc = OK;
    *bad_blocks = 0;
    if (!buffer)
        return err_set(err, ERR_NOMEM, "check: expected %" PRIu64 " bytes of memory, found none",
                       BUFFER_BYTES);
    for (int i = 0; i < gguf_parts(g); i++) {
        posix_fadvise(gguf_part_fd(g, i), 0, 0, POSIX_FADV_SEQUENTIAL);
        print_surplus(g, i);
    }
    for (uint64_t i = 0; i < tensors && rc == OK; i++)
        rc = check_tensor(g, gguf_tensor_at(g, i), buffer, bad_blocks, err);
    free(buffer);
    if (rc == OK)
        printf("checked %" PRIu64 " tensors, %" PRIu64 " bytes in %d file%s: %" PRIu64
               " blocks with a scale that is not finite\n",
               tensors, gguf_total_bytes(g), gguf_parts(g), gguf_parts(g) == 1 ? "" : "s",
               *bad_blocks);
    return rc;
}
