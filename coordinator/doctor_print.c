/* coordinator/doctor_print.c: the report as text, and at its end what to fix.
 *
 * Owns: nothing.  Called by: cmd_doctor.c.  Fails how: what the report lacks is printed as "?".
 * Limits: none.  Tested by: tests/unit/test_doctor.c, tests/faults/test_doctor.py
 *
 * It is printed from the JSON and from nothing else, so that a person and a program that read the
 * same report cannot be told different things.
 */
#include <string.h>

#include "coordinator/doctor.h"

static const char *text_of(const json_t *o, const char *key) {
    const char *s = json_string_value(json_object_get(o, key));
    return s && *s ? s : "?";
}

static json_int_t number_of(const json_t *o, const char *key) {
    return json_integer_value(json_object_get(o, key));
}

/* "17 GiB", "512 MiB"; "?" when it is not there; a string, like "unlimited", as it is. */
static const char *bytes_of(const json_t *o, const char *key, char out[32]) {
    const json_t *v = json_object_get(o, key);
    json_int_t n = json_integer_value(v);
    if (json_is_string(v))
        snprintf(out, 32, "%.31s", json_string_value(v));
    else if (!json_is_integer(v))
        strcpy(out, "?");
    else if (n >= (json_int_t)10 << 30)
        snprintf(out, 32, "%lld GiB", (long long)(n >> 30));
    else if (n >= 10 << 20)
        snprintf(out, 32, "%lld MiB", (long long)(n >> 20));
    else
        snprintf(out, 32, "%lld bytes", (long long)n);
    return out;
}

static const char *count_of(const json_t *o, const char *key, char out[32]) {
    const json_t *v = json_object_get(o, key);
    if (json_is_integer(v))
        snprintf(out, 32, "%lld", (long long)json_integer_value(v));
    else
        return bytes_of(o, key, out);
    return out;
}

static void print_host(const json_t *report, FILE *f) {
    const json_t *host = json_object_get(report, "host"),
                 *limits = json_object_get(report, "limits"), *shm = json_object_get(report, "shm"),
                 *huge = json_object_get(report, "huge_pages");
    char a[32], b[32];
    fprintf(f, "octavo doctor, build %s, %s\n", text_of(host, "build"), text_of(host, "time"));
    fprintf(f, "host        %s, kernel %s, cores %s, NUMA nodes %s\n", text_of(host, "name"),
            text_of(host, "kernel"), text_of(host, "cores"), text_of(host, "numa_nodes"));
    fprintf(f, "memory      %s, %s available", bytes_of(host, "memory_bytes", a),
            bytes_of(host, "available_bytes", b));
    if (json_is_integer(json_object_get(limits, "cgroup_memory_bytes")))
        fprintf(f, "; control group allows %s, %s in use",
                bytes_of(limits, "cgroup_memory_bytes", a),
                bytes_of(limits, "cgroup_memory_used_bytes", b));
    fprintf(f, "\n/dev/shm    %s, %s free\n", bytes_of(shm, "total_bytes", a),
            bytes_of(shm, "free_bytes", b));
    fprintf(f, "limits      open files %s, locked memory %s\n", count_of(limits, "nofile", a),
            bytes_of(limits, "memlock_bytes", b));
    fprintf(f, "huge pages  transparent %s, reserved %s of %s\n", text_of(huge, "transparent"),
            count_of(huge, "reserved", a), bytes_of(huge, "size_bytes", b));
}

static void print_gpu(const json_t *gpu, FILE *f) {
    const json_t *pcie = json_object_get(gpu, "pcie"), *memory = json_object_get(gpu, "memory");
    json_t *p;
    size_t i;
    char a[32], b[32], c[32], e[32];
    fprintf(f, "GPU %-7s %s, %s, %s", count_of(gpu, "index", a), text_of(gpu, "name"),
            text_of(gpu, "uuid"), text_of(gpu, "pci"));
    if (strcmp(text_of(gpu, "serial"), "?")) fprintf(f, ", serial %s", text_of(gpu, "serial"));
    fprintf(f, "\n            memory %s, %s used, %s free; window %s; %s\n",
            bytes_of(memory, "total_bytes", a), bytes_of(memory, "used_bytes", b),
            bytes_of(memory, "free_bytes", c), bytes_of(gpu, "window_bytes", e),
            text_of(gpu, "health"));
    fprintf(f, "            PCIe generation %s of %s, x%s of x%s", count_of(pcie, "generation", a),
            count_of(pcie, "generation_max", b), count_of(pcie, "width", c),
            count_of(pcie, "width_max", e));
    fprintf(f, "; NUMA node %s, cores %s\n", count_of(gpu, "numa_node", a), text_of(gpu, "cores"));
    json_array_foreach(json_object_get(gpu, "processes"), i, p)
        fprintf(f, "            process %lld (%s): %s\n", (long long)number_of(p, "pid"),
                text_of(p, "name"), bytes_of(p, "bytes", a));
}

/* A row for each GPU: above the diagonal whether it reaches the other, below it by which way. */
static void print_pairs(const json_t *report, size_t n, FILE *f) {
    const char *cell[DEVICE_MAX][DEVICE_MAX] = {{0}};
    json_t *pair;
    size_t i;
    if (n < 2) return;
    json_array_foreach(json_object_get(report, "p2p"), i, pair) {
        json_int_t a = number_of(pair, "a"), b = number_of(pair, "b");
        cell[a][b] = strcmp(text_of(pair, "driver"), "yes") ? text_of(pair, "driver") : "yes";
        cell[b][a] = text_of(pair, "way");
    }
    fprintf(f, "peers       right: reaches its memory; left: by the same switch, root, node, or "
               "across the system\n");
    for (size_t a = 0; a < n && a < DEVICE_MAX; a++) {
        fprintf(f, "            GPU %zu", a);
        for (size_t b = 0; b < n && b < DEVICE_MAX; b++)
            fprintf(f, " %-8.8s", a == b ? "-" : cell[a][b] ? cell[a][b] : "?");
        fputc('\n', f);
    }
}

static void print_bus(const json_t *report, FILE *f) {
    const json_t *iommu = json_object_get(report, "iommu");
    json_t *row;
    size_t i;
    fprintf(f, "IOMMU       %s; kernel options %s\n", text_of(iommu, "mode"),
            text_of(iommu, "kernel_options"));
    json_array_foreach(json_object_get(report, "acs"), i, row) {
        const json_t *control = json_object_get(row, "control");
        fprintf(f, "ACS         bridge %s: ", text_of(row, "bridge"));
        if (!json_is_true(json_object_get(row, "readable")))
            fputs("not readable\n", f);
        else if (json_is_null(control))
            fputs("has none\n", f);
        else
            fprintf(f, "control %04llx, %s\n", (long long)json_integer_value(control),
                    json_is_true(json_object_get(row, "redirects")) ? "redirects peers"
                                                                    : "lets peers pass");
    }
}

static void print_nccl(const json_t *report, FILE *f) {
    const json_t *nccl = json_object_get(report, "nccl");
    json_t *value;
    const char *name;
    if (strcmp(text_of(nccl, "version"), "?"))
        fprintf(f, "NCCL        %s\n", text_of(nccl, "version"));
    else
        fprintf(f, "NCCL        none: %s\n", text_of(nccl, "error"));
    json_object_foreach(json_object_get(nccl, "environment"), name, value)
        fprintf(f, "            %s=%s\n", name, json_string_value(value));
}

static void print_sums(const json_t *report, FILE *f) {
    json_t *row, *sum;
    size_t i, k;
    json_array_foreach(json_object_get(report, "collectives"), i, row) {
        fprintf(f, "all-reduce  %lld ranks over %s: ", (long long)number_of(row, "ranks"),
                text_of(row, "asked"));
        if (json_is_true(json_object_get(row, "right")))
            fprintf(f, "right (%s), %.1f s with its start\n", text_of(row, "used"),
                    json_real_value(json_object_get(row, "seconds")));
        else
            fprintf(f, "FAILED: %s\n", text_of(row, "failure"));
        json_array_foreach(json_object_get(row, "sums"), k, sum)
            fprintf(f, "            %8lld bytes in %.1f us\n", (long long)number_of(sum, "bytes"),
                    json_real_value(json_object_get(sum, "microseconds")));
    }
}

/* Worst first. */
static void print_findings(const struct doctor *d, FILE *f) {
    static const char *const levels[] = {"stops", "slows", "note"};
    json_t *row;
    size_t i;
    int n = 0;
    fprintf(f, "\nWhat to fix%s\n", json_array_size(d->findings) ? "" : ": nothing found");
    for (size_t l = 0; l < ARRAY_LEN(levels); l++) json_array_foreach(d->findings, i, row) {
            if (strcmp(text_of(row, "level"), levels[l])) continue;
            fprintf(f, "%2d. [%s] %s\n    expected: %s\n    found: %s\n    fix: %s\n", ++n,
                    levels[l], text_of(row, "what"), text_of(row, "expected"),
                    text_of(row, "found"), text_of(row, "fix"));
        }
}

void doctor_print(const struct doctor *d, FILE *f) {
    const json_t *gpus = json_object_get(d->report, "gpus");
    json_t *gpu;
    size_t i;
    print_host(d->report, f);
    fprintf(f, "driver      %s, %zu GPUs\n", text_of(d->report, "driver"), json_array_size(gpus));
    json_array_foreach(gpus, i, gpu) print_gpu(gpu, f);
    print_pairs(d->report, json_array_size(gpus), f);
    print_bus(d->report, f);
    print_nccl(d->report, f);
    print_sums(d->report, f);
    print_findings(d, f);
}
