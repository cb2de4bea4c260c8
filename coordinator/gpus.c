/* coordinator/gpus.c: the GPUs of this host and the cores beside them. See gpus.h.
 *
 * Owns: nothing.  Called by: settings.c, launch.c.  Fails how: see gpus.h.
 * Limits: GPUS_MAX.  Tested by: tests/unit/test_gpus.c
 *
 * The driver lists its devices as folders named by PCI address: no library has to be loaded to
 * count them, and a host without a driver costs two failed look-ups. Ordinals follow the order of
 * the bus, which is CUDA's only if it is told so: workers get CUDA_DEVICE_ORDER=PCI_BUS_ID.
 */
#include "coordinator/gpus.h"

#include <ctype.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/pin.h"

/* ---- finding ----------------------------------------------------------------------------- */

static void parse_cores(cpu_set_t *out, const char *text) {
    CPU_ZERO(out);
    while (isdigit((unsigned char)*text)) {
        char *end;
        long first = strtol(text, &end, 10), last = first;
        if (*end == '-') last = strtol(end + 1, &end, 10);
        for (long c = first; c <= last && c < CPU_SETSIZE; c++) CPU_SET((size_t)c, out);
        text = *end == ',' ? end + 1 : end;
    }
}

static void find_near(struct gpu *gpu, const char *root) {
    char path[512], text[1024] = "";
    snprintf(path, sizeof path, "%.300s/sys/bus/pci/devices/%s/local_cpulist", root, gpu->pci);
    FILE *f = fopen(path, "re");
    if (!f) return;
    if (fgets(text, sizeof text, f)) parse_cores(&gpu->near, text);
    fclose(f);
}

static int by_address(const void *a, const void *b) {
    return strcmp(((const struct gpu *)a)->pci, ((const struct gpu *)b)->pci);
}

/* Where the driver's list is hidden, as in some containers, the device nodes at least count. */
static void count_nodes(struct gpus *g, const char *root) {
    char path[512];
    snprintf(path, sizeof path, "%.300s/dev", root);
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d)) && g->n < GPUS_MAX;)
        g->n += !strncmp(e->d_name, "nvidia", 6) && isdigit((unsigned char)e->d_name[6]);
    if (d) closedir(d);
}

/* Keeps those that CUDA will show, in its order; like CUDA, stops at the first that is not there.
 */
static void take_visible(struct gpus *g, const char *visible) {
    const struct gpus all = *g;
    g->n = 0;
    memset(g->gpu, 0, sizeof g->gpu);
    while (*visible && g->n < GPUS_MAX) {
        char *end;
        if (isdigit((unsigned char)*visible)) {
            long i = strtol(visible, &end, 10);
            if (i >= all.n) return;
            g->gpu[g->n++] = all.gpu[i];
        } else if (!strncmp(visible, "GPU-", 4) || !strncmp(visible, "MIG-", 4)) {
            g->n++; /* which one it is only the driver knows */
        } else {
            return;
        }
        visible += strcspn(visible, ",");
        visible += *visible == ',';
    }
}

void gpus_find(struct gpus *g, const char *root, const char *visible) {
    char path[512];
    *g = (struct gpus){0};
    snprintf(path, sizeof path, "%.300s/proc/driver/nvidia/gpus", root);
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d)) && g->n < GPUS_MAX;)
        if (e->d_name[0] != '.')
            snprintf(g->gpu[g->n++].pci, sizeof g->gpu[0].pci, "%.23s", e->d_name);
    if (d) closedir(d);
    qsort(g->gpu, (size_t)g->n, sizeof g->gpu[0], by_address);
    for (int i = 0; i < g->n; i++) find_near(&g->gpu[i], root);
    if (g->n == 0) count_nodes(g, root);
    if (visible) take_visible(g, visible);
}

/* ---- dealing ----------------------------------------------------------------------------- */

int gpus_deal(struct gpus *g, const char *list, struct err_text *err) {
    g->n_dealt = 0;
    for (int i = 0; !list && i < MIN(g->n, LIMIT_RANKS); i++) g->dealt[g->n_dealt++] = i;
    for (const char *at = list; at && *at;) {
        char *end;
        long i = isdigit((unsigned char)*at) ? strtol(at, &end, 10) : -1;
        if (i < 0 || i >= g->n || g->n_dealt == LIMIT_RANKS || (*end && *end != ',') ||
            (*end == ',' && !end[1]))
            return err_set(
                err, ERR_SETUP,
                "--devices: expected at most %d numbers below %d, as in 0,1, found %.200s",
                LIMIT_RANKS, g->n, list);
        g->dealt[g->n_dealt++] = (int)i;
        at = *end ? end + 1 : end;
    }
    if (g->n_dealt == 0)
        return err_set(err, ERR_SETUP, "--devices: expected a list like 0,1, found an empty one");
    return OK;
}

int gpus_ranks(const struct gpus *g) {
    int ranks = 1;
    while (2 * ranks <= MIN(g->n_dealt, 8)) ranks *= 2;
    return ranks;
}

int gpus_of_rank(const struct gpus *g, int rank) {
    return g->n_dealt ? g->dealt[rank % g->n_dealt] : 0;
}

bool gpus_devices(const struct gpus *g, int world, const struct device_memory *m,
                  bool on[DEVICE_MAX]) {
    for (int d = 0; d < DEVICE_MAX; d++) on[d] = false;
    for (int r = 0; r < world; r++) {
        const char *pci = g->gpu[gpus_of_rank(g, r)].pci;
        int d = *pci ? device_memory_find(m, pci) : -1;
        if (d < 0) return false;
        on[d] = true;
    }
    return world > 0;
}

/* Cores near the GPU of `rank` that we may use; all that we may use if none is known. */
static void cores_near(const struct gpus *g, cpu_set_t *out, const cpu_set_t *allowed, int rank) {
    CPU_AND(out, allowed, &g->gpu[gpus_of_rank(g, rank)].near);
    if (CPU_COUNT(out) == 0) *out = *allowed;
}

void gpus_cores(const struct gpus *g, cpu_set_t *out, const cpu_set_t *allowed, int rank,
                int world) {
    cpu_set_t mine, theirs;
    int before = 0, sharing = 0;
    cores_near(g, &mine, allowed, rank);
    for (int r = 0; r < world; r++) {
        cores_near(g, &theirs, allowed, r);
        if (!CPU_EQUAL(&mine, &theirs)) continue;
        before += r < rank;
        sharing++;
    }
    pin_plan(out, &mine, before, sharing);
}
