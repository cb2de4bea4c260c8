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

static const struct digest A = {1, 7}, B = {2, 7}, C = {1, 8}; /* A and C share a bucket */

static void pages_are_given_all_or_nothing(void **state) {
    UNUSED(state);
    struct pages p;
    int32_t got[4];
    assert_int_equal(pages_init(&p, 3), OK);
    assert_int_equal(pages_get(&p, 2, got), OK);
    assert_int_equal(got[0], 0);
    assert_int_equal(got[1], 1);
    assert_int_equal(pages_get(&p, 2, got + 2), ERR_FULL);
    assert_int_equal(pages_room(&p), 1);
    assert_int_equal(pages_used(&p), 2);
    assert_int_equal(pages_get(&p, 1, got + 2), OK);
    assert_int_equal(got[2], 2);
    pages_deinit(&p);
}

static void a_page_is_free_only_after_the_last_step_that_names_it_is_answered(void **state) {
    UNUSED(state);
    struct pages p;
    int32_t got[2], again;
    assert_int_equal(pages_init(&p, 2), OK);
    assert_int_equal(pages_get(&p, 2, got), OK);
    pages_put(&p, &got[0], 1, 5);
    assert_int_equal(p.retired.n, 1);
    assert_int_equal(pages_get(&p, 1, &again), ERR_FULL);
    pages_answered(&p, 4);
    assert_int_equal(pages_get(&p, 1, &again), ERR_FULL);
    pages_answered(&p, 5);
    assert_int_equal(pages_get(&p, 1, &again), OK);
    assert_int_equal(again, got[0]);
    pages_put(&p, &got[1], 1, 5); /* answered already: free at once */
    assert_int_equal(pages_room(&p), 1);
    pages_deinit(&p);
}

static void a_shared_page_waits_for_the_last_step_of_its_last_holder(void **state) {
    UNUSED(state);
    struct pages p;
    int32_t got, again;
    assert_int_equal(pages_init(&p, 1), OK);
    assert_int_equal(pages_get(&p, 1, &got), OK);
    pages_name(&p, got, A);
    pages_share(&p, pages_find(&p, A));
    pages_put(&p, &got, 1, 9);
    assert_int_equal(pages_used(&p), 1);
    pages_put(&p, &got, 1, 6);
    pages_answered(&p, 8); /* step 9 may still read it */
    assert_int_equal(pages_get(&p, 1, &again), ERR_FULL);
    pages_share(&p, pages_find(&p, A)); /* but whoever only reads may have it */
    pages_put(&p, &got, 1, 8);
    pages_answered(&p, 9);
    assert_int_equal(pages_get(&p, 1, &again), OK);
    pages_deinit(&p);
}

static void named_pages_are_found_until_they_are_needed_and_the_oldest_goes_first(void **state) {
    UNUSED(state);
    struct pages p;
    int32_t got[3], again;
    assert_int_equal(pages_init(&p, 4), OK);
    assert_int_equal(pages_get(&p, 3, got), OK);
    pages_name(&p, got[0], A);
    pages_name(&p, got[1], B);
    pages_name(&p, got[2], C);
    pages_put(&p, got, 3, 0); /* from the last to the first */
    assert_int_equal(pages_used(&p), 0);
    assert_int_equal(pages_get(&p, 1, &again), OK);
    assert_int_equal(again, 3); /* the one that holds nothing */
    pages_share(&p, pages_find(&p, C)); /* used now, so no longer the oldest */
    pages_put(&p, &got[2], 1, 0);
    assert_int_equal(pages_get(&p, 1, &again), OK);
    assert_int_equal(again, got[1]);
    assert_int_equal(pages_find(&p, B), PAGES_NONE);
    assert_int_equal(pages_find(&p, A), got[0]);
    assert_int_equal(pages_find(&p, C), got[2]);
    assert_int_equal(pages_room(&p), 2);
    pages_deinit(&p);
}

static void a_name_is_given_once(void **state) {
    UNUSED(state);
    struct pages p;
    int32_t got[2];
    assert_int_equal(pages_init(&p, 2), OK);
    assert_int_equal(pages_get(&p, 2, got), OK);
    pages_name(&p, got[0], A);
    pages_name(&p, got[1], A); /* computed twice: the first is found */
    pages_name(&p, got[0], B);
    assert_int_equal(pages_find(&p, A), got[0]);
    assert_int_equal(pages_find(&p, B), PAGES_NONE);
    pages_put(&p, got, 2, 0);
    assert_int_equal(p.free.n, 1);
    assert_int_equal(p.kept.n, 1);
    pages_deinit(&p);
}

static void a_reset_frees_everything_and_forgets_every_name(void **state) {
    UNUSED(state);
    struct pages p;
    int32_t got[5];
    assert_int_equal(pages_init(&p, 5), OK);
    assert_int_equal(pages_get(&p, 4, got), OK);
    pages_name(&p, got[3], A);
    pages_put(&p, got, 2, 9);
    pages_reset(&p);
    assert_int_equal(p.free.n, 5);
    assert_int_equal(p.retired.n, 0);
    assert_int_equal(pages_find(&p, A), PAGES_NONE);
    assert_int_equal(pages_get(&p, 5, got), OK);
    pages_deinit(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_are_given_all_or_nothing),
        cmocka_unit_test(a_page_is_free_only_after_the_last_step_that_names_it_is_answered),
        cmocka_unit_test(a_shared_page_waits_for_the_last_step_of_its_last_holder),
        cmocka_unit_test(named_pages_are_found_until_they_are_needed_and_the_oldest_goes_first),
        cmocka_unit_test(a_name_is_given_once),
        cmocka_unit_test(a_reset_frees_everything_and_forgets_every_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
