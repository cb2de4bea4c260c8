/* tests/unit/test_gpus.c: GPUs are counted, dealt and given their cores, on hosts made of folders.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/gpus.h"
#include "coordinator/pin.h"
#include "tests/unit/fake_root.h"

/* Four GPUs on two nodes of four cores, listed in another order than the bus's. */
static void four_gpus(void) {
    put("/proc/driver/nvidia/gpus/0000:c1:00.0", NULL);
    put("/proc/driver/nvidia/gpus/0000:01:00.0", NULL);
    put("/proc/driver/nvidia/gpus/0000:81:00.0", NULL);
    put("/proc/driver/nvidia/gpus/0000:41:00.0", NULL);
    put("/sys/bus/pci/devices/0000:01:00.0/local_cpulist", "0-1,8-9\n");
    put("/sys/bus/pci/devices/0000:41:00.0/local_cpulist", "0-1,8-9\n");
    put("/sys/bus/pci/devices/0000:81:00.0/local_cpulist", "4-7\n");
}

static void expect_cores(const struct gpus *g, int rank, int world, const char *expected) {
    char found[PIN_TEXT_BYTES];
    cpu_set_t allowed, mine;
    CPU_ZERO(&allowed);
    for (int c = 0; c < 12; c++) CPU_SET((size_t)c, &allowed);
    gpus_cores(g, &mine, &allowed, rank, world);
    pin_text(found, &mine);
    if (strcmp(found, expected))
        fail_msg("rank %d of %d: expected cores %s, found %s", rank, world, expected, found);
}

static void gpus_stand_in_the_order_of_the_bus_and_ranks_get_the_cores_beside_them(void **state) {
    UNUSED(state);
    struct gpus g;
    four_gpus();
    gpus_find(&g, root, NULL);
    assert_int_equal(g.n, 4);
    assert_string_equal(g.gpu[1].pci, "0000:41:00.0");
    assert_int_equal(gpus_deal(&g, NULL, NULL), OK);
    assert_int_equal(gpus_ranks(&g), 4);
    expect_cores(&g, 0, 4, "0-1"); /* ranks 0 and 1 share a node */
    expect_cores(&g, 1, 4, "8-9");
    expect_cores(&g, 2, 4, "4-7");
    expect_cores(&g, 3, 4, "0-11"); /* its node is not known */
    expect_cores(&g, 4, 8, "8");    /* two ranks on each GPU: 0 1 4 5 share four cores */
    assert_int_equal(gpus_of_rank(&g, 6), 2);
}

static void a_list_says_which_ranks_get_which(void **state) {
    UNUSED(state);
    struct gpus g;
    struct err_text err = {0};
    four_gpus();
    gpus_find(&g, root, NULL);
    assert_int_equal(gpus_deal(&g, "2,2,0", &err), OK);
    assert_int_equal(gpus_ranks(&g), 2);
    assert_int_equal(gpus_of_rank(&g, 1), 2);
    assert_int_equal(gpus_of_rank(&g, 5), 0);
    const char *const wrong[] = {"", "4", "0,", ",0", "0,x", "-1", "1 2", "all"};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        if (gpus_deal(&g, wrong[i], &err) != ERR_SETUP) fail_msg("\"%s\" was taken", wrong[i]);
        assert_non_null(strstr(err.text, "--devices: expected"));
    }
}

/* The driver counts otherwise than the bus, and writes addresses with a longer domain. */
static int count_driver(void *ctx) {
    UNUSED(ctx);
    return 3;
}

static void describe_driver(void *ctx, int device, char *out, size_t n) {
    static const char *const buses[] = {"81", "01", "41"};
    UNUSED(ctx);
    snprintf(out, n, "NVIDIA X GPU-0%d 00000000:%s:00.0 serial 7", device, buses[device]);
}

static void the_driver_knows_a_rank_s_device_by_its_address(void **state) {
    UNUSED(state);
    static const struct device_memory_ops ops = {.name = "nvml", .count = count_driver,
                                                 .describe = describe_driver};
    const struct device_memory driver = {.ops = &ops};
    struct gpus g;
    bool on[DEVICE_MAX];
    four_gpus();
    gpus_find(&g, root, NULL);
    assert_int_equal(gpus_deal(&g, "1,2", NULL), OK);
    assert_true(gpus_devices(&g, 2, &driver, on));
    assert_true(on[0] && !on[1] && on[2] && !on[3]);
    assert_true(gpus_devices(&g, 1, &driver, on)); /* one rank gets one of them */
    assert_true(!on[0] && !on[1] && on[2]);
    assert_int_equal(gpus_deal(&g, "3", NULL), OK); /* c1: not the driver's */
    assert_false(gpus_devices(&g, 1, &driver, on));
    gpus_find(&g, root, "GPU-77");
    assert_int_equal(gpus_deal(&g, NULL, NULL), OK); /* without an address */
    assert_false(gpus_devices(&g, 1, &driver, on));
}

static void only_visible_devices_count(void **state) {
    UNUSED(state);
    struct gpus g;
    four_gpus();
    gpus_find(&g, root, "2,0");
    assert_int_equal(g.n, 2);
    assert_string_equal(g.gpu[0].pci, "0000:81:00.0");
    gpus_find(&g, root, "0,7,1"); /* CUDA stops at the first that is not there */
    assert_int_equal(g.n, 1);
    gpus_find(&g, root, "GPU-1473ee24,GPU-2");
    assert_int_equal(g.n, 2);
    gpus_find(&g, root, "");
    assert_int_equal(g.n, 0);
    gpus_find(&g, root, "-1");
    assert_int_equal(g.n, 0);
}

static void device_nodes_count_where_the_driver_lists_nothing(void **state) {
    UNUSED(state);
    struct gpus g;
    gpus_find(&g, root, NULL);
    assert_int_equal(g.n, 0);
    put("/dev/nvidia0", "");
    put("/dev/nvidia3", "");
    put("/dev/nvidiactl", "");
    put("/dev/nvidia-uvm", "");
    gpus_find(&g, root, NULL);
    assert_int_equal(g.n, 2);
    assert_int_equal(gpus_deal(&g, NULL, NULL), OK);
    expect_cores(&g, 1, 2, "6-11");
}

static void three_gpus_make_two_ranks_and_nine_make_eight(void **state) {
    UNUSED(state);
    const int expected[] = {1, 1, 2, 2, 4, 4, 4, 4, 8, 8, 8};
    for (int n = 1; n <= 10; n++) {
        struct gpus g = {.n_dealt = n};
        assert_int_equal(gpus_ranks(&g), expected[n]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(
            gpus_stand_in_the_order_of_the_bus_and_ranks_get_the_cores_beside_them, new_host,
            drop_host),
        cmocka_unit_test_setup_teardown(a_list_says_which_ranks_get_which, new_host, drop_host),
        cmocka_unit_test_setup_teardown(only_visible_devices_count, new_host, drop_host),
        cmocka_unit_test_setup_teardown(the_driver_knows_a_rank_s_device_by_its_address, new_host, drop_host),
        cmocka_unit_test_setup_teardown(device_nodes_count_where_the_driver_lists_nothing, new_host,
                                        drop_host),
        cmocka_unit_test(three_gpus_make_two_ranks_and_nine_make_eight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
