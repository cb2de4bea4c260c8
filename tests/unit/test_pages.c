/* tests/unit/test_pages.c: the page account of coordinator/pages.c.
 *
 * Owns: nothing.  Called by: meson test.  Fails how: cmocka prints expected and found.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "coordinator/pages.h"

static void pages_are_given_all_or_nothing(void **state) {
    UNUSED(state);
    struct pages p;
    int32_t got[4];
    assert_int_equal(pages_init(&p, 3), OK);
    assert_int_equal(pages_get(&p, 7, 2, got), OK);
    assert_int_equal(got[0], 0);
    assert_int_equal(got[1], 1);
    assert_int_equal(pages_get(&p, 8, 2, got + 2), ERR_FULL);
    assert_int_equal(p.n_free, 1);
    assert_int_equal(pages_used(&p), 2);
    assert_int_equal(pages_get(&p, 8, 1, got + 2), OK);
    assert_int_equal(got[2], 2);
    pages_deinit(&p);
}

static void a_page_is_free_only_after_the_last_step_that_names_it_is_answered(void **state) {
    UNUSED(state);
    struct pages p;
    int32_t got[2], again;
    assert_int_equal(pages_init(&p, 2), OK);
    assert_int_equal(pages_get(&p, 1, 1, &got[0]), OK);
    assert_int_equal(pages_get(&p, 2, 1, &got[1]), OK);
    pages_put(&p, 1, &got[0], 1, 5);
    assert_int_equal(p.n_retired, 1);
    assert_int_equal(pages_get(&p, 3, 1, &again), ERR_FULL);
    pages_answered(&p, 4);
    assert_int_equal(pages_get(&p, 3, 1, &again), ERR_FULL);
    pages_answered(&p, 5);
    assert_int_equal(pages_get(&p, 3, 1, &again), OK);
    assert_int_equal(again, got[0]);
    pages_put(&p, 2, &got[1], 1, 5); /* answered already: free at once */
    assert_int_equal(p.n_free, 1);
    pages_deinit(&p);
}

static void a_reset_frees_everything(void **state) {
    UNUSED(state);
    struct pages p;
    int32_t got[5];
    assert_int_equal(pages_init(&p, 5), OK);
    assert_int_equal(pages_get(&p, 1, 4, got), OK);
    pages_put(&p, 1, got, 2, 9);
    pages_reset(&p);
    assert_int_equal(p.n_free, 5);
    assert_int_equal(p.n_retired, 0);
    assert_int_equal(pages_get(&p, 2, 5, got), OK);
    pages_deinit(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_are_given_all_or_nothing),
        cmocka_unit_test(a_page_is_free_only_after_the_last_step_that_names_it_is_answered),
        cmocka_unit_test(a_reset_frees_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
