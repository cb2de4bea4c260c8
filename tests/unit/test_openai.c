/* tests/unit/test_openai.c: request bodies: what is accepted, what is refused, and by which name.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/http_buf.h"
#include "coordinator/openai.h"

static const struct openai_defaults defaults = {.model = "tiny",
                                                .vocab = 1000,
                                                .temperature = 0.7,
                                                .top_p = 0.95,
                                                .repetition = 1,
                                                .random_seed = 77};

static struct openai_error err;

static int parse(struct openai_request *r, enum openai_kind kind, const char *body) {
    /* An exact copy: reading past the end is seen by the address sanitizer. */
    size_t n = strlen(body);
    char *copy = malloc(n);
    memcpy(copy, body, n);
    int rc = openai_parse(r, kind, copy, n, &defaults, &err);
    free(copy);
    return rc;
}

/* {"messages": […], FIELDS} */
static int chat(struct openai_request *r, const char *fields) {
    struct http_buf b = {0};
    http_buf_printf(&b, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]%s%s}",
                    *fields ? "," : "", fields);
    int rc = parse(r, OPENAI_CHAT, b.p);
    http_buf_deinit(&b);
    return rc;
}

static int text(struct openai_request *r, const char *fields) {
    struct http_buf b = {0};
    http_buf_printf(&b, "{\"prompt\":\"x\",%s}", fields);
    int rc = parse(r, OPENAI_TEXT, b.p);
    http_buf_deinit(&b);
    return rc;
}

static void accepted(const char *fields) {
    struct openai_request r;
    if (chat(&r, fields) < 0) fail_msg("expected %s to be accepted, found %s", fields, err.message);
    openai_request_deinit(&r);
}

static void refused(const char *fields, const char *param) {
    struct openai_request r;
    if (chat(&r, fields) >= 0) fail_msg("expected %s to be refused", fields);
    if (err.status != 400 || strcmp(err.param, param) || !err.message[0])
        fail_msg("%s: expected 400 naming %s, found %d naming %s: %s", fields, param, err.status,
                 err.param, err.message);
}

static void a_request_that_says_nothing_gets_the_defaults(void **state) {
    UNUSED(state);
    struct openai_request r;
    assert_int_equal(chat(&r, ""), OK);
    assert_float_equal(r.sampling.temperature, 0.7, 1e-6);
    assert_float_equal(r.sampling.top_p, 0.95, 1e-6);
    assert_int_equal(r.sampling.seed, 77);
    assert_int_equal(r.max_tokens, 0);
    assert_int_equal(r.n, 1);
    assert_false(r.stream || r.logprobs || r.ignore_eos);
    assert_true(r.chat.thinking && r.chat.clear_thinking && r.chat.add_generation_prompt);
    openai_request_deinit(&r);
}

static void null_is_the_same_as_absent(void **state) {
    UNUSED(state);
    static const char *const names[] = {"model",
                                        "stream",
                                        "stream_options",
                                        "max_tokens",
                                        "max_completion_tokens",
                                        "n",
                                        "temperature",
                                        "top_p",
                                        "min_p",
                                        "top_k",
                                        "seed",
                                        "stop",
                                        "stop_token_ids",
                                        "logit_bias",
                                        "logprobs",
                                        "top_logprobs",
                                        "presence_penalty",
                                        "frequency_penalty",
                                        "repetition_penalty",
                                        "ignore_eos",
                                        "priority",
                                        "timeout",
                                        "cache_salt",
                                        "tools",
                                        "tool_choice",
                                        "parallel_tool_calls",
                                        "response_format",
                                        "chat_template_kwargs",
                                        "enable_thinking",
                                        "reasoning_effort",
                                        "thinking"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char fields[64];
        snprintf(fields, sizeof fields, "\"%s\":null", names[i]);
        accepted(fields);
    }
}

static void every_number_has_a_type_and_a_range(void **state) {
    UNUSED(state);
    static const struct {
        const char *name, *good, *bad; /* values apart by spaces */
    } fields[] = {
        {"max_tokens", "1 1e3 5.0 2147483647", "0 -1 2147483648 1.5 \"8\" true [] {} 1e300"},
        {"max_completion_tokens", "1", "0 \"8\""},
        {"n", "1 64", "0 65 -1 1.5 \"1\""},
        {"temperature", "0 2 0.5 1", "-0.1 2.1 \"1\" true []"},
        {"top_p", "0 1 0.5", "-1 1.01 \"x\""},
        {"min_p", "0 1", "-1 2 {}"},
        {"top_k", "-1 0 5 100000", "-2 1.5 \"5\""},
        {"presence_penalty", "-2 2", "-2.1 2.1"},
        {"frequency_penalty", "-2 2", "-2.1 2.1"},
        {"repetition_penalty", "1 1.5", "0 -1 \"1\""},
        {"seed", "0 -5 9223372036854775807", "1.5 \"1\" 1e300"},
        {"stream", "true false", "1 0 \"true\""},
        {"logprobs", "true false", "1 \"x\""},
        {"ignore_eos", "true", "1"},
        {"stop", "\"a\" [\"a\",\"b\"] []", "1 [1] \"\" [\"\"] {} [[\"a\"]] \"\\u0000\""},
        {"stop_token_ids", "[1,2] []", "1 [1000] [-1] [1.5] [\"1\"]"},
        {"priority", "0 -1000 1000 5.0", "-1001 1001 1.5 \"1\" []"},
        {"timeout", "0.5 1 86400", "0 -1 86401 \"1\""},
        {"cache_salt", "\"a\"", "1 \"\" [] \"\\u0000\""},
        {"model", "\"tiny\"", "1 []"},
        {"stream_options", "{} {\"include_usage\":true}", "1 []"},
        {"parallel_tool_calls", "true", "1"},
        {"tool_choice", "\"auto\" \"none\"", "\"required\" 1 {\"type\":\"function\"} \"x\""},
        {"response_format", "{\"type\":\"text\"}", "1 {} {\"type\":\"json_object\"} \"text\""},
        {"reasoning_effort", "\"none\" \"low\" \"high\" \"max\"", "1 \"x\""},
        {"thinking", "{\"type\":\"enabled\"} {\"type\":\"disabled\"}",
         "{} 1 true {\"type\":\"x\"}"},
        {"chat_template_kwargs", "{} {\"x\":1}", "1 []"},
        {"enable_thinking", "true", "1 \"no\""},
    };
    for (size_t i = 0; i < ARRAY_LEN(fields); i++)
        for (int good = 0; good < 2; good++) {
            char values[256], *save, one[256];
            snprintf(values, sizeof values, "%s", good ? fields[i].good : fields[i].bad);
            for (char *v = strtok_r(values, " ", &save); v; v = strtok_r(NULL, " ", &save)) {
                snprintf(one, sizeof one, "\"%s\":%s", fields[i].name, v);
                good ? accepted(one) : refused(one, fields[i].name);
            }
        }
}

static void numbers_beyond_json_are_refused(void **state) {
    UNUSED(state);
    struct openai_request r;
    static const char *const bad[] = {"\"temperature\":1e400", "\"temperature\":NaN",
                                      "\"temperature\":Infinity", "\"seed\":99999999999999999999",
                                      "\"max_tokens\":-"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        assert_true(chat(&r, bad[i]) < 0);
        assert_int_equal(err.status, 400);
    }
}

static void logit_bias_is_checked_against_the_vocabulary(void **state) {
    UNUSED(state);
    struct openai_request r;
    assert_int_equal(chat(&r, "\"logit_bias\":{\"0\":-100,\"999\":100.0}"), OK);
    assert_int_equal(r.sampling.n_bias, 2);
    assert_int_equal(r.sampling.bias_token[1], 999);
    openai_request_deinit(&r);
    static const char *const bad[] = {"{\"-1\":1}",
                                      "{\"1000\":1}",
                                      "{\"1001\":1}",
                                      "{\"2147483648\":1}",
                                      "{\"abc\":1}",
                                      "{\"\":1}",
                                      "{\"5\":1e9}",
                                      "{\"5\":null}",
                                      "{\"5\":\"x\"}",
                                      "{\"5 \":1}",
                                      "{\" 5\":1}",
                                      "{\"0x5\":1}",
                                      "{\"99999999999999999999\":1}",
                                      "[]",
                                      "1"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        char fields[128];
        snprintf(fields, sizeof fields, "\"logit_bias\":%s", bad[i]);
        refused(fields, "logit_bias");
    }
    struct http_buf b = {0};
    http_buf_puts(&b, "\"logit_bias\":{");
    for (int i = 0; i <= LIMIT_BIAS; i++) http_buf_printf(&b, "%s\"%d\":1", i ? "," : "", i);
    http_buf_puts(&b, "}");
    refused(b.p, "logit_bias");
    http_buf_deinit(&b);
}

static void log_probabilities_are_asked_for_in_two_ways(void **state) {
    UNUSED(state);
    struct openai_request r;
    assert_int_equal(chat(&r, "\"logprobs\":true"), OK);
    assert_true(r.logprobs && r.sampling.top_logprobs == 0);
    openai_request_deinit(&r);
    assert_int_equal(chat(&r, "\"logprobs\":true,\"top_logprobs\":20"), OK);
    assert_int_equal(r.sampling.top_logprobs, 20);
    openai_request_deinit(&r);
    accepted("\"top_logprobs\":0");
    refused("\"top_logprobs\":1", "top_logprobs");
    refused("\"logprobs\":true,\"top_logprobs\":21", "top_logprobs");
    refused("\"logprobs\":true,\"top_logprobs\":-1", "top_logprobs");
    assert_int_equal(text(&r, "\"logprobs\":5"), OK);
    assert_true(r.logprobs && r.sampling.top_logprobs == 5);
    openai_request_deinit(&r);
    assert_int_equal(text(&r, "\"logprobs\":0"), OK);
    assert_true(r.logprobs);
    openai_request_deinit(&r);
    assert_true(text(&r, "\"logprobs\":true") < 0);
}

static void messages_are_a_list_of_objects_with_roles(void **state) {
    UNUSED(state);
    static const char *const bad[] = {"{}",
                                      "{\"messages\":null}",
                                      "{\"messages\":[]}",
                                      "{\"messages\":{}}",
                                      "{\"messages\":\"hi\"}",
                                      "{\"messages\":[null]}",
                                      "{\"messages\":[[]]}",
                                      "{\"messages\":[{}]}",
                                      "{\"messages\":[{\"role\":1}]}"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct openai_request r;
        assert_true(parse(&r, OPENAI_CHAT, bad[i]) < 0);
        assert_int_equal(err.status, 400);
        assert_string_equal(err.param, "messages");
    }
}

static void tools_are_functions_with_names(void **state) {
    UNUSED(state);
    accepted("\"tools\":[]");
    accepted(
        "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":null}}]");
    static const char *const bad[] = {
        "1",
        "{}",
        "[1]",
        "[{}]",
        "[{\"type\":\"web_search\"}]",
        "[{\"type\":\"function\"}]",
        "[{\"type\":\"function\",\"function\":{}}]",
        "[{\"type\":\"function\",\"function\":{\"name\":\"\"}}]",
        "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":\"x\"}}]"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        char fields[128];
        snprintf(fields, sizeof fields, "\"tools\":%s", bad[i]);
        refused(fields, "tools");
    }
    struct openai_request r;
    assert_int_equal(chat(&r, "\"tool_choice\":\"none\",\"tools\":[{\"type\":\"function\","
                              "\"function\":{\"name\":\"f\"}}]"),
                     OK);
    assert_null(r.tools);
    openai_request_deinit(&r);
}

static void thinking_is_switched_in_many_ways(void **state) {
    UNUSED(state);
    static const struct {
        const char *fields;
        bool thinking;
        const char *effort;
    } cases[] = {
        {"\"enable_thinking\":false", false, NULL},
        {"\"thinking\":{\"type\":\"disabled\"}", false, NULL},
        {"\"reasoning_effort\":\"none\"", false, NULL},
        {"\"reasoning_effort\":\"low\"", true, "high"},
        {"\"reasoning_effort\":\"xhigh\"", true, "max"},
        {"\"chat_template_kwargs\":{\"enable_thinking\":false}", false, NULL},
        {"\"enable_thinking\":false,\"chat_template_kwargs\":{\"enable_thinking\":true}", true,
         NULL},
        {"\"chat_template_kwargs\":{\"reasoning_effort\":\"max\"}", true, "max"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct openai_request r;
        assert_int_equal(chat(&r, cases[i].fields), OK);
        assert_int_equal(r.chat.thinking, cases[i].thinking);
        if (cases[i].effort)
            assert_string_equal(r.chat.reasoning_effort, cases[i].effort);
        else
            assert_null(r.chat.reasoning_effort);
        openai_request_deinit(&r);
    }
}

static void prompts_come_in_four_shapes(void **state) {
    UNUSED(state);
    static const struct {
        const char *prompt;
        int n;
    } good[] = {
        {"\"a\"", 1}, {"\"\"", 1}, {"[\"a\",\"b\"]", 2}, {"[1,2,3]", 1}, {"[[1],[2,3]]", 2}};
    static const char *const bad[] = {"null",         "1",      "{}",     "[]",    "[[]]",
                                      "[1,\"a\"]",    "[1000]", "[-1]",   "[1.5]", "[null]",
                                      "[[1],[1000]]", "[true]", "[[[1]]]"};
    char body[64];
    struct openai_request r;
    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        snprintf(body, sizeof body, "{\"prompt\":%s}", good[i].prompt);
        assert_int_equal(parse(&r, OPENAI_TEXT, body), OK);
        assert_int_equal(r.n_prompts, good[i].n);
        openai_request_deinit(&r);
    }
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        snprintf(body, sizeof body, "{\"prompt\":%s}", bad[i]);
        if (parse(&r, OPENAI_TEXT, body) >= 0) fail_msg("expected %s to be refused", body);
        assert_string_equal(err.param, "prompt");
    }
    static const char *const fields[][2] = {{"\"suffix\":\"x\"", "suffix"},
                                            {"\"best_of\":2", "best_of"},
                                            {"\"echo\":true,\"logprobs\":1", "echo"},
                                            {"\"echo\":1", "echo"}};
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        assert_true(text(&r, fields[i][0]) < 0);
        assert_string_equal(err.param, fields[i][1]);
    }
    assert_int_equal(text(&r, "\"best_of\":3,\"n\":3"), OK);
    openai_request_deinit(&r);
}

static void prompts_times_n_are_bounded(void **state) {
    UNUSED(state);
    struct http_buf b = {0};
    http_buf_puts(&b, "{\"n\":64,\"prompt\":[\"a\"");
    for (int i = 1; i < 5; i++) http_buf_puts(&b, ",\"a\"");
    http_buf_puts(&b, "]}");
    struct openai_request r;
    assert_true(parse(&r, OPENAI_TEXT, b.p) < 0);
    assert_string_equal(err.param, "prompt");
    http_buf_deinit(&b);
}

static void nesting_is_bounded_wherever_it_is(void **state) {
    UNUSED(state);
    static const char *const fields[] = {"tools", "unknown", "metadata"};
    for (size_t f = 0; f < ARRAY_LEN(fields); f++)
        for (int depth = 100; depth <= 1000000; depth *= 10) {
            struct http_buf b = {0};
            http_buf_printf(&b, "\"%s\":", fields[f]);
            for (int i = 0; i < depth; i++) http_buf_puts(&b, "[");
            for (int i = 0; i < depth; i++) http_buf_puts(&b, "]");
            struct openai_request r;
            int rc = chat(&r, b.p);
            bool ok = depth == 100 && f > 0;
            assert_int_equal(rc >= 0, ok);
            if (ok)
                openai_request_deinit(&r);
            else
                assert_int_equal(err.status, 400);
            http_buf_deinit(&b);
        }
    struct openai_request r;
    struct http_buf b = {0}; /* brackets inside a string are letters */
    http_buf_puts(&b, "\"user\":\"\\\"");
    for (int i = 0; i < 1000; i++) http_buf_puts(&b, "[{");
    http_buf_puts(&b, "\"");
    assert_int_equal(chat(&r, b.p), OK);
    openai_request_deinit(&r);
    http_buf_deinit(&b);
}

/* "unknown":[VALUE, … count times] */
static int chat_with_values(const char *value, int count) {
    struct openai_request r;
    struct http_buf b = {0};
    http_buf_puts(&b, "\"unknown\":[");
    for (int i = 0; i < count; i++) {
        if (i) http_buf_puts(&b, ",");
        http_buf_puts(&b, value);
    }
    http_buf_puts(&b, "]");
    int rc = chat(&r, b.p);
    if (rc >= 0) openai_request_deinit(&r);
    http_buf_deinit(&b);
    return rc;
}

static void a_body_of_countless_small_values_is_refused(void **state) {
    UNUSED(state);
    static const struct {
        const char *value;
        int most;
    } kinds[] = {{"[]", LIMIT_JSON_LISTS}, {"{}", LIMIT_JSON_LISTS}, {"1", LIMIT_JSON_VALUES}};
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        assert_int_equal(chat_with_values(kinds[k].value, kinds[k].most / 2), OK);
        assert_int_equal(chat_with_values(kinds[k].value, kinds[k].most), ERR_FORMAT);
        assert_int_equal(err.status, 400);
    }
    assert_int_equal(chat_with_values("\"[,[,[,[,[,[,\"", LIMIT_JSON_LISTS), OK);
}

static void what_nobody_reads_does_not_live_as_long_as_the_request(void **state) {
    UNUSED(state);
    struct openai_request r;
    assert_int_equal(chat(&r,
                          "\"stop\":[\"one\",\"two\"],\"user\":\"u\",\"metadata\":{\"a\":[1]},"
                          "\"prompt\":[\"not of this route\"],\"tools\":[{\"type\":\"function\","
                          "\"function\":{\"name\":\"f\"}}]"),
                     OK);
    assert_string_equal(r.stops[1], "two");
    assert_ptr_equal(json_object_get(r.root, "tools"), r.tools);
    assert_ptr_equal(json_object_get(r.root, "messages"), r.messages);
    assert_int_equal(json_object_size(r.root), 3);
    openai_request_deinit(&r);
    assert_int_equal(text(&r, "\"echo\":true,\"logit_bias\":{\"5\":1},\"tools\":[[]]"), OK);
    assert_string_equal(r.prompts[0].text, "x");
    assert_int_equal(json_object_size(r.root), 1);
    openai_request_deinit(&r);
}

static void what_is_not_json_is_refused(void **state) {
    UNUSED(state);
    static const char *const bad[] = {"",
                                      " ",
                                      "{",
                                      "[]",
                                      "1",
                                      "null",
                                      "{}x",
                                      "{\"a\":\"\xff\"}",
                                      "{\"a\":\"\\ud800\"}",
                                      "\xef\xbb\xbf{}",
                                      "{'a':1}",
                                      "{\"a\":01}"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct openai_request r;
        assert_true(parse(&r, OPENAI_CHAT, bad[i]) < 0);
        assert_int_equal(err.status, 400);
        assert_true(utf8_valid(err.message, strlen(err.message)));
    }
}

static void another_model_is_not_found(void **state) {
    UNUSED(state);
    struct openai_request r;
    assert_true(chat(&r, "\"model\":\"gpt-4\"") < 0);
    assert_int_equal(err.status, 404);
    assert_string_equal(err.code, "model_not_found");
    struct http_buf b = {0}; /* a long name is cut between letters */
    http_buf_puts(&b, "\"model\":\"a");
    for (int i = 0; i < 400; i++) http_buf_puts(&b, "\xe2\x82\xac");
    http_buf_puts(&b, "\"");
    assert_true(chat(&r, b.p) < 0);
    assert_true(utf8_valid(err.message, strlen(err.message)));
    http_buf_deinit(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_that_says_nothing_gets_the_defaults),
        cmocka_unit_test(null_is_the_same_as_absent),
        cmocka_unit_test(every_number_has_a_type_and_a_range),
        cmocka_unit_test(numbers_beyond_json_are_refused),
        cmocka_unit_test(logit_bias_is_checked_against_the_vocabulary),
        cmocka_unit_test(log_probabilities_are_asked_for_in_two_ways),
        cmocka_unit_test(messages_are_a_list_of_objects_with_roles),
        cmocka_unit_test(tools_are_functions_with_names),
        cmocka_unit_test(thinking_is_switched_in_many_ways),
        cmocka_unit_test(prompts_come_in_four_shapes),
        cmocka_unit_test(prompts_times_n_are_bounded),
        cmocka_unit_test(nesting_is_bounded_wherever_it_is),
        cmocka_unit_test(a_body_of_countless_small_values_is_refused),
        cmocka_unit_test(what_nobody_reads_does_not_live_as_long_as_the_request),
        cmocka_unit_test(what_is_not_json_is_refused),
        cmocka_unit_test(another_model_is_not_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
