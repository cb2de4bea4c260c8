/* tests/conformance/tok_tool.c: the tokenizer, chat format and output parser for test scripts.
 *
 * usage: tok_tool MODEL.gguf < requests.jsonl > answers.jsonl
 * One JSON object a line in, one out, in order:
 *   {"op":"encode","text":T,"trusted":bool}        {"ids":[…]} or {"error":code}
 *   {"op":"decode","ids":[…]}                      {"text":T}   as a completion would stream it
 *   {"op":"scrub","hex":H,"cuts":[…]}              {"text":T}   the bytes fed in pieces
 *   {"op":"render","family":0..2,"messages":…,"tools":…,"thinking":b,"clear":b,"prompt":b,
 *    "effort":s}                                   {"text":T,"ids":[…]} or {"error":s,"param":s}
 *   {"op":"json","value":V}                        {"text":T}   as the chat format prints it
 * Called by: test_tokenizer.py, test_chat.py.  Fails how: a message and exit status 2.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/chat.h"
#include "coordinator/text.h"

static json_t *ids_json(const struct tok_ids *ids) {
    json_t *a = json_array();
    for (size_t i = 0; i < ids->n; i++) json_array_append_new(a, json_integer(ids->ids[i]));
    return a;
}

static json_t *encode(const struct tok *t, json_t *request) {
    json_t *text = json_object_get(request, "text");
    bool trusted = json_is_true(json_object_get(request, "trusted"));
    struct tok_ids ids = {0};
    int rc = tok_encode(t, json_string_value(text), json_string_length(text),
                        trusted ? TOK_TRUSTED : TOK_PLAIN, &ids);
    json_t *answer = rc < 0 ? json_pack("{s:s}", "error", err_name(rc))
                            : json_pack("{s:o}", "ids", ids_json(&ids));
    tok_ids_deinit(&ids);
    return answer;
}

static void collect(void *user, const struct text_delta *d) {
    if (!utf8_valid(d->s, d->n)) {
        fprintf(stderr, "a delta of kind %d is not whole code points\n", d->kind);
        exit(2);
    }
    buf_add(user, d->s, d->n);
}

static json_t *text_answer(struct buf *b) {
    json_t *answer = json_pack("{s:o}", "text", json_stringn(b->p ? b->p : "", b->n));
    buf_deinit(b);
    return answer;
}

static json_t *decode(const struct tok *t, json_t *request) {
    json_t *ids = json_object_get(request, "ids");
    struct buf joined = {0};
    struct text *x;
    struct text_options o = {0};
    if (text_new(&x, t, &o, collect, &joined) < 0) return NULL;
    for (size_t i = 0; i < json_array_size(ids); i++)
        text_feed(x, (int32_t)json_integer_value(json_array_get(ids, i)));
    text_end(x, false);
    text_free(x);
    return text_answer(&joined);
}

static json_t *scrub(const struct tok *t, json_t *request) {
    const char *hex = json_string_value(json_object_get(request, "hex"));
    json_t *cuts = json_object_get(request, "cuts");
    struct buf raw = {0}, joined = {0};
    for (; hex && hex[0] && hex[1]; hex += 2) {
        char pair[3] = {hex[0], hex[1], 0};
        buf_add_byte(&raw, (char)strtol(pair, NULL, 16));
    }
    struct text *x;
    struct text_options o = {0};
    if (text_new(&x, t, &o, collect, &joined) < 0) return NULL;
    size_t at = 0;
    for (size_t i = 0; i <= json_array_size(cuts); i++) {
        json_t *cut = json_array_get(cuts, i);
        size_t to = cut ? (size_t)json_integer_value(cut) : raw.n;
        text_feed_bytes(x, raw.p + at, to - at);
        at = to;
    }
    text_end(x, false);
    text_free(x);
    buf_deinit(&raw);
    return text_answer(&joined);
}

static json_t *render(const struct tok *t, json_t *request) {
    json_t *clear = json_object_get(request, "clear"), *prompt = json_object_get(request, "prompt");
    struct chat_options o = {
        .thinking = !json_is_false(json_object_get(request, "thinking")),
        .clear_thinking = !json_is_false(clear),
        .add_generation_prompt = !json_is_false(prompt),
        .reasoning_effort = json_string_value(json_object_get(request, "effort")),
    };
    struct chat_prompt p;
    const char *param;
    struct err_text err = {0};
    int rc = chat_render((enum chat_family)json_integer_value(json_object_get(request, "family")),
                         t, json_object_get(request, "messages"), json_object_get(request, "tools"),
                         &o, &p, &param, &err);
    if (rc < 0)
        return json_pack("{s:s, s:s, s:s}", "error", err.text, "param", param, "code",
                         err_name(rc));
    json_t *answer = json_pack("{s:o, s:o, s:b}", "text", json_stringn(p.text, p.n_text), "ids",
                               ids_json(&p.ids), "in_reasoning", p.in_reasoning);
    chat_prompt_deinit(&p);
    return answer;
}

static json_t *answer_to(const struct tok *t, json_t *request) {
    const char *op = json_string_value(json_object_get(request, "op"));
    if (!op) return NULL;
    if (strcmp(op, "encode") == 0) return encode(t, request);
    if (strcmp(op, "decode") == 0) return decode(t, request);
    if (strcmp(op, "scrub") == 0) return scrub(t, request);
    if (strcmp(op, "render") == 0) return render(t, request);
    if (strcmp(op, "json") != 0) return NULL;
    struct buf text = {0};
    chat_json_add(&text, json_object_get(request, "value"));
    return text_answer(&text);
}

int main(int argc, char **argv) {
    struct gguf *g;
    struct tok *t;
    struct err_text err = {0};
    if (argc != 2 || gguf_open(&g, argv[1], &err) < 0 || tok_open(&t, g, &err) < 0) {
        fprintf(stderr, "usage: tok_tool MODEL.gguf < requests\n%s\n", err.text);
        return 2;
    }
    gguf_close(g);
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    while ((n = getline(&line, &room, stdin)) > 0) {
        json_error_t why;
        json_t *request = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &why);
        json_t *answer = request ? answer_to(t, request) : NULL;
        if (!answer) {
            fprintf(stderr, "not a request: %s: %.200s\n", why.text, line);
            return 2;
        }
        json_dumpf(answer, stdout, JSON_COMPACT);
        putchar('\n');
        json_decref(answer);
        json_decref(request);
    }
    free(line);
    tok_close(t);
    return 0;
}
