/* tests/unit/test_switches.c: debug switches are set whole or not at all. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "worker/switches.h"

static struct kswitch rows[] = {
    {"colour", "Of the shed.", {"red", "reddish", "green"}, 0},
    {"door", "Open or not.", {"open", "shut"}, 0},
};
static const struct kernels table = {.switches = rows, .n_switches = 2};

static void a_list_sets_what_it_names(void **state) {
    UNUSED(state);
    assert_int_equal(switches_set(&table, NULL, NULL), OK);
    assert_int_equal(switches_set(&table, "", NULL), OK);
    assert_int_equal(switches_set(&table, "door=shut,colour=reddish", NULL), OK);
    assert_int_equal(rows[0].chosen, 1);
    assert_int_equal(rows[1].chosen, 1);
    assert_int_equal(switches_set(&table, "colour=red", NULL), OK);
    assert_int_equal(rows[0].chosen, 0);
    assert_int_equal(rows[1].chosen, 1);
}

static void a_list_with_a_mistake_sets_nothing(void **state) {
    UNUSED(state);
    static const char *const lists[] = {
        "door=open,colour=blue", "door=open,", "door", "door=", "=open", "doors=open",
        "door=open=shut"};
    for (size_t i = 0; i < ARRAY_LEN(lists); i++) {
        struct err_text err = {0};
        rows[1].chosen = 1;
        if (switches_set(&table, lists[i], &err) != ERR_SETUP || rows[1].chosen != 1 ||
            !strstr(err.text,
                    "expected one of colour=red, colour=reddish, colour=green, door=open, "
                    "door=shut, found "))
            fail_msg("%s: expected a refusal and nothing set, found %d \"%s\"", lists[i],
                     rows[1].chosen, err.text);
    }
}

static void the_table_marks_what_is_chosen(void **state) {
    UNUSED(state);
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    rows[0].chosen = 2, rows[1].chosen = 0;
    switches_print(f, &table);
    fclose(f);
    assert_string_equal(text, "colour       red|reddish|green*  Of the shed.\n"
                              "door         open*|shut  Open or not.\n");
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_list_sets_what_it_names),
        cmocka_unit_test(a_list_with_a_mistake_sets_nothing),
        cmocka_unit_test(the_table_marks_what_is_chosen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
