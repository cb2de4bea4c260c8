/* coordinator/doctor_bundle.h: report, logs and what a running service says of itself, in one file.
 *
 * Owns: the file, the patterns of what is removed.  Called by: cmd_doctor.c.
 * Fails how: ERR_SETUP with a sentence when the file cannot be written; what cannot be collected is
 * a sentence in it.  Limits: BUNDLE_LOG_BYTES from the end of a log.
 * Tested by: tests/unit/test_doctor.c, tests/faults/test_doctor.py
 */
#ifndef OCTAVO_COORDINATOR_DOCTOR_BUNDLE_H
#define OCTAVO_COORDINATOR_DOCTOR_BUNDLE_H

#include "proto/base.h"

#define BUNDLE_LOG_BYTES (8u << 20)

struct bundle;

/* A tar archive whose names begin with `folder`. keys: NULL-ended, each removed wherever it stands.
 */
int bundle_open(struct bundle **out, const char *path, const char *folder, const char *const *keys,
                struct err_text *err);
void bundle_add(struct bundle *b, const char *name, const char *text, size_t n);
void bundle_add_log(struct bundle *b, int number, const char *path);
/* Everything that GET answers about the service at url, which need not be there. */
void bundle_add_service(struct bundle *b, const char *url, const char *key);
/* What each worker of this host says past its coordinator. */
void bundle_add_workers(struct bundle *b);
int bundle_close(struct bundle *b, struct err_text *err);

/* text without keys, bearer tokens and values of variables that hold secrets; malloc'ed. */
char *bundle_clean(struct bundle *b, const char *text, size_t n, size_t *out_n);

#endif
