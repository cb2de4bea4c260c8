/* tests/unit/test_text.c: the output parser: tags, stops, arguments, code points, and that none of
 * it depends on how the text was cut into tokens. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "coordinator/text.h"
#include "coordinator/toolarg.h"
#include "proto/limits.h"
#include "tests/unit/vocab_fixture.h"

static struct fixture fixture;
static struct tok *tok;
static json_t *tools;

static const char tools_text[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\","
    "\"properties\":{\"s\":{\"type\":\"string\"},\"n\":{\"type\":\"integer\"},\"b\":{\"type\":"
    "\"boolean\"},\"o\":{\"type\":\"object\"},\"e\":{\"enum\":[\"1\",\"2\"]},\"u\":{\"type\":["
    "\"string\",\"null\"]},\"a\":{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"string\"}]}}}}},"
    "{\"name\":\"bare\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"}}}}]";

static int open_fixture(void **state) {
    UNUSED(state);
    struct err_text err = {0};
    fixture_init(&fixture);
    tools = json_loads(tools_text, 0, NULL);
    if (fixture_open(&fixture, &tok, &err) < 0) fprintf(stderr, "%s\n", err.text);
    return tok && tools ? 0 : -1;
}

static int close_fixture(void **state) {
    UNUSED(state);
    tok_close(tok);
    fixture_deinit(&fixture);
    json_decref(tools);
    return 0;
}

/* What came out, printed as R(reasoning)C(content)N0(name)A0(arguments), neighbours joined. */
struct seen {
    struct buf all;
    int kind, call;
    int deltas;
};

static void take(void *user, const struct text_delta *d) {
    struct seen *s = user;
    assert_true(d->n > 0);
    assert_true(utf8_valid(d->s, d->n));
    if (s->kind != (int)d->kind || s->call != d->call || d->kind == TEXT_TOOL_NAME) {
        if (s->kind >= 0) buf_add_byte(&s->all, ')');
        buf_add_byte(&s->all, "RCNA"[d->kind]);
        if (d->kind >= TEXT_TOOL_NAME) buf_add_byte(&s->all, (char)('0' + d->call % 10));
        buf_add_byte(&s->all, '(');
    }
    s->kind = (int)d->kind;
    s->call = d->call;
    s->deltas++;
    buf_add(&s->all, d->s, d->n);
}

static void finish_seen(struct seen *s) {
    if (s->kind >= 0) buf_add_byte(&s->all, ')');
    buf_add(&s->all, "", 0);
}

static const struct text_options chat_on = {.chat = true, .parse_tools = true};
static const struct text_options thinking = {
    .chat = true, .parse_tools = true, .in_reasoning = true};

static struct text *open_text(const struct text_options *o, struct seen *s) {
    struct text_options with = *o;
    struct text *x;
    *s = (struct seen){.kind = -1};
    with.tools = tools;
    assert_int_equal(text_new(&x, tok, &with, take, s), OK);
    return x;
}

/* Feeds tokens of `text`: what stands between « and » is spelled byte by byte, tags outside are
 * their own tokens. */
static int feed_marked(struct text *x, const char *text) {
    int stopped = 0;
    bool spelled = false;
    for (size_t n = strlen(text), i = 0, len; i < n; i += len) {
        if (memcmp(text + i, "«", 2) == 0 || memcmp(text + i, "»", 2) == 0) {
            spelled = text[i + 1] == "«"[1];
            len = 2;
            continue;
        }
        int32_t id = spelled ? -1 : tok_added_at(tok, text + i, n - i, &len);
        if (id < 0) {
            id = (unsigned char)text[i];
            len = 1;
        }
        stopped = text_feed(x, id);
    }
    return stopped;
}

static void check_end(const struct text_options *o, const char *text, bool truncated,
                      const char *want) {
    struct seen s;
    struct text *x = open_text(o, &s);
    feed_marked(x, text);
    text_end(x, truncated);
    finish_seen(&s);
    if (strcmp(s.all.p, want) != 0)
        fail_msg("fed %s\nexpected %s\nfound    %s", text, want, s.all.p);
    text_free(x);
    buf_deinit(&s.all);
}

static void check(const struct text_options *o, const char *text, const char *want) {
    check_end(o, text, false, want);
}

static void reasoning_and_content_are_told_apart(void **state) {
    UNUSED(state);
    check(&thinking, "why</think>so", "R(why)C(so)");
    check(&thinking, "\nwhy\n\n</think>\n\nso\n", "R(why)C(so\n)");
    check(&thinking, "<think>why</think>so", "R(why)C(so)");
    check(&thinking, "«<think>why</think>»so", "R(why)C(so)");
    check(&thinking, "«a</thin</think>»b", "R(a</thin)C(b)");
    check(&thinking, "never closed\n", "R(never closed)");
    check(&thinking, "</think>x", "C(x)");
    check(&thinking, "a</think>", "R(a)");
    check(&thinking, "a «<tool_call>» b</think>c", "R(a <tool_call> b)C(c)");
    check(&thinking, "a «<think>» b</think>c", "R(a <think> b)C(c)");
    check(&chat_on, "\n\nso", "C(so)");
    check(&chat_on, "</think>\nso", "C(so)");
    check(&chat_on, "«</think>»\nso", "C(so)");
    check(&chat_on, "<think>why</think>so", "R(why)C(so)");
    check(&chat_on, "«<think>»why</think>so", "R(why)C(so)");
    check(&chat_on, "a «<think>» b «</think>»", "C(a <think> b </think>)");
    check(&chat_on, "a <think>b</think>c", "C(a bc)");
    check(&chat_on, "a<b «</arg_key>» <", "C(a<b </arg_key> <)");
    check(&chat_on, "<tool_response>x</tool_response>", "C(x)");
}

static void calls_are_parsed_out_of_content(void **state) {
    UNUSED(state);
    check(&chat_on, "<tool_call>f<arg_key>s</arg_key><arg_value>Oslo</arg_value></tool_call>",
          "N0(f)A0({\"s\": \"Oslo\"})");
    check(&chat_on, "look: \n<tool_call>now</tool_call>\n", "C(look:)N0(now)A0({})");
    check(&chat_on, "<tool_call>\n f \n</tool_call>\n<tool_call>g</tool_call> then \n",
          "N0(f)A0({})N1(g)A1({})C(then \n)");
    check(&chat_on,
          "<tool_call>f\n<arg_key> n </arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>"
          "<arg_value>True</arg_value></tool_call>",
          "N0(f)A0({\"n\": 3, \"b\": true})");
    check(&chat_on,
          "«<tool_call>f<arg_key>s</arg_key><arg_value>a<b</arg_key></arg</arg_value></tool_call>»",
          "N0(f)A0({\"s\": \"a<b</arg_key></arg\"})");
    check(&thinking, "hm\n<tool_call>f</tool_call>", "R(hm)N0(f)A0({})");
    check(&thinking, "hm</think>\n\n<tool_call>f</tool_call>", "R(hm)N0(f)A0({})");
    check(&chat_on,
          "<tool_call></tool_call>a<tool_call> "
          "<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>b",
          "C(ab)");
    check(&chat_on, "<tool_call>f<tool_call>g</tool_call>", "N0(g)A0({})");
    check(&chat_on, "<tool_call>f<arg_key>s<arg_value>x</arg_value></tool_call>",
          "N0(f)A0({\"s\": \"x\"})");
    check(&chat_on, "<tool_call>f<arg_key>s</arg_key></tool_call>a", "N0(f)A0({})C(a)");
    check(&chat_on, "<tool_call>f<arg_key>s</arg_key><tool_call>g</tool_call>",
          "N0(f)A0({})N1(g)A1({})");
    check(&chat_on, "<tool_call>bare<arg_key>s</arg_key><arg_value>1</arg_value></tool_call>",
          "N0(bare)A0({\"s\": \"1\"})");
    struct text_options no_tools = {.chat = true};
    check(&no_tools, "a <tool_call>f</tool_call>", "C(a <tool_call>f</tool_call>)");
}

static void a_value_ends_where_it_was_meant_to(void **state) {
    UNUSED(state);
#define ARG(v) "<tool_call>f<arg_key>s</arg_key><arg_value>" v "</arg_value></tool_call>"
    check(&chat_on, ARG(" a\n\"q\"\\\t<x> é "),
          "N0(f)A0({\"s\": \" a\\n\\\"q\\\"\\\\\\t<x> é \"})");
    check(&chat_on, ARG("a«</arg_value>»b"), "N0(f)A0({\"s\": \"a</arg_value>b\"})");
    check(&chat_on, ARG("a«</arg_value>»"), "N0(f)A0({\"s\": \"a</arg_value>\"})");
    check(&chat_on, ARG("a</arg_key><think>"), "N0(f)A0({\"s\": \"a</arg_key><think>\"})");
    check(&chat_on, "<tool_call>f<arg_key>s</arg_key><arg_value>a«</arg_value>»\n</tool_call>b",
          "N0(f)A0({\"s\": \"a\"})C(b)");
    check(&chat_on,
          "<tool_call>f<arg_key>s</arg_key><arg_value>a«</arg_value>» <arg_key>n</arg_key>"
          "<arg_value>1</arg_value></tool_call>",
          "N0(f)A0({\"s\": \"a\", \"n\": 1})");
    check(&chat_on, "<tool_call>f<arg_key>s</arg_key>«<arg_value>a</arg_value>»</tool_call>",
          "N0(f)A0({\"s\": \"a\"})");
}

static void values_have_the_type_of_the_schema(void **state) {
    UNUSED(state);
    static const struct {
        const char *key, *text, *json;
    } cases[] = {
        {"s", "3", "\"3\""},
        {"s", "null", "\"null\""},
        {"e", "1", "\"1\""},
        {"n", " 3 ", "3"},
        {"n", "three", "\"three\""},
        {"n", "123456789012345678901234567890", "123456789012345678901234567890"},
        {"b", "true", "true"},
        {"b", "False", "false"},
        {"o", "{'a': [1, None, (True,)], \"b\": 'it\\'s'}",
         "{\"a\": [1, null, [true]], \"b\": \"it's\"}"},
        {"o", "{\"a\":1.50}", "{\"a\":1.50}"},
        {"o", "{'a': }", "\"{'a': }\""},
        {"o", "{1: 2}", "\"{1: 2}\""},
        {"o", "[1", "\"[1\""},
        {"o", "", "\"\""},
        {"u", "null", "null"},
        {"u", "5", "\"5\""},
        {"u", "None", "\"None\""},
        {"a", "5", "5"},
        {"a", "x y", "\"x y\""},
        {"a", "true", "\"true\""},
        {"unknown", "5", "5"},
        {"unknown", "x", "\"x\""},
        {"unknown", "None", "\"None\""},
        {"unknown", "[1, 2]", "[1, 2]"},
        {"unknown", "\"q\"", "\"q\""},
        {"unknown", " x\n", "\" x\\n\""},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char fed[256], want[256];
        snprintf(fed, sizeof fed,
                 "<tool_call>f<arg_key>%s</arg_key><arg_value>%s</arg_value></tool_call>",
                 cases[i].key, cases[i].text);
        snprintf(want, sizeof want, "N0(f)A0({\"%s\": %s})", cases[i].key, cases[i].json);
        check(&chat_on, fed, want);
    }
}

static void string_arguments_stream_and_others_wait(void **state) {
    UNUSED(state);
    struct seen s;
    struct text *x = open_text(&chat_on, &s);
    feed_marked(x, "<tool_call>f<arg_key>s</arg_key><arg_value>abc");
    assert_int_equal(s.deltas, 5); /* name, the opening, three letters */
    feed_marked(x, "</arg_value><arg_key>n</arg_key><arg_value>12");
    assert_int_equal(s.deltas, 6); /* the closing quote */
    assert_int_equal(text_calls(x), 0);
    feed_marked(x, "</arg_value></tool_call>");
    assert_int_equal(text_calls(x), 1);
    text_end(x, false);
    text_free(x);
    buf_deinit(&s.all);
}

static void a_cut_off_call_shows_no_more(void **state) {
    UNUSED(state);
    check_end(&chat_on, "a <tool_call>f", true, "C(a)");
    check_end(&chat_on, "a «<tool_call>f»", true, "C(a)");
    check_end(&chat_on, "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value>", true,
              "N0(f)A0({\"s\": \"x\")");
    check_end(&chat_on, "<tool_call>f<arg_key>n</arg_key><arg_value>12", true, "N0(f)");
    check_end(&chat_on, "<tool_call>f<arg_key>s</arg_key><arg_value>x«</arg_»", true,
              "N0(f)A0({\"s\": \"x)");
    check_end(&chat_on, "hello \n", true, "C(hello \n)");
    /* an end token in the middle of a call: as far as it goes it is one */
    check(&chat_on, "<tool_call>f", "N0(f)A0({})");
    check(&chat_on, "<tool_call>f<arg_key>s</arg_key><arg_value>x", "N0(f)A0({\"s\": \"x\"})");
    check(&chat_on, "<tool_call>f<arg_key>n</arg_key><arg_value>12", "N0(f)A0({\"n\": 12})");
    check(&chat_on, "<tool_call>f<arg_key>n", "N0(f)A0({})");
    /* prose about the tag */
    check(&chat_on, "write «<tool_call>» and a name", "C(write <tool_call> and a name)");
}

static void without_chat_tags_are_text_and_control_tokens_are_nothing(void **state) {
    UNUSED(state);
    struct text_options plain = {0};
    check(&plain, "\n<think>a</think> <tool_call>«<|user|>»<|user|>[PAD]",
          "C(\n<think>a</think> <tool_call><|user|>[PAD])");
    struct seen s;
    struct text *x = open_text(&plain, &s);
    text_feed(x, tok_added(tok, "<|user|>"));
    text_feed(x, 284);            /* the filler */
    text_feed(x, tok_vocab(tok)); /* nothing */
    text_feed(x, -1);
    text_end(x, false);
    assert_int_equal(s.deltas, 0);
    text_free(x);
}

/* ---- stop strings ---- */

static void check_stop(const struct text_options *base, const char *stop, const char *second,
                       bool include, const char *text, const char *want) {
    const char *stops[] = {stop, second};
    struct text_options o = *base;
    o.stops = stops;
    o.n_stops = second ? 2 : 1;
    o.include_stop = include;
    check(&o, text, want);
}

static void stop_strings_are_found_across_tokens_and_never_shown(void **state) {
    UNUSED(state);
    struct text_options plain = {0};
    check_stop(&plain, "STOP", NULL, false, "abSTOPcd", "C(ab)");
    check_stop(&plain, "STOP", NULL, true, "abSTOPcd", "C(abSTOP)");
    check_stop(&plain, "STOP", NULL, false, "abSTOcd", "C(abSTOcd)");
    check_stop(&plain, "STOP", NULL, false, "SSTSTOPx", "C(SST)");
    check_stop(&plain, "aab", NULL, false, "aaaab", "C(aa)");
    check_stop(&plain, "abcd", "bc", false, "xabcd", "C(xa)");
    check_stop(&plain, "b", "ab", false, "xab", "C(x)");
    check_stop(&plain, "", "b", false, "ab", "C(a)");
    check_stop(&plain, "é", NULL, false, "aèé!", "C(aè)");
    check_stop(&plain, "STOP", NULL, false, "abSTO", "C(abSTO)");
    check_stop(&plain, "STOP", NULL, false, "STOP", "");
    check_stop(&plain, "<think>", NULL, false, "a<think>b", "C(a)");
    check_stop(&chat_on, "\n\n", NULL, false, "a\n\nb", "C(a)");
    check_stop(&chat_on, "b", NULL, false, "a \n b", "C(a \n )");
    check_stop(&chat_on, "x", NULL, false, "a<tool_call>x</tool_call>bx", "C(a)N0(x)A0({})C(b)");
    check_stop(&thinking, "b", NULL, false, "abc</think>d", "R(a)");
    check_stop(&thinking, "ab", NULL, false, "a</think>bab", "R(a)C(b)");
    check_stop(&chat_on, "<to", NULL, false, "a «<tool_call>»f</tool_call>", "C(a)N0(f)A0({})");

    struct seen s;
    const char *stops[] = {"lo w"};
    struct text_options o = {.stops = stops, .n_stops = 1};
    struct text *x = open_text(&o, &s);
    assert_int_equal(feed_marked(x, "hello "), 0);
    assert_null(text_stopped_by(x));
    assert_string_equal(s.all.p, "C(hel");
    assert_int_equal(feed_marked(x, "w"), 1);
    assert_string_equal(text_stopped_by(x), "lo w");
    assert_int_equal(feed_marked(x, "more"), 1);
    text_end(x, false);
    assert_string_equal(s.all.p, "C(hel");
    text_free(x);
    buf_deinit(&s.all);
}

static void too_many_or_too_long_stop_strings_are_refused(void **state) {
    UNUSED(state);
    const char *many[LIMIT_STOP_STRINGS + 1];
    char longest[LIMIT_STOP_STRING_BYTES + 2];
    struct text *x;
    for (size_t i = 0; i < ARRAY_LEN(many); i++) many[i] = "x";
    memset(longest, 'a', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    struct text_options o = {.stops = many, .n_stops = ARRAY_LEN(many)};
    assert_int_equal(text_new(&x, tok, &o, take, NULL), ERR_LIMIT);
    many[0] = longest;
    o.n_stops = 1;
    assert_int_equal(text_new(&x, tok, &o, take, NULL), ERR_LIMIT);
}

/* ---- code points ---- */

static void half_code_points_wait_and_broken_ones_are_replaced(void **state) {
    UNUSED(state);
    struct text_options plain = {0};
    check(&plain, "🐱é日", "C(🐱é日)");
    check(&plain, "a\xF0\x9F\x90", "C(a\xEF\xBF\xBD)");
    check(&plain, "\xF0\x9F<think>", "C(\xEF\xBF\xBD<think>)");
    check(&plain, "\xE2\x82z\xFF\xC0\xAF\xED\xA0\x80",
          "C(\uFFFDz\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD)");
    check(&thinking, "a\xF0\x9F</think>b", "R(a\uFFFD)C(b)");
    static const struct {
        const char *p;
        size_t complete;
    } cases[] = {{"", 0},         {"a", 1},
                 {"a\xC3", 1},    {"a\xC3\xA9", 3},
                 {"\xE2\x82", 0}, {"\xF0\x9F\x90", 0},
                 {"\xF0\x80", 2}, {"\x80\x80\x80\x80", 4},
                 {"\xED\xA0", 2}, {"\xC0", 1},
                 {"\xF5\x80", 2}, {"\xE2\x82\xAC\xE2", 3}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        assert_int_equal(utf8_complete(cases[i].p, strlen(cases[i].p)), cases[i].complete);
}

/* ---- however it is cut ---- */

static uint64_t next(uint64_t *rng) {
    *rng ^= *rng << 13;
    *rng ^= *rng >> 7;
    return *rng ^= *rng << 17;
}

static const char *const scraps[] = {"<think>",
                                     "</think>",
                                     "<tool_call>",
                                     "</tool_call>",
                                     "<arg_key>",
                                     "</arg_key>",
                                     "<arg_value>",
                                     "</arg_value>",
                                     "<tool_response>",
                                     "f",
                                     "s",
                                     "n",
                                     "12",
                                     "true",
                                     "ab",
                                     "a",
                                     "b",
                                     "\n",
                                     " ",
                                     "<",
                                     "</",
                                     "<tool_",
                                     "</arg_",
                                     "é",
                                     "🐱",
                                     "\xF0\x9F",
                                     "\x80",
                                     "\xE2\x82",
                                     "\"",
                                     "\\",
                                     "None",
                                     "stop",
                                     "st",
                                     "bab",
                                     "a name that is quite long "};

static void random_options(uint64_t *rng, struct text_options *o) {
    static const char *const stops[] = {"stop", "bab", "é<"};
    *o = (struct text_options){.chat = next(rng) % 4 > 0,
                               .in_reasoning = next(rng) % 2,
                               .parse_tools = next(rng) % 4 > 0,
                               .stops = stops,
                               .n_stops = (int)(next(rng) % 4),
                               .include_stop = next(rng) % 2};
}

/* A random answer: tokens of one byte, or -1 - i for scrap i as its own token (a tag). */
static size_t random_answer(uint64_t *rng, int32_t *items, size_t room) {
    size_t n = 0;
    for (size_t k = next(rng) % 40; k > 0 && n + 40 < room; k--) {
        size_t i = next(rng) % ARRAY_LEN(scraps);
        int32_t id = tok_added(tok, scraps[i]);
        if (id >= 0 && next(rng) % 2) {
            items[n++] = id;
            continue;
        }
        for (const char *c = scraps[i]; *c; c++) items[n++] = (unsigned char)*c;
    }
    return n;
}

/* Runs of ordinary bytes are fed cut into pieces of 1 to `most` bytes. */
static void feed_cut(struct text *x, const int32_t *items, size_t n, size_t most, uint64_t *rng) {
    char piece[4096];
    for (size_t i = 0; i < n;) {
        if (items[i] > 255) {
            text_feed(x, items[i++]);
            continue;
        }
        size_t len = 0, want = 1 + next(rng) % most;
        while (i < n && items[i] <= 255 && len < want) piece[len++] = (char)items[i++];
        text_feed_bytes(x, piece, len);
    }
}

static void the_joined_output_does_not_depend_on_the_cuts(void **state) {
    UNUSED(state);
    const char *given = getenv("OCTAVO_TEST_SEED");
    uint64_t first = given ? strtoull(given, NULL, 0) : 1, last = given ? first : 20000;
    for (uint64_t seed = first; seed <= last; seed++) {
        uint64_t rng = seed * 0x9E3779B97F4A7C15ull | 1;
        struct text_options o;
        int32_t items[2048];
        struct seen outs[3];
        int calls[3];
        random_options(&rng, &o);
        bool truncated = next(&rng) % 2;
        size_t n = random_answer(&rng, items, ARRAY_LEN(items));
        for (int k = 0; k < 3; k++) {
            struct text *x = open_text(&o, &outs[k]);
            feed_cut(x, items, n, k == 0 ? 1 : k == 1 ? 4096 : 7, &rng);
            text_end(x, truncated);
            finish_seen(&outs[k]);
            calls[k] = text_calls(x);
            text_free(x);
        }
        for (int k = 1; k < 3; k++)
            if (strcmp(outs[0].all.p, outs[k].all.p) != 0 || calls[0] != calls[k])
                fail_msg("OCTAVO_TEST_SEED=%llu\nbyte by byte %s\nin pieces    %s",
                         (unsigned long long)seed, outs[0].all.p, outs[k].all.p);
        for (int k = 0; k < 3; k++) buf_deinit(&outs[k].all);
    }
}

/* Every whole call's arguments are one JSON object, whatever was fed. */
static struct buf call_json[64];
static void take_json(void *user, const struct text_delta *d) {
    UNUSED(user);
    if (d->kind == TEXT_TOOL_ARGS && d->call < 64) buf_add(&call_json[d->call], d->s, d->n);
}

static void arguments_are_always_a_json_object(void **state) {
    UNUSED(state);
    for (uint64_t seed = 1; seed <= 20000; seed++) {
        uint64_t rng = seed * 0xD1342543DE82EF95ull | 1;
        int32_t items[2048];
        struct text *x;
        struct text_options o = chat_on;
        o.tools = tools;
        assert_int_equal(text_new(&x, tok, &o, take_json, NULL), OK);
        feed_cut(x, items, random_answer(&rng, items, ARRAY_LEN(items)), 9, &rng);
        text_end(x, false);
        for (int k = 0; k < MIN(text_calls(x), 64); k++) {
            json_error_t why;
            json_t *v = json_loadb(call_json[k].p, call_json[k].n, JSON_ALLOW_NUL, &why);
            if (!json_is_object(v))
                fail_msg("seed %llu: %s in %s", (unsigned long long)seed, why.text, call_json[k].p);
            json_decref(v);
        }
        for (int k = 0; k < 64; k++) buf_clear(&call_json[k]);
        text_free(x);
    }
    for (int k = 0; k < 64; k++) buf_deinit(&call_json[k]);
}

static void reasoning_tokens_are_counted(void **state) {
    UNUSED(state);
    struct seen s;
    struct text *x = open_text(&thinking, &s);
    feed_marked(x, "abc</think>de");
    assert_int_equal(text_reasoning_tokens(x), 3);
    text_free(x);
    buf_deinit(&s.all);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reasoning_and_content_are_told_apart),
        cmocka_unit_test(calls_are_parsed_out_of_content),
        cmocka_unit_test(a_value_ends_where_it_was_meant_to),
        cmocka_unit_test(values_have_the_type_of_the_schema),
        cmocka_unit_test(string_arguments_stream_and_others_wait),
        cmocka_unit_test(a_cut_off_call_shows_no_more),
        cmocka_unit_test(without_chat_tags_are_text_and_control_tokens_are_nothing),
        cmocka_unit_test(stop_strings_are_found_across_tokens_and_never_shown),
        cmocka_unit_test(too_many_or_too_long_stop_strings_are_refused),
        cmocka_unit_test(half_code_points_wait_and_broken_ones_are_replaced),
        cmocka_unit_test(the_joined_output_does_not_depend_on_the_cuts),
        cmocka_unit_test(arguments_are_always_a_json_object),
        cmocka_unit_test(reasoning_tokens_are_counted),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
