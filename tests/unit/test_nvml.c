/* tests/unit/test_nvml.c: what the driver's library says, as samples: with a stand-in library, and
 * without any.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/device_thread.h"
#include "coordinator/nvml.h"
#include "tests/unit/fake_nvml.h"

static char library[600];
static struct fake_nvml *fake;
static void *handle;

static int load_library(void **state) {
    UNUSED(state);
    const char *build = getenv("OCTAVO_BUILD_ROOT");
    snprintf(library, sizeof library, "%s/libfake-nvml.so", build ? build : ".");
    handle = dlopen(library, RTLD_NOW);
    if (!handle) fail_msg("%s", dlerror());
    fake = dlsym(handle, "fake_nvml_state");
    return fake ? 0 : -1;
}

static int reset(void **state) {
    UNUSED(state);
    setenv("OCTAVO_NVML", library, 1);
    *fake = (struct fake_nvml){.n = 2};
    fake->device[0] = (struct fake_nvml_device){.uuid = "GPU-11111111-aaaa",
                                                .bus_id = "00000000:01:00.0",
                                                .total = 1000, .used = 600,
                                                .n = 2, .pid = {41, 42}, .bytes = {300, 200}};
    fake->device[1] = (struct fake_nvml_device){.uuid = "GPU-22222222-bbbb",
                                                .bus_id = "00000000:C1:00.0", .total = 1000};
    return 0;
}

static void open_it(struct device_memory *m) {
    struct err_text err = {0};
    if (device_memory_open(m, "nvml", &err) < 0) fail_msg("%s", err.text);
}

static void a_device_is_read_with_all_who_hold_memory(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct device_sample s;
    char text[200];
    fake->device[0].bytes[1] = UINT64_MAX;
    fake->device[0].drawing = 99;
    open_it(&m);
    assert_int_equal(device_memory_count(&m), 2);
    device_memory_look(&m, 0, 1, &s);
    assert_int_equal(s.health, DEVICE_FINE);
    assert_int_equal(s.total_bytes, 1000);
    assert_int_equal(s.used_bytes, 600);
    assert_int_equal(s.n_holders, 3);
    assert_int_equal(s.holders[0].pid, 41);
    assert_int_equal(s.holders[0].bytes, 300);
    assert_true(s.holders[1].bytes == DEVICE_BYTES_UNKNOWN);
    assert_int_equal(s.holders[2].pid, 99);
    device_memory_describe(&m, 0, text, sizeof text);
    assert_string_equal(text, "Fake GPU GPU-11111111-aaaa 00000000:01:00.0");
    device_memory_close(&m);
    assert_int_equal(fake->n_open, 0);
}

static void a_device_is_found_by_the_names_that_a_worker_gives_it(void **state) {
    UNUSED(state);
    struct device_memory m;
    open_it(&m);
    assert_int_equal(device_memory_find(&m, "Other name GPU-22222222-bbbb 0000:09:00.0"), 1);
    assert_int_equal(device_memory_find(&m, "GPU-x 0000:c1:00.0"), 1);
    assert_int_equal(device_memory_find(&m, "GPU-x 0000:01:00.0"), 0);
    assert_int_equal(device_memory_find(&m, "GPU-x 0001:01:00.0"), -1);
    assert_int_equal(device_memory_find(&m, "cpu"), -1);
    device_memory_close(&m);
}

static void a_lost_device_is_told_from_one_that_cannot_be_read(void **state) {
    UNUSED(state);
    static const struct {
        int memory, list;
        enum device_health health;
        const char *error;
    } rows[] = {{15, 0, DEVICE_LOST, "GPU is lost"},
                {16, 0, DEVICE_LOST, "GPU requires reset"},
                {0, 15, DEVICE_LOST, "GPU is lost"},
                {999, 0, DEVICE_UNREADABLE, "Unknown Error"},
                {0, 999, DEVICE_UNREADABLE, "Unknown Error"},
                {0, 3, DEVICE_FINE, ""}}; /* no list of processes is no error */
    struct device_memory m;
    struct device_sample s;
    open_it(&m);
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        fake->device[0].result = rows[i].memory;
        fake->device[0].list_result = rows[i].list;
        device_memory_look(&m, 0, 1, &s);
        if (s.health != rows[i].health || strcmp(s.error, rows[i].error))
            fail_msg("row %zu: expected %d %s, found %d %s", i, (int)rows[i].health, rows[i].error,
                     (int)s.health, s.error);
    }
    device_memory_close(&m);
}

static void an_xid_is_told_with_the_error_and_off_the_bus_is_lost(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct device_sample s;
    open_it(&m);
    fake->device[1].xid = 31;
    device_memory_look(&m, 1, 1, &s);
    assert_int_equal(s.health, DEVICE_FINE); /* a fault of a process, not of the device */
    fake->device[1].result = 15;
    device_memory_look(&m, 1, 1, &s);
    assert_string_equal(s.error, "GPU is lost, last Xid 31");
    fake->device[1].result = 0;
    fake->device[1].xid = 79;
    device_memory_look(&m, 1, 1, &s);
    assert_int_equal(s.health, DEVICE_LOST);
    assert_non_null(strstr(s.error, "Xid 79"));
    device_memory_look(&m, 0, 1, &s);
    assert_int_equal(s.health, DEVICE_FINE);
    device_memory_close(&m);
}

static void a_device_the_driver_no_longer_knows_is_lost(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct device_sample s;
    fake->device[1].handle_result = 15;
    open_it(&m);
    device_memory_look(&m, 1, 1, &s);
    assert_int_equal(s.health, DEVICE_LOST);
    device_memory_close(&m);
}

static void more_processes_than_can_be_listed_are_counted(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct device_sample s;
    open_it(&m);
    fake->device[0].n = 70;
    for (unsigned i = 0; i < 70; i++) fake->device[0].pid[i] = 1000 + i;
    device_memory_look(&m, 0, 1, &s);
    assert_int_equal(s.n_holders, DEVICE_HOLDERS_MAX);
    assert_int_equal(s.n_unlisted, 70 - DEVICE_HOLDERS_MAX);
    fake->device[0].n = FAKE_NVML_PROCESSES;
    device_memory_look(&m, 0, 1, &s);
    assert_int_equal(s.health, DEVICE_FINE);
    assert_int_equal(s.n_unlisted, FAKE_NVML_PROCESSES);
    device_memory_close(&m);
}

static void an_inventory_gets_names_links_and_peers(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct nvml_facts f;
    char driver[96];
    memcpy(fake->device[1].link, (unsigned[]){4, 5, 8, 16}, sizeof fake->device[1].link);
    open_it(&m);
    nvml_facts(&m, 1, &f);
    assert_string_equal(f.name, "Fake GPU");
    assert_string_equal(f.uuid, "GPU-22222222-bbbb");
    assert_string_equal(f.pci, "00000000:C1:00.0");
    assert_string_equal(f.serial, "");
    assert_true(f.generation == 4 && f.generation_max == 5 && f.width == 8 && f.width_max == 16);
    nvml_facts(&m, 0, &f);
    assert_int_equal(f.width, 0); /* not told */
    nvml_driver(&m, driver, sizeof driver);
    assert_string_equal(driver, "580.00.01");
    assert_string_equal(nvml_peer(&m, 0, 1), "yes");
    fake->peer = 1;
    assert_string_equal(nvml_peer(&m, 0, 1), "the chipset forbids it");
    fake->peer = 77;
    assert_string_equal(nvml_peer(&m, 0, 1), "unknown");
    device_memory_close(&m);
}

static void an_inventory_of_another_source_is_empty(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct nvml_facts f;
    char driver[96];
    assert_int_equal(device_memory_open(&m, "none", NULL), OK);
    nvml_facts(&m, 0, &f);
    assert_string_equal(f.name, "");
    nvml_driver(&m, driver, sizeof driver);
    assert_string_equal(driver, "");
    assert_string_equal(nvml_peer(&m, 0, 1), "unknown");
    device_memory_close(&m);
}

/* The caller gets on whatever the driver does, and hears later what it said. */
static void a_driver_that_hangs_holds_nobody_up(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct device_sample s;
    struct err_text err = {0};
    char text[200];
    if (device_thread_open(&m, "nvml", 20000, &err) < 0) fail_msg("%s", err.text);
    assert_int_equal(device_memory_count(&m), 2);
    do device_memory_look(&m, 0, 1000, &s); /* a busy machine may be late */
    while (s.health == DEVICE_SILENT);
    assert_int_equal(s.health, DEVICE_FINE);
    assert_int_equal(s.used_bytes, 600);
    fake->hang = 1;
    for (uint64_t now = 100000; now <= 3000000; now += 100000) {
        device_memory_look(&m, 0, now, &s);
        assert_int_equal(s.health, DEVICE_SILENT);
    }
    assert_string_equal(s.error, "the driver has not answered for 2.9 s");
    device_memory_describe(&m, 0, text, sizeof text);
    assert_non_null(strstr(text, "GPU-11111111-aaaa"));
    fake->device[0].used = 700;
    fake->hang = 0;
    do device_memory_look(&m, 0, 9000000, &s); /* what was asked long ago is asked again */
    while (s.health == DEVICE_SILENT);
    assert_int_equal(s.asked_us, 9000000);
    assert_int_equal(s.used_bytes, 700);
    device_memory_close(&m);
    assert_int_equal(fake->n_open, 0);
}

static void a_driver_that_hangs_while_it_starts_is_given_up(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct err_text err = {0};
    fake->hang = 2;
    assert_int_equal(device_thread_open(&m, "nvml", 20, &err), ERR_TIMEOUT);
    assert_non_null(strstr(err.text, "expected the driver to answer within 0.0 s"));
    fake->hang = 0;
    while (fake->n_shut == 0) usleep(100); /* it comes back, and cleans up */
}

static void expect_absent(const char *sentence) {
    for (int thread = 0; thread < 2; thread++) {
        struct device_memory m = {0};
        struct err_text err = {0};
        int rc = thread ? device_thread_open(&m, "nvml", DEVICE_OPEN_MS, &err)
                        : device_memory_open(&m, "nvml", &err);
        assert_int_equal(rc, ERR_NOT_FOUND);
        if (!strstr(err.text, sentence)) fail_msg("expected %s, found %s", sentence, err.text);
        assert_non_null(m.ops);
        assert_int_equal(device_memory_count(&m), 0); /* and it can be asked all the same */
        device_memory_close(&m);
    }
}

static void a_machine_without_the_library_or_the_driver_says_so(void **state) {
    UNUSED(state);
    setenv("OCTAVO_NVML", "/nowhere/libnvidia-ml.so.1", 1);
    expect_absent("/nowhere/libnvidia-ml.so.1");
    setenv("OCTAVO_NVML", "libm.so.6", 1);
    expect_absent("libm.so.6: expected nvmlInit_v2, found nothing of that name");
    setenv("OCTAVO_NVML", library, 1);
    fake->init_result = 9;
    expect_absent("Driver Not Loaded");
    fake->init_result = 0;
    fake->n = 0;
    expect_absent("expected devices, found: none");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_device_is_read_with_all_who_hold_memory, reset),
        cmocka_unit_test_setup(a_device_is_found_by_the_names_that_a_worker_gives_it, reset),
        cmocka_unit_test_setup(a_lost_device_is_told_from_one_that_cannot_be_read, reset),
        cmocka_unit_test_setup(an_xid_is_told_with_the_error_and_off_the_bus_is_lost, reset),
        cmocka_unit_test_setup(a_device_the_driver_no_longer_knows_is_lost, reset),
        cmocka_unit_test_setup(more_processes_than_can_be_listed_are_counted, reset),
        cmocka_unit_test_setup(a_driver_that_hangs_holds_nobody_up, reset),
        cmocka_unit_test_setup(a_driver_that_hangs_while_it_starts_is_given_up, reset),
        cmocka_unit_test_setup(an_inventory_gets_names_links_and_peers, reset),
        cmocka_unit_test_setup(an_inventory_of_another_source_is_empty, reset),
        cmocka_unit_test_setup(a_machine_without_the_library_or_the_driver_says_so, reset),
    };
    return cmocka_run_group_tests(tests, load_library, NULL);
}
