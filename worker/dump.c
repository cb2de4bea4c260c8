/* worker/dump.c: see dump.h.
 *
 * Owns: the file.  Called by: main.c; its hook by forward.c.
 * Fails how: see dump.h.  Limits: none.  Tested by: tests/kernels/test_model.c
 *
 * Values go out raw, not as decimal text: two dumps are compared bit by bit.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/log.h"
#include "worker/dump.h"

struct dumper {
    struct dump hook;
    struct model *m;
    FILE *f;
    char *names; /* ",name,name," */
    void *staging;
    size_t staging_bytes;
};

static bool is_named(const struct dumper *d, const char *name) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, ",%s,", name);
    return strstr(d->names, wanted) || strstr(d->names, ",all,");
}

static void write_record(struct dumper *d, const char *name, int layer, const void *x, int rows,
                         int width, const char *kind) {
    size_t bytes = (size_t)rows * (size_t)width * 4;
    if (!d->f || !is_named(d, name)) return;
    if (bytes > d->staging_bytes) {
        free(d->staging);
        d->staging = malloc(bytes);
        d->staging_bytes = d->staging ? bytes : 0;
    }
    if (d->staging) d->m->k->get(d->m->ctx, d->staging, x, bytes);
    if (d->staging && fprintf(d->f, "%s %d %d %d %s\n", name, layer, rows, width, kind) > 0 &&
        fwrite(d->staging, 1, bytes, d->f) == bytes && fflush(d->f) == 0)
        return;
    log_error("dump_failed", "name=%s layer=%d error=\"%s\"", name, layer, strerror(errno));
    fclose(d->f);
    d->f = NULL;
}

static void write_f32(void *user, const char *name, int layer, const float *x, int rows,
                      int width) {
    write_record(user, name, layer, x, rows, width, "f32");
}

static void write_i32(void *user, const char *name, int layer, const int32_t *x, int rows,
                      int width) {
    write_record(user, name, layer, x, rows, width, "i32");
}

int dumper_open(struct dumper **out, struct model *m, const char *names, const char *path,
                struct err_text *err) {
    struct dumper *d = calloc(1, sizeof *d);
    if (!d) return err_set(err, ERR_NOMEM, "--dump: expected memory, found none");
    d->hook = (struct dump){.tensor = write_f32, .ids = write_i32, .user = d};
    d->m = m;
    d->f = fopen(path, "wbe");
    if (!d->f || asprintf(&d->names, ",%s,", names) < 0) {
        int rc =
            err_set(err, ERR_SYS, "--dump: expected to write %s, found: %s", path, strerror(errno));
        d->names = NULL;
        dumper_close(d);
        return rc;
    }
    *out = d;
    return OK;
}

const struct dump *dumper_hook(const struct dumper *d) {
    return d ? &d->hook : NULL;
}

void dumper_close(struct dumper *d) {
    if (!d) return;
    if (d->f) fclose(d->f);
    free(d->names);
    free(d->staging);
    free(d);
}
