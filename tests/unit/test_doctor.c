/* tests/unit/test_doctor.c: what doctor finds on hosts made of folders, with GPUs of a stand-in
 * library: a good box, of which nothing is said, and boxes with one thing wrong each.
 */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/doctor.h"
#include "coordinator/doctor_bundle.h"
#include "tests/unit/fake_nvml.h"
#include "tests/unit/fake_root.h"

#define GIB (1ull << 30)

static struct fake_nvml *fake;
static char library[600];

static const char limits_file[] =
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max open files            65536                65536                files     \n"
    "Max locked memory         unlimited            unlimited            bytes     \n";

static int load_library(void **state) {
    UNUSED(state);
    const char *build = getenv("OCTAVO_BUILD_ROOT");
    snprintf(library, sizeof library, "%s/libfake-nvml.so", build ? build : ".");
    setenv("OCTAVO_NVML", library, 1);
    setenv("OCTAVO_NCCL_LIBRARY", "libm.so.6", 1); /* there, and not NCCL */
    void *handle = dlopen(library, RTLD_NOW);
    fake = handle ? dlsym(handle, "fake_nvml_state") : NULL;
    return fake ? 0 : -1;
}

/* ---- the good box: two GPUs behind one switch -------------------------------------------------
 */

#define BRIDGE "/sys/devices/pci0000:00/0000:00:01.0"
#define SWITCH BRIDGE "/0000:01:00.0"

/* Extended configuration: error reporting, then ACS with this control; < 0: without ACS. */
static void put_config(const char *folder, int control) {
    unsigned char c[4096] = {0};
    char path[300];
    const unsigned next = control < 0 ? 0 : 0x148;
    c[0x100] = 0x01, c[0x102] = (unsigned char)(1 | (next & 15) << 4),
    c[0x103] = (unsigned char)(next >> 4);
    if (control >= 0) {
        c[0x148] = 0x0d, c[0x14a] = 1, c[0x14c] = 0x1f;
        c[0x14e] = (unsigned char)control, c[0x14f] = (unsigned char)(control >> 8);
    }
    snprintf(path, sizeof path, "%s/config", folder);
    put_bytes(path, c, sizeof c);
}

static void link_device(const char *name, const char *below) {
    char at[600], to[300];
    put("/sys/bus/pci/devices", NULL);
    snprintf(at, sizeof at, "%s/sys/bus/pci/devices/%s", root, name);
    snprintf(to, sizeof to, "../../../devices/%s", below + strlen("/sys/devices/"));
    unlink(at);
    assert_int_equal(symlink(to, at), 0);
}

static void put_gpu(const char *name, const char *folder, const char *width) {
    static const struct {
        const char *file, *text;
    } rows[] = {{"numa_node", "0\n"},
                {"local_cpulist", "0-15\n"},
                {"current_link_speed", "32.0 GT/s PCIe\n"},
                {"max_link_speed", "32.0 GT/s PCIe\n"},
                {"max_link_width", "16\n"},
                {"iommu_group/type", "identity\n"},
                {"resource", "0x00000000d0000000 0x00000000d3ffffff 0x0000000000040200\n"
                             "0x0000200000000000 0x00002017ffffffff 0x000000000014220c\n"}};
    char path[300];
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        snprintf(path, sizeof path, "%s/%s", folder, rows[i].file);
        put(path, rows[i].text);
    }
    snprintf(path, sizeof path, "%s/current_link_width", folder);
    put(path, width);
    link_device(name, folder);
}

static int good_box(void **state) {
    if (new_host(state) < 0) return -1;
    *fake = (struct fake_nvml){.n = 2};
    for (int i = 0; i < 2; i++)
        fake->device[i] = (struct fake_nvml_device){.total = 96 * GIB, .used = GIB};
    strcpy(fake->device[0].uuid, "GPU-a"), strcpy(fake->device[0].bus_id, "00000000:03:00.0");
    strcpy(fake->device[1].uuid, "GPU-b"), strcpy(fake->device[1].bus_id, "00000000:04:00.0");
    put_config(BRIDGE, 0);
    put_config(SWITCH, 0);
    link_device("0000:00:01.0", BRIDGE);
    link_device("0000:01:00.0", SWITCH);
    put_gpu("0000:03:00.0", SWITCH "/0000:03:00.0", "16\n");
    put_gpu("0000:04:00.0", SWITCH "/0000:04:00.0", "16\n");
    put("/sys/class/iommu/dmar0", NULL);
    put("/proc/cmdline", "root=/dev/sda1 iommu=pt quiet\n");
    put("/proc/self/limits", limits_file);
    put("/proc/meminfo", "MemTotal:       1056000000 kB\nMemAvailable:   900000000 kB\n"
                         "HugePages_Total:       0\nHugepagesize:       2048 kB\n");
    put("/proc/sys/kernel/hostname", "box\n");
    put("/sys/devices/system/node/online", "0-1\n");
    put("/sys/devices/system/cpu/online", "0-31\n");
    put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    put("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "Y\n");
    put("/dev/shm", NULL);
    return 0;
}

static void examine(struct doctor *d) {
    struct device_memory m = {0};
    struct err_text err = {0};
    char *env[] = {"PATH=/bin", "NCCL_PROTO=LL", NULL};
    assert_int_equal(doctor_init(d, root), OK);
    if (device_memory_open(&m, "nvml", &err) < 0) fail_msg("%s", err.text);
    doctor_look_gpus(d, &m);
    device_memory_close(&m);
    doctor_look_pci(d);
    doctor_look_host(d);
    doctor_look_nccl(d, env);
}

/* The findings but that of the missing NCCL, which the good box has too, as "level what | found".
 */
static json_t *only_finding(struct doctor *d, const char *level, const char *what,
                            const char *found) {
    json_t *f, *mine = NULL;
    size_t i, n = 0;
    json_array_foreach(d->findings, i, f) {
        const char *w = json_string_value(json_object_get(f, "what"));
        if (!strcmp(w, "NCCL")) continue;
        n++;
        mine = f;
    }
    if (n != 1 || strcmp(json_string_value(json_object_get(mine, "level")), level) ||
        !strstr(json_string_value(json_object_get(mine, "what")), what) ||
        !strstr(json_string_value(json_object_get(mine, "found")), found))
        fail_msg("expected one finding: %s %s: %s, found %zu:\n%s", level, what, found, n,
                 json_dumps(d->findings, JSON_INDENT(2)));
    assert_true(json_string_length(json_object_get(mine, "fix")) > 0);
    return mine;
}

static const char *text_at(json_t *o, const char *key) {
    return json_string_value(json_object_get(o, key));
}

static void of_a_good_box_nothing_is_said(void **state) {
    UNUSED(state);
    struct doctor d;
    examine(&d);
    json_t *gpus = json_object_get(d.report, "gpus"), *gpu = json_array_get(gpus, 1),
           *pair = json_array_get(json_object_get(d.report, "p2p"), 0);
    assert_int_equal(json_array_size(gpus), 2);
    assert_string_equal(text_at(gpu, "pci"), "0000:04:00.0");
    assert_string_equal(text_at(gpu, "uuid"), "GPU-b");
    assert_string_equal(text_at(gpu, "cores"), "0-15");
    assert_int_equal(json_integer_value(json_object_get(gpu, "numa_node")), 0);
    json_t *pcie = json_object_get(gpu, "pcie");
    assert_int_equal(json_integer_value(json_object_get(pcie, "generation")), 5);
    assert_int_equal(json_integer_value(json_object_get(pcie, "width")), 16);
    assert_string_equal(text_at(pair, "driver"), "yes");
    assert_string_equal(text_at(pair, "way"), "switch");
    assert_string_equal(text_at(json_object_get(d.report, "iommu"), "mode"), "pass-through");
    assert_int_equal(json_array_size(json_object_get(d.report, "acs")), 2);
    assert_string_equal(text_at(d.report, "driver"), "580.00.01");
    json_t *nccl = json_object_get(d.report, "nccl");
    assert_string_equal(text_at(json_object_get(nccl, "environment"), "NCCL_PROTO"), "LL");
    assert_true(json_is_null(json_object_get(nccl, "version")));
    assert_int_equal(json_array_size(d.findings), 1); /* that NCCL is missing */
    assert_true(doctor_worst(&d) == DOCTOR_SLOWS);
    doctor_deinit(&d);
}

/* ---- one thing wrong each ---------------------------------------------------------------------
 */

static void acs_that_redirects_is_named_with_its_bridge_and_the_command(void **state) {
    UNUSED(state);
    struct doctor d;
    put_config(SWITCH, 0x1d);
    examine(&d);
    json_t *f = only_finding(&d, "slows", "ACS", "0000:01:00.0");
    assert_non_null(
        strstr(text_at(f, "fix"), "for b in 0000:01:00.0; do setpci -s $b ECAP_ACS+6.w=0"));
    doctor_deinit(&d);
    put_config(BRIDGE, 0x04);
    examine(&d);
    only_finding(&d, "slows", "ACS", "0000:00:01.0 0000:01:00.0");
    doctor_deinit(&d);
}

static void a_bridge_without_acs_is_fine_and_one_unread_is_said_to_be(void **state) {
    UNUSED(state);
    struct doctor d;
    put_config(BRIDGE, -1);
    examine(&d);
    assert_int_equal(json_array_size(d.findings), 1);
    doctor_deinit(&d);
    put_bytes(SWITCH "/config", "short", 5);
    examine(&d);
    only_finding(&d, "note", "ACS", "1 that cannot");
    doctor_deinit(&d);
}

static void an_iommu_that_translates_is_told(void **state) {
    UNUSED(state);
    struct doctor d;
    put(SWITCH "/0000:03:00.0/iommu_group/type", "DMA-FQ\n");
    put("/proc/cmdline", "root=/dev/sda1 amd_iommu=on\n");
    examine(&d);
    only_finding(&d, "slows", "IOMMU", "translating, group type DMA-FQ");
    assert_string_equal(text_at(json_object_get(d.report, "iommu"), "kernel_options"),
                        "amd_iommu=on");
    doctor_deinit(&d);
}

static void a_link_of_half_its_width_is_told(void **state) {
    UNUSED(state);
    struct doctor d;
    put(SWITCH "/0000:04:00.0/current_link_width", "8\n");
    examine(&d);
    only_finding(&d, "slows", "PCIe width of GPU 1, 0000:04:00.0", "x8 of x16");
    doctor_deinit(&d);
    memcpy(fake->device[1].link, (unsigned[]){5, 5, 4, 16}, sizeof fake->device[1].link);
    examine(&d);
    only_finding(&d, "slows", "PCIe width of GPU 1", "x4 of x16"); /* the driver's word first */
    doctor_deinit(&d);
}

static void a_window_smaller_than_the_memory_is_told(void **state) {
    UNUSED(state);
    struct doctor d;
    put(SWITCH "/0000:03:00.0/resource",
        "0x0 0x0 0x0\n0x0000200000000000 0x000020000fffffff 0x14220c\n");
    examine(&d);
    only_finding(&d, "slows", "memory window of GPU 0", "256 MiB of 98304 MiB");
    doctor_deinit(&d);
}

static void peers_that_do_not_reach_each_other_are_named(void **state) {
    UNUSED(state);
    struct doctor d;
    fake->peer = 3;
    examine(&d);
    only_finding(&d, "slows", "peer access", "the I/O hub forbids it for GPUs 0-1");
    doctor_deinit(&d);
}

static void a_gpu_elsewhere_is_across_the_system(void **state) {
    UNUSED(state);
    struct doctor d;
    put_gpu("0000:84:00.0", "/sys/devices/pci0000:80/0000:80:01.0/0000:84:00.0", "16\n");
    put("/sys/devices/pci0000:80/0000:80:01.0/0000:84:00.0/numa_node", "1\n");
    put_config("/sys/devices/pci0000:80/0000:80:01.0", 0);
    link_device("0000:80:01.0", "/sys/devices/pci0000:80/0000:80:01.0");
    strcpy(fake->device[1].bus_id, "00000000:84:00.0");
    examine(&d);
    json_t *pair = json_array_get(json_object_get(d.report, "p2p"), 0);
    assert_string_equal(text_at(pair, "way"), "system");
    doctor_deinit(&d);
}

static void a_stranger_in_the_memory_stops_and_is_named_with_pid_and_bytes(void **state) {
    UNUSED(state);
    struct doctor d;
    fake->device[1].n = 1, fake->device[1].pid[0] = 4242, fake->device[1].bytes[0] = 20 * GIB;
    fake->device[1].used = 21 * GIB;
    put("/proc/4242/comm", "python3\n");
    examine(&d);
    json_t *f =
        only_finding(&d, "stops", "memory of GPU 1", "process 4242 (python3) with 20480 MiB");
    assert_non_null(strstr(text_at(f, "fix"), "kill 4242"));
    assert_true(doctor_worst(&d) == DOCTOR_STOPS);
    doctor_deinit(&d);
    put("/proc/4242/comm", "octavo-worker-c\n"); /* as the kernel cuts it */
    examine(&d);
    only_finding(&d, "note", "memory of GPU 1", "octavo-worker-c");
    doctor_deinit(&d);
    fake->device[1].bytes[0] = 4 << 20, fake->device[1].used = GIB;
    put("/proc/4242/comm", "Xorg\n");
    examine(&d);
    only_finding(&d, "note", "memory of GPU 1", "Xorg");
    doctor_deinit(&d);
}

static void memory_that_nobody_holds_and_a_lost_device_stop(void **state) {
    UNUSED(state);
    struct doctor d;
    fake->device[0].used = 50 * GIB;
    examine(&d);
    only_finding(&d, "stops", "memory of GPU 0", "51200 MiB that no process");
    doctor_deinit(&d);
    fake->device[0].used = GIB, fake->device[0].result = 15;
    examine(&d);
    only_finding(&d, "stops", "GPU 0, Fake GPU GPU-a 00000000:03:00.0", "GPU is lost");
    doctor_deinit(&d);
}

static void limits_that_are_too_small_are_told(void **state) {
    UNUSED(state);
    struct doctor d;
    put("/proc/self/limits",
        "Max open files            1024                 4096          files\n");
    examine(&d);
    only_finding(&d, "slows", "open files", "1024");
    doctor_deinit(&d);
    put("/proc/self/limits", limits_file);
    put("/proc/self/cgroup", "0::/system.slice/octavo.service\n");
    put("/sys/fs/cgroup/system.slice/octavo.service/memory.max", "max\n");
    put("/sys/fs/cgroup/system.slice/memory.max", "4294967296\n");
    put("/sys/fs/cgroup/system.slice/memory.current", "3221225472\n");
    examine(&d);
    only_finding(&d, "stops", "memory of the control group", "3072 MiB of 4096 MiB");
    doctor_deinit(&d);
    put("/sys/fs/cgroup/system.slice/memory.stat", /* of it files that were read */
        "anon 1073741824\nfile 2147483648\ninactive_file 1073741824\nactive_file 1073741824\n");
    examine(&d);
    assert_int_equal(json_array_size(d.findings), 1); /* that NCCL is missing */
    assert_int_equal(json_integer_value(json_object_get(json_object_get(d.report, "limits"),
                                                        "cgroup_memory_used_bytes")),
                     1 << 30);
    doctor_deinit(&d);
}

static void memory_set_aside_in_huge_pages_is_told(void **state) {
    UNUSED(state);
    struct doctor d;
    put("/proc/meminfo", "MemTotal:       8388608 kB\nMemAvailable:   900000 kB\n"
                         "HugePages_Total:    3072\nHugepagesize:       2048 kB\n");
    examine(&d);
    only_finding(&d, "slows", "huge pages", "6144 MiB of 8192 MiB");
    doctor_deinit(&d);
}

static void a_driver_without_its_library_still_shows_the_gpus(void **state) {
    UNUSED(state);
    struct doctor d;
    struct device_memory m;
    device_memory_open(&m, "none", NULL);
    put("/proc/driver/nvidia/gpus/0000:03:00.0/information", "Model: \t\t NVIDIA Thing\nIRQ: 5\n");
    put("/proc/driver/nvidia/version", "NVRM version: 580.00.01\nGCC\n");
    assert_int_equal(doctor_init(&d, root), OK);
    doctor_look_gpus(&d, &m);
    doctor_look_pci(&d);
    only_finding(&d, "slows", "NVML", "1 GPUs and no such library");
    json_t *gpu = json_array_get(json_object_get(d.report, "gpus"), 0);
    assert_string_equal(text_at(gpu, "name"), "NVIDIA Thing");
    assert_string_equal(text_at(gpu, "cores"), "0-15");
    assert_string_equal(text_at(d.report, "driver"), "NVRM version: 580.00.01");
    doctor_deinit(&d);
}

static void an_empty_host_is_examined_too(void **state) {
    UNUSED(state);
    struct doctor d;
    struct device_memory m;
    char *env[] = {NULL}, *text = NULL;
    size_t n;
    device_memory_open(&m, "none", NULL);
    drop_host(state);
    assert_int_equal(doctor_init(&d, root), OK);
    doctor_look_gpus(&d, &m);
    doctor_look_pci(&d);
    doctor_look_host(&d);
    doctor_look_nccl(&d, env);
    assert_true(doctor_worst(&d) == DOCTOR_SLOWS); /* no /dev/shm */
    FILE *f = open_memstream(&text, &n);
    doctor_print(&d, f);
    fclose(f);
    assert_non_null(strstr(text, "What to fix\n 1. [slows] /dev/shm"));
    free(text);
    doctor_deinit(&d);
}

static void the_text_shows_what_the_report_holds_worst_first(void **state) {
    UNUSED(state);
    struct doctor d;
    char *text = NULL;
    size_t n;
    fake->device[1].n = 1, fake->device[1].pid[0] = 4242, fake->device[1].bytes[0] = 20 * GIB;
    fake->device[1].used = 21 * GIB;
    put_config(SWITCH, 0x1d);
    examine(&d);
    FILE *f = open_memstream(&text, &n);
    doctor_print(&d, f);
    fclose(f);
    static const char *const lines[] = {
        "driver      580.00.01, 2 GPUs\n",
        "GPU 1       Fake GPU, GPU-b, 0000:04:00.0\n",
        "memory 96 GiB, 21 GiB used, 75 GiB free; window 96 GiB; fine\n",
        "PCIe generation 5 of 5, x16 of x16; NUMA node 0, cores 0-15\n",
        "process 4242 (not visible here): 20 GiB\n",
        "GPU 1 switch   -       \n",
        "IOMMU       pass-through; kernel options iommu=pt\n",
        "ACS         bridge 0000:01:00.0: control 001d, redirects peers\n",
        "NCCL        none: no ncclGetVersion in it\n            NCCL_PROTO=LL\n",
        "What to fix\n 1. [stops] memory of GPU 1\n    expected: ",
        "\n 2. [slows] ACS\n"};
    for (size_t i = 0; i < ARRAY_LEN(lines); i++)
        if (!strstr(text, lines[i])) fail_msg("expected '%s', found:\n%s", lines[i], text);
    free(text);
    doctor_deinit(&d);
}

/* ---- links ------------------------------------------------------------------------------------
 */

/* A worker whose rank on GPU 2 dies wherever it is not alone with itself. */
static void the_gpu_that_does_not_add_up_is_found_by_its_pairs(void **state) {
    UNUSED(state);
    static struct gpus gpus = {.n = 3, .n_dealt = 3, .dealt = {0, 1, 2}};
    const char *build = getenv("OCTAVO_BUILD_ROOT");
    char script[1400], path[500];
    struct doctor d;
    snprintf(script, sizeof script,
             "#!/bin/sh\ncase \" $* \" in *\" --device-index 2 \"*) kill -KILL $$ ;; esac\n"
             "exec '%s/octavo-worker' \"$@\"\n",
             build ? build : ".");
    put("/worker", script);
    snprintf(path, sizeof path, "%s/worker", root);
    assert_int_equal(chmod(path, 0755), 0);
    const struct doctor_ranks ranks = {
        .worker = path, .gpus = &gpus, .collective = "shm", .all = 3, .limit_s = 60};
    assert_int_equal(doctor_init(&d, root), OK);
    doctor_try_collectives(&d, &ranks);
    json_t *runs = json_object_get(d.report, "collectives");
    assert_int_equal(json_array_size(runs), 2);
    assert_true(json_is_true(json_object_get(json_array_get(runs, 0), "right")));
    assert_string_equal(text_at(json_array_get(runs, 1), "failure"),
                        "rank 2 died of signal 9 in: start");
    json_t *f = json_array_get(d.findings, 1);
    assert_string_equal(text_at(f, "level"), "stops");
    assert_string_equal(text_at(f, "what"), "pairs of GPUs over shm");
    assert_string_equal(text_at(f, "found"), "not GPUs 0-2 1-2 of 3 pairs tried");
    doctor_deinit(&d);
}

/* ---- the bundle -------------------------------------------------------------------------------
 */

static void no_secret_gets_into_a_bundle(void **state) {
    UNUSED(state);
    static const struct {
        const char *text, *clean;
    } rows[] = {
        {"GET / Authorization: Bearer abc.DEF-1\n", "GET / Authorization: Bearer [removed]\n"},
        {"{\"api_key\": \"hunter2\", \"n\": 1}", "{\"api_key\": \"[removed]\", \"n\": 1}"},
        {"OCTAVO_COOKIE=0123 HF_TOKEN=hf_x PATH=/bin",
         "OCTAVO_COOKIE=[removed] HF_TOKEN=[removed] PATH=/bin"},
        {"key my+own(key here", "key [removed] here"},
        {"key odd\\Eone] here", "key [removed] here"},
        {"used sk-abcdefgh12 twice sk-abcdefgh12", "used [removed] twice [removed]"},
        {"octavo_tokens_total 12\nstep token=7", "octavo_tokens_total 12\nstep token=7"},
        {"", ""},
    };
    const char *keys[] = {"my+own(key", "odd\\Eone]", NULL};
    char path[500];
    struct bundle *b;
    struct err_text err = {0};
    size_t n;
    snprintf(path, sizeof path, "%s/b.tar", root);
    assert_int_equal(bundle_open(&b, path, "x", keys, &err), OK);
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        char *clean = bundle_clean(b, rows[i].text, strlen(rows[i].text), &n);
        assert_string_equal(clean, rows[i].clean);
        assert_int_equal(n, strlen(rows[i].clean));
        free(clean);
    }
    bundle_add(b, "big", "", 0);
    assert_int_equal(bundle_close(b, &err), OK);
    snprintf(path, sizeof path, "%s/no/such/folder/b.tar", root);
    assert_int_equal(bundle_open(&b, path, "x", keys, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "No such file"));
}

int main(void) {
#define ON_A_BOX(test) cmocka_unit_test_setup_teardown(test, good_box, drop_host)
    const struct CMUnitTest tests[] = {
        ON_A_BOX(of_a_good_box_nothing_is_said),
        ON_A_BOX(acs_that_redirects_is_named_with_its_bridge_and_the_command),
        ON_A_BOX(a_bridge_without_acs_is_fine_and_one_unread_is_said_to_be),
        ON_A_BOX(an_iommu_that_translates_is_told),
        ON_A_BOX(a_link_of_half_its_width_is_told),
        ON_A_BOX(a_window_smaller_than_the_memory_is_told),
        ON_A_BOX(peers_that_do_not_reach_each_other_are_named),
        ON_A_BOX(a_gpu_elsewhere_is_across_the_system),
        ON_A_BOX(a_stranger_in_the_memory_stops_and_is_named_with_pid_and_bytes),
        ON_A_BOX(memory_that_nobody_holds_and_a_lost_device_stop),
        ON_A_BOX(limits_that_are_too_small_are_told),
        ON_A_BOX(memory_set_aside_in_huge_pages_is_told),
        ON_A_BOX(a_driver_without_its_library_still_shows_the_gpus),
        ON_A_BOX(an_empty_host_is_examined_too),
        ON_A_BOX(the_text_shows_what_the_report_holds_worst_first),
        ON_A_BOX(the_gpu_that_does_not_add_up_is_found_by_its_pairs),
        ON_A_BOX(no_secret_gets_into_a_bundle),
    };
    return cmocka_run_group_tests(tests, load_library, NULL);
}
