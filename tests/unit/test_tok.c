/* tests/unit/test_tok.c: the tokenizer on the demonstration model and on a small built vocabulary.
 */
#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/split.h"
#include "tests/unit/vocab_fixture.h"

static struct tok *tiny;

static char *source_path(const char *name) {
    static char path[4096];
    const char *root = getenv("OCTAVO_SOURCE_ROOT");
    snprintf(path, sizeof path, "%s/%s", root ? root : ".", name);
    return path;
}

static int open_tiny(void **state) {
    UNUSED(state);
    struct err_text err = {0};
    struct gguf *g;
    if (gguf_open(&g, source_path("tests/models/tiny.gguf"), &err) < 0 ||
        tok_open(&tiny, g, &err) < 0) {
        fprintf(stderr, "expected the demonstration model's tokenizer, found: %s\n", err.text);
        return -1;
    }
    gguf_close(g); /* the tokenizer keeps nothing of the mapping */
    return 0;
}

static int close_tiny(void **state) {
    UNUSED(state);
    tok_close(tiny);
    return 0;
}

static void assert_ids(const struct tok_ids *found, const json_t *expected, const char *text) {
    bool same = found->n == json_array_size(expected);
    for (size_t i = 0; same && i < found->n; i++)
        same = found->ids[i] == json_integer_value(json_array_get(expected, i));
    if (same) return;
    char *want = json_dumps(expected, 0);
    fprintf(stderr, "text \"%s\"\nexpected %s\nfound    [", text, want);
    for (size_t i = 0; i < found->n; i++) fprintf(stderr, "%d, ", found->ids[i]);
    fprintf(stderr, "]\n");
    free(want);
    fail();
}

static void golden_ids(const json_t *list, const char *key, enum tok_mode mode) {
    size_t i;
    json_t *one;
    assert_true(json_array_size(list) > 5);
    json_array_foreach(list, i, one) {
        json_t *text = json_object_get(one, key);
        struct tok_ids ids = {0};
        assert_int_equal(
            tok_encode(tiny, json_string_value(text), json_string_length(text), mode, &ids), OK);
        assert_ids(&ids, json_object_get(one, "ids"), json_string_value(text));
        tok_ids_deinit(&ids);
    }
}

static void the_golden_texts_and_prompts_have_the_golden_ids(void **state) {
    UNUSED(state);
    json_t *golden = json_load_file(source_path("tests/golden/golden.json"), JSON_ALLOW_NUL, NULL);
    assert_non_null(golden);
    golden_ids(json_object_get(golden, "tokenizer"), "text", TOK_PLAIN);
    golden_ids(json_object_get(golden, "cases"), "prompt", TOK_TRUSTED);
    json_decref(golden);
}

/* The pieces that the splitter makes, seen through a vocabulary in which nothing merges. */
static void words_are_split_as_the_expression_says(void **state) {
    UNUSED(state);
    static const char *const cases[][24] = {
        {"Hello world", "Hello", " world"},
        {"I'LL go, it's 12345 units!!\n\n  next", "I", "'LL", " go", ",", " it", "'s", " ", "123",
         "45", " units", "!!\n\n", " ", " next"},
        {"  x = foo(bar);\r\n\tif(a){", " ", " x", " =", " foo", "(bar", ");\r\n", "\tif", "(a",
         "){"},
        {"a   b", "a", "  ", " b"},
        {"tab\t\tx\n \n y", "tab", "\t", "\tx", "\n \n", " y"},
        {"don't 'tis 'SS", "don", "'t", " '", "tis", " '", "SS"},
        {"你好，世界 3.14", "你好", "，世界", " ", "3", ".", "14"},
        {"_foo_bar", "_foo", "_bar"},
        {"日本語１２３４", "日本語", "１２３", "４"},
        {"x\u017F'\u017Fab", "x\u017F", "'\u017F", "ab"}, /* the long s folds to s */
        {"a \u180E\u180Eb", "a", " \u180E\u180E", "b"},   /* U+180E is no space */
        {"a\u2003\u3000b", "a", "\u2003", "\u3000b"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const char *text = cases[i][0];
        struct split *s;
        assert_int_equal(split_new(&s, (struct gguf_str){"glm4", 4}, NULL), OK);
        struct split_walk *w = split_walk_new(s);
        size_t at = 0, end, n = strlen(text);
        for (int k = 1; at < n; k++, at = end) {
            assert_int_equal(split_next(w, text, n, at, &end), OK);
            const char *want = cases[i][k] ? cases[i][k] : "(nothing)";
            if (strlen(want) != end - at || memcmp(want, text + at, end - at) != 0)
                fail_msg("text \"%s\" piece %d: expected \"%s\", found \"%.*s\"", text, k, want,
                         (int)(end - at), text + at);
        }
        split_walk_free(w);
        split_free(s);
    }
}

static void added_tokens_are_found_only_in_trusted_text(void **state) {
    UNUSED(state);
    static const char text[] = "<|user|>hi</think>[gMASK]";
    struct tok_ids plain = {0}, trusted = {0};
    assert_int_equal(tok_encode(tiny, text, strlen(text), TOK_PLAIN, &plain), OK);
    assert_int_equal(tok_encode(tiny, text, strlen(text), TOK_TRUSTED, &trusted), OK);
    for (size_t i = 0; i < plain.n; i++) assert_false(tok_is_added(tiny, plain.ids[i]));
    assert_int_equal(trusted.ids[0], tok_added(tiny, "<|user|>"));
    assert_int_equal(trusted.ids[trusted.n - 1], tok_added(tiny, "[gMASK]"));
    assert_int_equal(trusted.ids[trusted.n - 2], tok_added(tiny, "</think>"));
    tok_ids_deinit(&plain);
    tok_ids_deinit(&trusted);
}

static void the_longest_added_token_wins(void **state) {
    UNUSED(state);
    struct fixture f;
    struct tok *t;
    struct err_text err;
    fixture_init(&f);
    fixture_token(&f, "<thin", 4);
    fixture_token(&f, "<think>more", 4);
    assert_int_equal(fixture_open(&f, &t, &err), OK);
    struct tok_ids ids = {0};
    assert_int_equal(tok_encode(t, "<think>more<think><thin", 23, TOK_TRUSTED, &ids), OK);
    assert_int_equal(ids.n, 3);
    assert_int_equal(ids.ids[0], tok_added(t, "<think>more"));
    assert_int_equal(ids.ids[1], tok_added(t, "<think>"));
    assert_int_equal(ids.ids[2], tok_added(t, "<thin"));
    tok_ids_deinit(&ids);
    tok_close(t);
    fixture_deinit(&f);
}

static void merges_go_by_rank_then_from_the_left(void **state) {
    UNUSED(state);
    struct fixture f;
    struct tok *t;
    struct err_text err;
    fixture_init(&f);
    assert_int_equal(fixture_open(&f, &t, &err), OK);
    static const struct {
        const char *text;
        const char *pieces[8];
    } cases[] = {{"aaa", {"aa", "a"}},       {"aaaaa", {"aaaa", "a"}},
                 {"aab", {"a", "ab"}},       {"hello", {"hello"}},
                 {"xhello", {"x", "hello"}}, {"  hell", {" ", " ", "hell"}},
                 {"abcab", {"abc", "ab"}}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct tok_ids ids = {0};
        assert_int_equal(tok_encode(t, cases[i].text, strlen(cases[i].text), TOK_PLAIN, &ids), OK);
        for (size_t k = 0; k < ids.n; k++) {
            size_t n;
            const char *p = tok_bytes(t, ids.ids[k], &n);
            const char *want = cases[i].pieces[k] ? cases[i].pieces[k] : "(nothing)";
            if (n != strlen(want) || memcmp(p, want, n) != 0)
                fail_msg("\"%s\" piece %zu: expected \"%s\", found \"%.*s\"", cases[i].text, k,
                         want, (int)n, p);
        }
        assert_null(cases[i].pieces[ids.n]);
        tok_ids_deinit(&ids);
    }
    tok_close(t);
    fixture_deinit(&f);
}

/* A quadratic encoder needs hours for this; the bound of the test runner is minutes. */
static void long_words_and_long_runs_of_space_take_no_time(void **state) {
    UNUSED(state);
    size_t n = 4u << 20;
    char *text = malloc(n);
    static const char *const units[] = {"a", "qzjxk", " ",           "\n", " \n", "\xE3\x80\x80",
                                        "1", "!",     "\xE4\xBD\xA0"};
    for (size_t i = 0; i < ARRAY_LEN(units); i++) {
        size_t unit = strlen(units[i]), len = n / unit * unit;
        for (size_t k = 0; k < len; k++) text[k] = units[i][k % unit];
        struct tok_ids ids = {0};
        assert_int_equal(tok_encode(tiny, text, len, TOK_PLAIN, &ids), OK);
        size_t bytes = 0, piece;
        for (size_t k = 0; k < ids.n; k++) {
            const char *p = tok_bytes(tiny, ids.ids[k], &piece);
            assert_memory_equal(p, text + bytes, piece);
            bytes += piece;
        }
        assert_int_equal(bytes, len);
        tok_ids_deinit(&ids);
    }
    free(text);
}

static void invalid_utf8_is_refused(void **state) {
    UNUSED(state);
    static const char *const bad[] = {"\x80",
                                      "a\xC3",
                                      "\xC0\x80",
                                      "\xED\xA0\x80",
                                      "\xF5\x80\x80\x80",
                                      "\xE2\x82",
                                      "\xF4\x90\x80\x80",
                                      "12345678\xFF"};
    struct tok_ids ids = {0};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        assert_false(utf8_valid(bad[i], strlen(bad[i])));
        assert_int_equal(tok_encode(tiny, bad[i], strlen(bad[i]), TOK_PLAIN, &ids), ERR_FORMAT);
    }
    assert_int_equal(ids.n, 0);
    assert_true(utf8_valid("a\0b\xF4\x8F\xBF\xBF", 7));
}

static void end_tokens_are_the_keys_and_the_marks(void **state) {
    UNUSED(state);
    int n;
    tok_eog(tiny, &n);
    assert_int_equal(n, 3);
    assert_true(tok_is_eog(tiny, tok_added(tiny, "<|endoftext|>")));
    assert_true(tok_is_eog(tiny, tok_added(tiny, "<|user|>")));
    assert_true(tok_is_eog(tiny, tok_added(tiny, "<|observation|>")));
    assert_false(tok_is_eog(tiny, tok_added(tiny, "<|assistant|>")));
    assert_true(tok_is_control(tiny, tok_added(tiny, "<|assistant|>")));
    size_t len;
    tok_bytes(tiny, tok_vocab(tiny), &len);
    assert_int_equal(len, 0);
    tok_bytes(tiny, -1, &len);
    assert_int_equal(len, 0);
}

static void *encode_again_and_again(void *user) {
    struct tok_ids *all = user;
    static const char text[] =
        "The capital of France is Paris, 12345!\n\n  \xE4\xBD\xA0\xE5\xA5\xBD";
    for (int i = 0; i < 200; i++)
        assert(tok_encode(tiny, text, strlen(text), TOK_PLAIN, all) == OK);
    return NULL;
}

static void many_threads_may_encode_at_once(void **state) {
    UNUSED(state);
    pthread_t threads[4];
    struct tok_ids ids[4] = {0};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_again_and_again, &ids[i]), 0);
    for (size_t i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(ids[i].n, ids[0].n);
        assert_memory_equal(ids[i].ids, ids[0].ids, ids[0].n * sizeof *ids[0].ids);
    }
    for (size_t i = 0; i < 4; i++) tok_ids_deinit(&ids[i]);
}

/* ---- refusals ---- */

static void refuse(struct fixture *f, const char *want) {
    struct tok *t = NULL;
    struct err_text err = {0};
    int rc = fixture_open(f, &t, &err);
    if (rc != ERR_FORMAT || !strstr(err.text, want))
        fail_msg("expected a refusal with \"%s\", found %s \"%s\"", want, err_name(rc), err.text);
    fixture_deinit(f);
}

static void retext(struct fixture *f, int id, const char *text) {
    free(f->tokens[id]);
    f->tokens[id] = strdup(text);
}

static void inconsistent_tables_are_refused_with_a_sentence(void **state) {
    UNUSED(state);
    struct fixture f;
    char longest[3000];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    fixture_init(&f);
    f.model = "llama";
    refuse(&f, "tokenizer.ggml.model: expected gpt2");
    fixture_init(&f);
    f.model = NULL;
    refuse(&f, "found no such key");
    fixture_init(&f);
    f.pre = "qwen2";
    refuse(&f, "expected glm4 or chatglm-bpe, found \"qwen2\"");
    fixture_init(&f);
    f.pre = NULL;
    refuse(&f, "tokenizer.ggml.pre");
    fixture_init(&f);
    f.n_types--;
    refuse(&f, "expected 285 entries (as many as tokens), found 284");
    fixture_init(&f);
    f.types[7] = 0;
    refuse(&f, "token 7: expected 1 to 6, found 0");
    fixture_init(&f);
    f.types[7] = 7;
    refuse(&f, "token 7: expected 1 to 6, found 7");
    fixture_init(&f);
    retext(&f, 258, "");
    refuse(&f, "token 258: expected a text, found none");
    fixture_init(&f);
    retext(&f, 258, "ab");
    refuse(&f, "found that of token 256");
    fixture_init(&f);
    retext(&f, 275, "<think>");
    refuse(&f, "found that of token 274");
    fixture_init(&f);
    retext(&f, 275, "hello");
    refuse(&f, "token 275: expected a text of its own");
    fixture_init(&f);
    retext(&f, 258, "a b");
    refuse(&f, "expected byte-mapped characters");
    fixture_init(&f);
    retext(&f, 258, "日");
    refuse(&f, "expected byte-mapped characters");
    fixture_init(&f);
    retext(&f, 258, longest);
    refuse(&f, "expected at most 2048 bytes");
    fixture_init(&f);
    retext(&f, 65, "zzz");
    refuse(&f, "none for byte 0x41");
    fixture_init(&f);
    f.eos = 285;
    refuse(&f, "expected an id below 285, found 285");
    fixture_init(&f);
    f.bos = 4000000000;
    refuse(&f, "tokenizer.ggml.bos_token_id");
    static const char *const merges[] = {"ab", "a  b", "a b c",   " ab",  "ab ", " ",
                                         "",   "a q",  "q\x01 a", "zz a", "a 日"};
    for (size_t i = 0; i < ARRAY_LEN(merges); i++) {
        fixture_init(&f);
        f.merges[3] = merges[i];
        refuse(&f, "tokenizer.ggml.merges: merge 3: expected");
    }
}

static void end_tokens_are_known_without_keys(void **state) {
    UNUSED(state);
    struct fixture f;
    struct tok *t;
    struct err_text err;
    fixture_init(&f);
    f.eos = f.eot = f.bos = -1;
    f.pre = "chatglm-bpe";
    assert_int_equal(fixture_open(&f, &t, &err), OK);
    int n;
    tok_eog(t, &n);
    assert_int_equal(n, 3);
    tok_close(t);
    fixture_deinit(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_golden_texts_and_prompts_have_the_golden_ids),
        cmocka_unit_test(words_are_split_as_the_expression_says),
        cmocka_unit_test(added_tokens_are_found_only_in_trusted_text),
        cmocka_unit_test(the_longest_added_token_wins),
        cmocka_unit_test(merges_go_by_rank_then_from_the_left),
        cmocka_unit_test(long_words_and_long_runs_of_space_take_no_time),
        cmocka_unit_test(invalid_utf8_is_refused),
        cmocka_unit_test(many_threads_may_encode_at_once),
        cmocka_unit_test(end_tokens_are_the_keys_and_the_marks),
        cmocka_unit_test(inconsistent_tables_are_refused_with_a_sentence),
        cmocka_unit_test(end_tokens_are_known_without_keys),
    };
    return cmocka_run_group_tests(tests, open_tiny, close_tiny);
}
