/* coordinator/chat.c: renders conversations as the GLM-5 family was trained to read them.
 *
 * Owns: nothing.  Called by: api_chat.c (on a pool thread).  Pure.
 * Fails how: ERR_FORMAT with a sentence and a JSON path; ERR_SETUP where the vocabulary lacks the
 * marks of the format; ERR_NOMEM.
 * Limits: LIMIT_TOOLS, LIMIT_PROMPT_BYTES.  Tested by: tests/unit/test_chat.c,
 * tests/conformance/test_chat.py
 *
 * A file brings its template as a program. It is not executed: it is untrusted, and the three
 * dialects of this family differ in a handful of places that read better as plain code. While
 * rendering, text and ids grow together: a mark of the format closes the run of text before it
 * (which is encoded as one piece, like the reference does between added tokens) and adds its own
 * id; everything a person wrote only ever joins a run, so it cannot become a mark.
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/chat.h"
#include "coordinator/outline.h"
#include "proto/limits.h"

struct render {
    enum chat_family family;
    const struct tok *tok;
    const struct chat_options *o;
    json_t *tools; /* array or NULL */
    struct buf text;
    size_t run_from; /* text from here on is not encoded yet */
    struct tok_ids ids;
    const char *param; /* for the error object */
    struct err_text *err;
};

/* ---- text and marks ---- */

static int end_run(struct render *r) {
    size_t from = r->run_from;
    r->run_from = r->text.n;
    if (from == r->text.n) return OK;
    int rc = tok_encode(r->tok, r->text.p + from, r->text.n - from, TOK_PLAIN, &r->ids);
    return rc < 0 ? err_set(r->err, rc, "%s: expected valid UTF-8 that fits in memory", r->param)
                  : OK;
}

/* Text of the format itself: added tokens in it are marks. */
static int add_format(struct render *r, const char *s) {
    size_t n = strlen(s);
    for (size_t i = 0, len; i < n; i += len) {
        int32_t id = tok_added_at(r->tok, s + i, n - i, &len);
        if (id >= 0) {
            TRY(end_run(r));
            TRY(tok_ids_push(&r->ids, id));
        } else {
            len = 1;
        }
        buf_add(&r->text, s + i, len);
        if (id >= 0) r->run_from = r->text.n;
    }
    return OK;
}

struct span {
    const char *p;
    size_t n;
};

static void add_span(struct render *r, struct span s) {
    buf_add(&r->text, s.p, s.n);
}

/* The bytes of white space that begin at p, 0 if none; what Python's str.strip removes. */
static size_t space_at(const char *p, size_t n) {
    const unsigned char *q = (const unsigned char *)p;
    if (n >= 1 && ((q[0] >= 0x09 && q[0] <= 0x0D) || (q[0] >= 0x1C && q[0] <= 0x20))) return 1;
    if (n >= 2 && q[0] == 0xC2 && (q[1] == 0x85 || q[1] == 0xA0)) return 2;
    if (n < 3) return 0;
    uint32_t c = (uint32_t)q[0] << 16 | (uint32_t)q[1] << 8 | q[2];
    bool space = c == 0xE19A80 || (c >= 0xE28080 && c <= 0xE2808A) || c == 0xE280A8 ||
                 c == 0xE280A9 || c == 0xE280AF || c == 0xE2819F || c == 0xE38080;
    return space ? 3 : 0;
}

static struct span strip(struct span s) {
    for (size_t len; (len = space_at(s.p, s.n)) > 0; s.n -= len) s.p += len;
    for (bool again = true; again;) {
        again = false;
        for (size_t len = 1; len <= 3 && len <= s.n && !again; len++)
            if (space_at(s.p + s.n - len, len) == len) {
                s.n -= len;
                again = true;
            }
    }
    return s;
}

static struct span find_first(struct span s, const char *needle) {
    char *at = s.n ? memmem(s.p, s.n, needle, strlen(needle)) : NULL;
    return (struct span){at, at ? strlen(needle) : 0};
}

static struct span find_last(struct span s, const char *needle) {
    struct span last = {0}, at;
    for (struct span rest = s; (at = find_first(rest, needle)).p;) {
        last = at;
        rest = (struct span){at.p + at.n, (size_t)(s.p + s.n - at.p) - at.n};
    }
    return last;
}

/* ---- reading the request ---- */

static const char *found_name(const json_t *v) {
    if (!v) return "nothing";
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        return "null";
    }
    return "nothing";
}

struct path {
    char s[96];
};

static PRINTF_LIKE(1, 2) struct path path_of(const char *fmt, ...) {
    struct path p;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(p.s, sizeof p.s, fmt, ap);
    va_end(ap);
    return p;
}

static int wrong(struct render *r, struct path at, const char *expected, const json_t *found) {
    return err_set(r->err, ERR_FORMAT, "%s: expected %s, found %s", at.s, expected,
                   found_name(found));
}

static void add_json_text(struct buf *out, const json_t *v) {
    if (json_is_string(v))
        buf_add(out, json_string_value(v), json_string_length(v));
    else
        chat_json_add(out, v);
}

/* One part of a content array. */
static int part_text(struct render *r, const json_t *part, struct path at, struct buf *out) {
    if (json_is_string(part)) {
        add_json_text(out, part);
        return OK;
    }
    if (!json_is_object(part)) return wrong(r, at, "an object", part);
    const json_t *type = json_object_get(part, "type"), *output = json_object_get(part, "output");
    if (!type && output) {
        add_json_text(out, output);
        return OK;
    }
    if (!json_is_string(type)) return wrong(r, path_of("%s.type", at.s), "a string", type);
    const char *name = json_string_value(type);
    const char *field = strcmp(name, "refusal") == 0 ? "refusal" : "text";
    if (strcmp(name, "text") != 0 && strcmp(name, "refusal") != 0 &&
        strcmp(name, "input_text") != 0 && strcmp(name, "output_text") != 0)
        return err_set(r->err, ERR_FORMAT,
                       "%s: expected a text part (this model reads text only), found one of type "
                       "\"%.40s\"",
                       at.s, name);
    const json_t *text = json_object_get(part, field);
    if (!json_is_string(text)) return wrong(r, path_of("%s.%s", at.s, field), "a string", text);
    add_json_text(out, text);
    return OK;
}

/* A content, string or parts, as one text. */
static int content_text(struct render *r, const json_t *content, struct path at, struct buf *out) {
    if (json_is_string(content)) {
        add_json_text(out, content);
        return OK;
    }
    if (!json_is_array(content)) return wrong(r, at, "a string or an array of parts", content);
    for (size_t i = 0; i < json_array_size(content); i++)
        TRY(part_text(r, json_array_get(content, i), path_of("%s[%zu]", at.s, i), out));
    return OK;
}

enum role { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL, ROLE_UNKNOWN };

static enum role role_of(const json_t *message) {
    static const struct {
        const char *name;
        enum role role;
    } roles[] = {{"system", ROLE_SYSTEM}, {"developer", ROLE_SYSTEM},
                 {"user", ROLE_USER},     {"assistant", ROLE_ASSISTANT},
                 {"tool", ROLE_TOOL},     {"function", ROLE_TOOL}};
    const char *name = json_string_value(json_object_get(message, "role"));
    for (size_t i = 0; name && i < ARRAY_LEN(roles); i++)
        if (strcmp(name, roles[i].name) == 0) return roles[i].role;
    return ROLE_UNKNOWN;
}

static int check_message(struct render *r, const json_t *message, size_t i) {
    if (!json_is_object(message))
        return wrong(r, path_of("messages[%zu]", i), "an object", message);
    const json_t *role = json_object_get(message, "role");
    if (!json_is_string(role)) return wrong(r, path_of("messages[%zu].role", i), "a string", role);
    if (role_of(message) == ROLE_UNKNOWN)
        return err_set(r->err, ERR_FORMAT,
                       "messages[%zu].role: expected system, developer, user, assistant or tool, "
                       "found \"%.40s\"",
                       i, json_string_value(role));
    const json_t *content = json_object_get(message, "content");
    bool needed = role_of(message) == ROLE_USER || role_of(message) == ROLE_SYSTEM;
    if (needed && (!content || json_is_null(content)))
        return wrong(r, path_of("messages[%zu].content", i), "a string or an array of parts",
                     content);
    return OK;
}

/* ---- tools ---- */

/* The object that names the function: inside the envelope, or the tool itself. */
static json_t *tool_function(json_t *tool) {
    json_t *f = json_object_get(tool, "function");
    return json_is_object(f) ? f : tool;
}

static int check_tool(struct render *r, json_t *tool, size_t i) {
    if (!json_is_object(tool)) return wrong(r, path_of("tools[%zu]", i), "an object", tool);
    const json_t *type = json_object_get(tool, "type");
    if (type && !json_is_string(type))
        return wrong(r, path_of("tools[%zu].type", i), "\"function\"", type);
    if (type && strcmp(json_string_value(type), "function") != 0)
        return err_set(r->err, ERR_FORMAT,
                       "tools[%zu].type: expected \"function\", found \"%.40s\"", i,
                       json_string_value(type));
    const json_t *f = json_object_get(tool, "function");
    if (f ? !json_is_object(f) : type != NULL)
        return wrong(r, path_of("tools[%zu].function", i), "an object", f);
    const json_t *name = json_object_get(tool_function(tool), "name");
    if (!json_is_string(name))
        return wrong(r, path_of("tools[%zu]%s.name", i, f ? ".function" : ""), "a string", name);
    return OK;
}

static void add_tool(struct render *r, json_t *tool) {
    if (r->family == CHAT_GLM5) {
        chat_json_add(&r->text, tool);
        return;
    }
    json_t *shown = json_copy(tool_function(tool));
    assert(shown);
    json_object_del(shown, "defer_loading");
    json_object_del(shown, "strict");
    chat_json_add(&r->text, shown);
    json_decref(shown);
}

static bool is_deferred(const struct render *r, json_t *tool) {
    return r->family == CHAT_GLM52 &&
           (json_is_true(json_object_get(tool, "defer_loading")) ||
            json_is_true(json_object_get(tool_function(tool), "defer_loading")));
}

static int add_tools(struct render *r) {
    size_t n = json_array_size(r->tools);
    if (n == 0) return OK;
    r->param = "tools";
    if (n > LIMIT_TOOLS)
        return err_set(r->err, ERR_FORMAT, "tools: expected at most %d, found %zu", LIMIT_TOOLS, n);
    for (size_t i = 0; i < n; i++) TRY(check_tool(r, json_array_get(r->tools, i), i));
    TRY(add_format(r, "<|system|>\n# Tools\n\nYou may call one or more functions to assist with "
                      "the user query.\n\nYou are provided with function signatures within "
                      "<tools></tools> XML tags:\n<tools>\n"));
    for (size_t i = 0; i < n; i++) {
        if (is_deferred(r, json_array_get(r->tools, i))) continue;
        add_tool(r, json_array_get(r->tools, i));
        buf_add_byte(&r->text, '\n');
    }
    return add_format(r, "</tools>\n\nFor each function call, output the function name and "
                         "arguments within the following XML format:\n<tool_call>{function-name}"
                         "<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
                         "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>..."
                         "</tool_call>");
}

/* ---- assistant turns ---- */

static int add_argument(struct render *r, const char *key, const json_t *value) {
    TRY(add_format(r, "<arg_key>"));
    buf_add_str(&r->text, key);
    TRY(add_format(r, "</arg_key><arg_value>"));
    add_json_text(&r->text, value);
    return add_format(r, "</arg_value>");
}

/* The value that a string of arguments spells, or NULL. */
static json_t *parse_arguments(struct span raw) {
    struct outline o = outline_of(raw.p, raw.n);
    if (!outline_fits(&o)) return NULL;
    const size_t flags = JSON_DECODE_ANY | JSON_ALLOW_NUL;
    json_error_t why;
    json_t *parsed = json_loadb(raw.p, raw.n, flags, &why);
    if (!parsed && json_error_code(&why) == json_error_numeric_overflow)
        parsed = json_loadb(raw.p, raw.n, flags | JSON_DECODE_INT_AS_REAL, NULL);
    return parsed;
}

/* Arguments as the API has them: an object, or a string that holds one. What a client sends back
 * may be what a model once wrote wrongly; it is shown to the model as one argument, not refused. */
static int add_arguments(struct render *r, json_t *given) {
    json_t *parsed = NULL, *value = NULL;
    const char *key;
    int rc = OK;
    if (json_is_string(given)) {
        struct span raw = strip((struct span){json_string_value(given), json_string_length(given)});
        if (raw.n == 0) return OK;
        parsed = parse_arguments(raw);
        if (json_is_object(parsed) || json_is_null(parsed)) given = parsed;
    }
    if (json_is_object(given)) {
        json_object_foreach(given, key, value) {
            if (rc == OK) rc = add_argument(r, key, value);
        }
    } else if (given && !json_is_null(given)) {
        rc = add_argument(r, "arguments", given);
    }
    json_decref(parsed);
    return rc;
}

static int add_tool_calls(struct render *r, const json_t *message, size_t i) {
    const json_t *calls = json_object_get(message, "tool_calls");
    if (!calls || json_is_null(calls)) return OK;
    if (!json_is_array(calls))
        return wrong(r, path_of("messages[%zu].tool_calls", i), "an array", calls);
    for (size_t k = 0; k < json_array_size(calls); k++) {
        json_t *call = json_array_get(calls, k);
        if (!json_is_object(call))
            return wrong(r, path_of("messages[%zu].tool_calls[%zu]", i, k), "an object", call);
        json_t *f = tool_function(call), *name = json_object_get(f, "name");
        if (!json_is_string(name))
            return wrong(r, path_of("messages[%zu].tool_calls[%zu].function.name", i, k),
                         "a string", name);
        TRY(add_format(r, "<tool_call>"));
        add_json_text(&r->text, name);
        TRY(add_arguments(r, json_object_get(f, "arguments")));
        TRY(add_format(r, "</tool_call>"));
    }
    return OK;
}

/* The field, or what stands between inline tags; *content loses what was taken. */
static struct span reasoning_of(const json_t *message, struct span *content) {
    const json_t *field = json_object_get(message, "reasoning_content");
    if (!json_is_string(field)) field = json_object_get(message, "reasoning");
    if (json_string_length(field) > 0)
        return (struct span){json_string_value(field), json_string_length(field)};
    struct span close = find_first(*content, "</think>"), last = find_last(*content, "</think>");
    if (!close.p) return (struct span){0};
    struct span inside = {content->p, (size_t)(close.p - content->p)};
    struct span open = find_last(inside, "<think>");
    if (open.p) inside = (struct span){open.p + open.n, (size_t)(close.p - open.p) - open.n};
    const char *end = content->p + content->n;
    *content = (struct span){last.p + last.n, (size_t)(end - last.p) - last.n};
    return inside;
}

static int add_thinking(struct render *r, struct span reasoning, bool after_last_user) {
    bool kept = after_last_user || !r->o->clear_thinking;
    bool empty_pair = false; /* <think></think> rather than </think> where there is nothing */
    if (r->family == CHAT_GLM52) empty_pair = true;
    if (r->family == CHAT_GLM51) empty_pair = after_last_user && r->o->thinking && !reasoning.n;
    if (kept && reasoning.n > 0) {
        TRY(add_format(r, "<think>"));
        add_span(r, r->family == CHAT_GLM5 ? strip(reasoning) : reasoning);
    } else if (empty_pair) {
        TRY(add_format(r, "<think>"));
    }
    return add_format(r, "</think>");
}

static int add_assistant(struct render *r, const json_t *message, size_t i, bool after_last_user) {
    struct buf text = {0};
    const json_t *content = json_object_get(message, "content");
    int rc = OK;
    if (content && !json_is_null(content))
        rc = content_text(r, content, path_of("messages[%zu].content", i), &text);
    struct span rest = {text.p, text.n};
    if (rc == OK) rc = add_format(r, "<|assistant|>");
    if (rc == OK) rc = add_thinking(r, reasoning_of(message, &rest), after_last_user);
    if (rc == OK) {
        add_span(r, strip(rest));
        rc = add_tool_calls(r, message, i);
    }
    buf_deinit(&text);
    return rc;
}

/* ---- tool results ---- */

static bool item_has(const json_t *content, const char *key, const char *type) {
    const json_t *first = json_array_get(content, 0);
    const char *is = json_string_value(json_object_get(first, "type"));
    return (key && json_object_get(first, key)) || (type && is && strcmp(is, type) == 0);
}

/* Tools that were deferred and are now revealed by name. The one place where a conversation grows
 * by more than what stands in it: a tool is shown as often as it is named. */
static int add_revealed_tools(struct render *r, const json_t *content, struct path at) {
    buf_add_str(&r->text, "<tools>\n");
    for (size_t i = 0; i < json_array_size(content); i++) {
        const json_t *item = json_array_get(content, i);
        const char *want = json_string_value(json_object_get(item, "tool_name"));
        if (!want) want = json_string_value(json_object_get(item, "name"));
        for (size_t k = 0; want && k < json_array_size(r->tools); k++) {
            json_t *tool = json_array_get(r->tools, k);
            const char *name = json_string_value(json_object_get(tool_function(tool), "name"));
            if (!name || strcmp(name, want) != 0) continue;
            add_tool(r, tool);
            buf_add_byte(&r->text, '\n');
            if (r->text.n > LIMIT_PROMPT_BYTES)
                return err_set(r->err, ERR_FORMAT,
                               "%s: expected references to tools that come to at most %u bytes, "
                               "found more",
                               at.s, LIMIT_PROMPT_BYTES);
        }
    }
    buf_add_str(&r->text, "</tools>");
    return OK;
}

static int add_tool_result(struct render *r, const json_t *message, size_t i, bool first) {
    const json_t *content = json_object_get(message, "content");
    if (first) TRY(add_format(r, "<|observation|>"));
    if (r->family == CHAT_GLM52 && item_has(content, "output", NULL)) {
        for (size_t k = 0; k < json_array_size(content); k++) {
            TRY(add_format(r, "<tool_response>"));
            TRY(part_text(r, json_array_get(content, k),
                          path_of("messages[%zu].content[%zu]", i, k), &r->text));
            TRY(add_format(r, "</tool_response>"));
        }
        return OK;
    }
    TRY(add_format(r, "<tool_response>"));
    if (r->family == CHAT_GLM52 && item_has(content, NULL, "tool_reference"))
        TRY(add_revealed_tools(r, content, path_of("messages[%zu].content", i)));
    else if (content && !json_is_null(content))
        TRY(content_text(r, content, path_of("messages[%zu].content", i), &r->text));
    return add_format(r, "</tool_response>");
}

/* ---- the whole ---- */

static int add_messages(struct render *r, json_t *messages) {
    size_t n = json_array_size(messages), after_last_user = 0;
    r->param = "messages";
    for (size_t i = 0; i < n; i++) {
        TRY(check_message(r, json_array_get(messages, i), i));
        if (role_of(json_array_get(messages, i)) == ROLE_USER) after_last_user = i + 1;
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *m = json_array_get(messages, i), *content = json_object_get(m, "content");
        enum role role = role_of(m);
        if (role == ROLE_ASSISTANT) {
            TRY(add_assistant(r, m, i, i >= after_last_user));
        } else if (role == ROLE_TOOL) {
            bool first = i == 0 || role_of(json_array_get(messages, i - 1)) != ROLE_TOOL;
            TRY(add_tool_result(r, m, i, first));
        } else {
            TRY(add_format(r, role == ROLE_USER ? "<|user|>" : "<|system|>"));
            TRY(content_text(r, content, path_of("messages[%zu].content", i), &r->text));
        }
    }
    return OK;
}

static int add_all(struct render *r, json_t *messages) {
    TRY(add_format(r, "[gMASK]<sop>"));
    if (r->family == CHAT_GLM52 && r->o->thinking) {
        const char *effort = r->o->reasoning_effort;
        bool high = effort && strcmp(effort, "high") == 0;
        TRY(add_format(r, high ? "<|system|>Reasoning Effort: High"
                               : "<|system|>Reasoning Effort: Max"));
    }
    TRY(add_tools(r));
    TRY(add_messages(r, messages));
    if (r->o->add_generation_prompt) {
        TRY(add_format(r, "<|assistant|>"));
        if (r->o->thinking || r->family == CHAT_GLM52) TRY(add_format(r, "<think>"));
        if (!r->o->thinking) TRY(add_format(r, "</think>"));
    }
    return end_run(r);
}

static int check_marks(const struct tok *t, struct err_text *err) {
    static const char *const marks[] = {"[gMASK]",  "<sop>",         "<|system|>",
                                        "<|user|>", "<|assistant|>", "<|observation|>",
                                        "<think>",  "</think>"};
    for (size_t i = 0; i < ARRAY_LEN(marks); i++)
        if (tok_added(t, marks[i]) < 0)
            return err_set(err, ERR_SETUP,
                           "tokenizer.ggml.tokens: expected the chat format's added token %s, "
                           "found none",
                           marks[i]);
    return OK;
}

static int check_shape(struct render *r, json_t *messages) {
    if (!json_is_array(messages))
        return wrong(r, path_of("messages"), "an array of messages", messages);
    if (json_array_size(messages) == 0)
        return err_set(r->err, ERR_FORMAT, "messages: expected at least one message, found none");
    if (r->tools && !json_is_array(r->tools)) {
        r->param = "tools";
        return wrong(r, path_of("tools"), "an array", r->tools);
    }
    return OK;
}

int chat_render(enum chat_family family, const struct tok *t, json_t *messages, json_t *tools,
                const struct chat_options *o, struct chat_prompt *out, const char **param,
                struct err_text *err) {
    struct render r = {.family = family, .tok = t, .o = o, .param = "messages", .err = err};
    r.tools = json_is_null(tools) ? NULL : tools;
    *out = (struct chat_prompt){0};
    int rc = check_marks(t, err);
    if (rc == OK) rc = check_shape(&r, messages);
    if (rc == OK) rc = add_all(&r, messages);
    if (param) *param = rc == OK ? NULL : r.param;
    if (rc < 0) {
        buf_deinit(&r.text);
        tok_ids_deinit(&r.ids);
        return rc;
    }
    *out = (struct chat_prompt){.ids = r.ids,
                                .text = r.text.p,
                                .n_text = r.text.n,
                                .in_reasoning = o->add_generation_prompt && o->thinking};
    return OK;
}

void chat_prompt_deinit(struct chat_prompt *p) {
    tok_ids_deinit(&p->ids);
    free(p->text);
    *p = (struct chat_prompt){0};
}

enum chat_family chat_family_of(const struct gguf *g) {
    struct gguf_str s;
    if (gguf_get_str(g, "tokenizer.chat_template", &s, NULL) != OK) return CHAT_GLM5;
    struct span template = {s.p, s.n};
    if (find_first(template, "Reasoning Effort:").p) return CHAT_GLM52;
    return find_first(template, "defer_loading").p ? CHAT_GLM51 : CHAT_GLM5;
}
