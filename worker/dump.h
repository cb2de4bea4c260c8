/* worker/dump.h: writes named tensors of the forward pass to a file, to compare two backends.
 *
 * A record is one line "NAME LAYER ROWS WIDTH f32|i32" and then ROWS * WIDTH little-endian values.
 * Names: residual (layer l: after l layers; 0 is the embedding), attention, ffn, final, logits
 * (rows are [world, S]), n_selected, selected.
 *
 * Owns: the file and a staging buffer.  Called by: main.c (--dump).
 * Fails how: ERR_SYS with a sentence at open; a failed write ends dumping and is logged once.
 */
#ifndef OCTAVO_WORKER_DUMP_H
#define OCTAVO_WORKER_DUMP_H

#include "worker/model.h"

struct dumper;

/* names: comma-separated; "all" for everything. The result's hook is given to the stepper. */
int dumper_open(struct dumper **out, struct model *m, const char *names, const char *path,
                struct err_text *err);
const struct dump *dumper_hook(const struct dumper *d); /* NULL for NULL */
void dumper_close(struct dumper *d);

#endif
