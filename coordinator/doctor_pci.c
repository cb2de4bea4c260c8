/* coordinator/doctor_pci.c: how GPUs hang on the PCI bus, and what stands between them: links,
 * switches, ACS, IOMMU.
 *
 * Owns: nothing.  Called by: cmd_doctor.c.  Fails how: see doctor.h; the extended configuration of
 * a bridge, where ACS is, only root can read.  Limits: PCI_DEPTH bridges above a GPU. Tested by:
 * tests/unit/test_doctor.c
 *
 * None of this says that a service will not work: boxes with every bit wrong have passed the
 * all-reduces that follow, and others hung. So these findings never stop; they say where to look
 * when an all-reduce did.
 */
#include <ctype.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "coordinator/doctor.h"

#define PCI_DEPTH        16
#define PCI_NAME_BYTES   13 /* "0000:c1:00.0" */
#define CONFIG_BYTES     4096
#define CONFIG_EXTENDED  0x100
#define ACS_ID           0x000d
#define ACS_P2P_REQUEST  0x0004 /* redirects requests between peers to the root */
#define ACS_P2P_COMPLETE 0x0008
#define DEVICES          "/sys/bus/pci/devices/"

/* The way from the root of the bus to one GPU: the root's name, then bridges. */
struct pci_path {
    int n;
    char name[PCI_DEPTH][24]; /* "pci0000:00", "0000:00:01.0", … */
};

static bool is_address(const char *s) {
    int domain, bus, device, function, n = 0;
    return sscanf(s, "%4x:%2x:%2x.%1x%n", &domain, &bus, &device, &function, &n) == 4 && !s[n];
}

static void find_path(const struct doctor *d, const char *pci, struct pci_path *p) {
    char path[PATH_MAX], target[PATH_MAX], *save, *word;
    p->n = 0;
    snprintf(path, sizeof path, "%.2000s" DEVICES "%s", d->root, pci);
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n < 0) return;
    target[n] = 0;
    for (word = strtok_r(target, "/", &save); word; word = strtok_r(NULL, "/", &save))
        if ((!strncmp(word, "pci", 3) || is_address(word)) && strcmp(word, pci) &&
            p->n < PCI_DEPTH && strlen(word) < sizeof p->name[0])
            strcpy(p->name[p->n++], word);
}

/* ---- links ----------------------------------------------------------------------------------- */

/* "32.0 GT/s PCIe" is generation 5; 0: unknown. */
static int generation(const struct doctor *d, const char *pci, const char *which) {
    static const double rates[] = {2.5, 5, 8, 16, 32, 64};
    char text[64];
    double rate = doctor_read(d, text, sizeof text, DEVICES "%s/%s_link_speed", pci, which)
                      ? strtod(text, NULL)
                      : 0;
    for (size_t i = 0; i < ARRAY_LEN(rates); i++)
        if (rate > rates[i] * 0.9 && rate < rates[i] * 1.1) return (int)i + 1;
    return 0;
}

static int width(const struct doctor *d, const char *pci, const char *which) {
    int64_t n = doctor_number(d, 0, DEVICES "%s/%s_link_width", pci, which);
    return n > 0 && n <= 32 ? (int)n : 0; /* 63: the device does not say */
}

static void prefer(json_t *o, const char *key, int found) {
    if (json_integer_value(json_object_get(o, key)) == 0)
        json_object_set_new(o, key, found ? json_integer(found) : json_null());
}

/* The driver's word first, for in a virtual machine the bus may not be the real one. */
static void look_link(struct doctor *d, json_t *gpu, int index, const char *pci) {
    json_t *pcie = json_object_get(gpu, "pcie");
    if (!pcie) json_object_set_new(gpu, "pcie", pcie = json_object());
    prefer(pcie, "generation", generation(d, pci, "current"));
    prefer(pcie, "generation_max", generation(d, pci, "max"));
    prefer(pcie, "width", width(d, pci, "current"));
    prefer(pcie, "width_max", width(d, pci, "max"));
    json_int_t now = json_integer_value(json_object_get(pcie, "width")),
               most = json_integer_value(json_object_get(pcie, "width_max"));
    char what[64];
    snprintf(what, sizeof what, "PCIe width of GPU %d, %s", index, pci);
    if (now > 0 && now < most)
        doctor_find(d, DOCTOR_SLOWS, what, "as many lanes as the card has",
                    "seat card and riser again, clean the contacts; in the BIOS no bifurcation of "
                    "that slot",
                    "x%d of x%d", (int)now, (int)most);
}

/* The size of the window through which others reach the card's memory; 0: unknown. */
static uint64_t window_bytes(const struct doctor *d, const char *pci) {
    char text[2048];
    uint64_t from, to;
    const char *second = NULL;
    if (doctor_read(d, text, sizeof text, DEVICES "%s/resource", pci)) second = strchr(text, '\n');
    if (!second || sscanf(second, "%" SCNx64 " %" SCNx64, &from, &to) != 2 || to <= from) return 0;
    return to - from + 1;
}

static void look_window(struct doctor *d, json_t *gpu, int index, const char *pci, bool several) {
    uint64_t window = window_bytes(d, pci);
    json_int_t memory =
        json_integer_value(json_object_get(json_object_get(gpu, "memory"), "total_bytes"));
    char what[64];
    json_object_set_new(gpu, "window_bytes",
                        window ? json_integer((json_int_t)window) : json_null());
    snprintf(what, sizeof what, "memory window of GPU %d, %s", index, pci);
    if (several && window && memory > 0 && window < (uint64_t)memory)
        doctor_find(d, DOCTOR_SLOWS, what, "all of its memory, for its peers to reach",
                    "BIOS: Above 4G Decoding and Resizable BAR on; driver option "
                    "NVreg_EnableResizableBar=1",
                    "%" PRIu64 " MiB of %lld MiB", window >> 20, (long long)memory >> 20);
}

/* ---- IOMMU and ACS --------------------------------------------------------------------------- */

static bool has_word(const char *text, const char *word) {
    size_t n = strlen(word);
    for (const char *p = text; (p = strstr(p, word)); p += n)
        if ((p == text || p[-1] == ' ') && (!p[n] || p[n] == ' ')) return true;
    return false;
}

static void look_iommu(struct doctor *d, const char *pci, bool several) {
    char line[4096], type[64] = "", asked[1024] = "", *save, *word;
    json_t *units = doctor_names(d, "/sys/class/iommu");
    const char *mode = "off";
    doctor_read(d, line, sizeof line, "/proc/cmdline");
    bool pass = has_word(line, "iommu=pt") || has_word(line, "iommu.passthrough=1");
    if (pci) doctor_read(d, type, sizeof type, DEVICES "%s/iommu_group/type", pci);
    if (json_array_size(units))
        mode = type[0] ? strcmp(type, "identity") ? "translating" : "pass-through"
               : pass  ? "pass-through"
                       : "on";
    for (word = strtok_r(line, " ", &save); word; word = strtok_r(NULL, " ", &save))
        if (strstr(word, "iommu") || strstr(word, "acs"))
            snprintf(asked + strlen(asked), sizeof asked - strlen(asked), "%s%.100s",
                     asked[0] ? " " : "", word);
    json_object_set_new(d->report, "iommu",
                        json_pack("{s:s, s:o, s:s, s:s}", "mode", mode, "units", units,
                                  "type_of_gpu", type, "kernel_options", asked));
    if (several && (!strcmp(mode, "translating") || !strcmp(mode, "on")))
        doctor_find(
            d, DOCTOR_SLOWS, "IOMMU", "off, or pass-through, for GPUs that reach each other",
            "iommu=pt on the kernel's command line, or IOMMU (VT-d, AMD-Vi) off in the BIOS",
            "%s%s%s", mode, type[0] ? ", group type " : "", type);
}

/* The control register of ACS; -1: no such capability, -2: not readable. */
static int read_acs(const struct doctor *d, const char *pci) {
    unsigned char c[CONFIG_BYTES];
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.2000s" DEVICES "%s/config", d->root, pci);
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(c, 1, sizeof c, f) : 0;
    if (f) fclose(f);
    if (n <= CONFIG_EXTENDED) return -2;
    size_t at = CONFIG_EXTENDED;
    for (int hops = 0; at >= CONFIG_EXTENDED && at + 8 <= n && hops < 64; hops++) {
        unsigned id = c[at] | (unsigned)c[at + 1] << 8;
        if (id == ACS_ID) return c[at + 6] | c[at + 7] << 8;
        at = (c[at + 2] >> 4) | (size_t)c[at + 3] << 4;
    }
    return -1;
}

/* One bridge; the text gets its name if it redirects. true: not readable. */
static bool look_bridge(const struct doctor *d, json_t *acs, const char *pci, char *text,
                        size_t n) {
    int control = read_acs(d, pci);
    bool redirects = control >= 0 && (control & (ACS_P2P_REQUEST | ACS_P2P_COMPLETE));
    json_array_append_new(
        acs, json_pack("{s:s, s:b, s:o, s:b}", "bridge", pci, "readable", control != -2, "control",
                       control < 0 ? json_null() : json_integer(control), "redirects", redirects));
    if (redirects) snprintf(text + strlen(text), n - strlen(text), "%s%s", text[0] ? " " : "", pci);
    return control == -2;
}

static void look_acs(struct doctor *d, const struct pci_path *paths, int n_paths) {
    json_t *acs = json_array(), *seen = json_object();
    char wrong[600] = "", fix[900];
    int hidden = 0;
    for (int g = 0; g < n_paths; g++)
        for (int i = 0; i < paths[g].n; i++) {
            const char *name = paths[g].name[i];
            if (!is_address(name) || json_object_get(seen, name)) continue;
            json_object_set_new(seen, name, json_true());
            hidden += look_bridge(d, acs, name, wrong, sizeof wrong);
        }
    json_object_set_new(d->report, "acs", acs);
    json_decref(seen);
    snprintf(fix, sizeof fix,
             "ACS off in the BIOS, or at each boot: for b in %s; do setpci -s $b "
             "ECAP_ACS+6.w=0; done",
             wrong);
    if (wrong[0] && n_paths > 1)
        doctor_find(d, DOCTOR_SLOWS, "ACS", "no redirection on the bridges above the GPUs", fix,
                    "requests of peers take the way through the root at %s", wrong);
    if (hidden && n_paths > 1)
        doctor_find(d, DOCTOR_NOTE, "ACS", "bridges whose configuration can be read",
                    "run octavo doctor as root", "%d that cannot", hidden);
}

/* ---- who is how far from whom ---------------------------------------------------------------- */

static json_int_t node_of(json_t *gpus, int i) {
    json_t *node = json_object_get(json_array_get(gpus, (size_t)i), "numa_node");
    return json_is_integer(node) ? json_integer_value(node) : -1;
}

static const char *way(const struct pci_path *a, const struct pci_path *b, json_int_t node_a,
                       json_int_t node_b) {
    int common = 0;
    while (common < a->n && common < b->n && !strcmp(a->name[common], b->name[common])) common++;
    if (a->n == 0 || b->n == 0) return "unknown";
    if (common > 1) return "switch";
    if (common == 1) return "root";
    return node_a >= 0 && node_a == node_b ? "node" : "system";
}

static void look_ways(struct doctor *d, json_t *gpus, const struct pci_path *paths) {
    json_t *p2p = json_object_get(d->report, "p2p"), *pair;
    size_t i;
    json_array_foreach(p2p, i, pair) {
        int a = (int)json_integer_value(json_object_get(pair, "a")),
            b = (int)json_integer_value(json_object_get(pair, "b"));
        json_object_set_new(
            pair, "way",
            json_string(way(&paths[a], &paths[b], node_of(gpus, a), node_of(gpus, b))));
    }
}

static void look_near(struct doctor *d, json_t *gpu, int index, const char *pci, bool nodes) {
    char cores[512], what[64];
    int64_t node = doctor_number(d, -1, DEVICES "%s/numa_node", pci);
    doctor_read(d, cores, sizeof cores, DEVICES "%s/local_cpulist", pci);
    json_object_set_new(gpu, "numa_node", node < 0 ? json_null() : json_integer(node));
    json_object_set_new(gpu, "cores", json_string(cores));
    snprintf(what, sizeof what, "NUMA node of GPU %d, %s", index, pci);
    if (node < 0 && nodes)
        doctor_find(d, DOCTOR_NOTE, what, "a node, so that its worker runs beside it",
                    "BIOS: ACPI SRAT and PCI NUMA affinity on", "none");
}

/* Managed memory of the host's kernel gets in the way of peers on some boxes. */
static void look_uvm(struct doctor *d, bool several) {
    char text[16];
    if (several &&
        doctor_read(d, text, sizeof text, "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm") &&
        text[0] == 'N')
        doctor_find(d, DOCTOR_NOTE, "nvidia_uvm", "uvm_disable_hmm=1 where peers meet on PCIe",
                    "echo 'options nvidia_uvm uvm_disable_hmm=1' >/etc/modprobe.d/nvidia-uvm.conf, "
                    "then a reboot",
                    "off");
}

void doctor_look_pci(struct doctor *d) {
    static struct pci_path paths[DEVICE_MAX];
    json_t *gpus = json_object_get(d->report, "gpus"), *gpu;
    char online[64];
    size_t i;
    bool several = json_array_size(gpus) > 1;
    bool nodes = doctor_read(d, online, sizeof online, "/sys/devices/system/node/online") &&
                 strpbrk(online, "-,");
    const char *first = json_string_value(json_object_get(json_array_get(gpus, 0), "pci"));
    json_array_foreach(gpus, i, gpu) {
        const char *pci = json_string_value(json_object_get(gpu, "pci"));
        paths[i].n = 0;
        if (!pci || !*pci) continue;
        find_path(d, pci, &paths[i]);
        look_link(d, gpu, (int)i, pci);
        look_window(d, gpu, (int)i, pci, several);
        look_near(d, gpu, (int)i, pci, nodes);
    }
    look_ways(d, gpus, paths);
    look_iommu(d, first, several);
    look_acs(d, paths, (int)json_array_size(gpus));
    look_uvm(d, several);
}
