/* coordinator/doctor.h: what a machine is like, before a service is put on it.
 *
 * Each part looks at one thing and writes what it saw into one JSON report, from which the text is
 * printed too; what should be mended becomes a finding. Everything of the operating system is read
 * below `root` ("" is this host, anything else a test's folder).
 *
 * Owns: the report.  Called by: cmd_doctor.c, cmd_serve.c.
 * Fails how: what cannot be read is missing from the report, or null in it; never an error.
 * Limits: DOCTOR_TEXT_BYTES of a file, DEVICE_MAX GPUs.  Tested by: tests/unit/test_doctor.c,
 * tests/faults/test_doctor.py
 */
#ifndef OCTAVO_COORDINATOR_DOCTOR_H
#define OCTAVO_COORDINATOR_DOCTOR_H

#include <jansson.h>

#include "coordinator/device_memory.h"
#include "coordinator/gpus.h"
#include "proto/base.h"

#define DOCTOR_TEXT_BYTES (64 << 10)

enum doctor_level {
    DOCTOR_NOTE,  /* worth knowing */
    DOCTOR_SLOWS, /* serves, but slower than this machine could, or may fail later */
    DOCTOR_STOPS, /* a service would not start, or not last */
};

struct doctor {
    const char *root;
    json_t *report;   /* object; "findings" of it below */
    json_t *findings; /* array of {level, what, expected, found, fix}; borrowed */
};

int doctor_init(struct doctor *d, const char *root); /* ERR_NOMEM */
void doctor_deinit(struct doctor *d);                /* {0} is fine */

/* fix: the command or setting that mends it. fmt: what was found. */
PRINTF_LIKE(6, 7)
void doctor_find(struct doctor *d, enum doctor_level level, const char *what, const char *expected,
                 const char *fix, const char *fmt, ...);
enum doctor_level doctor_worst(const struct doctor *d);

/* A file below root, without its last line feed; false and "" if it cannot be read. */
PRINTF_LIKE(4, 5)
bool doctor_read(const struct doctor *d, char *out, size_t n, const char *fmt, ...);
PRINTF_LIKE(3, 4)
int64_t doctor_number(const struct doctor *d, int64_t otherwise, const char *fmt, ...);
/* Names in a folder below root, sorted; an empty array if there is none. */
PRINTF_LIKE(2, 3) json_t *doctor_names(const struct doctor *d, const char *fmt, ...);

/* ---- the parts, in this order -----------------------------------------------------------------
 */

/* "host", "limits", "shm", "huge_pages": doctor_host.c */
void doctor_look_host(struct doctor *d);

/* "gpus", "driver", "p2p", and who else holds their memory: doctor_gpu.c. m may have no devices. */
void doctor_look_gpus(struct doctor *d, const struct device_memory *m);
/* "nccl": its version, found by opening it, and the environment that concerns it. */
void doctor_look_nccl(struct doctor *d, char **env);

/* "iommu", "acs", and pcie, NUMA node and cores in each of "gpus": doctor_pci.c */
void doctor_look_pci(struct doctor *d);

/* "collectives": doctor_coll.c. Runs all-reduces of 2, 4, … and all ranks, in processes of their
 * own; whoever is not through after limit_s is named and killed. Where that
 * failed between GPUs, each two are tried. */
struct doctor_ranks {
    const char *worker;      /* the program */
    const struct gpus *gpus; /* dealt; NULL: CPU */
    const char *collective;  /* "auto": each that there is */
    int all, limit_s;
};
void doctor_try_collectives(struct doctor *d, const struct doctor_ranks *r);

/* The same once, of all ranks, before a service loads weights: ERR_SETUP with a sentence. */
int doctor_check_links(const struct doctor_ranks *r, struct err_text *err);

/* ---- telling ----------------------------------------------------------------------------------
 */

void doctor_print(const struct doctor *d, FILE *f); /* doctor_print.c */

#endif
