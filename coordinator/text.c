/* coordinator/text.c: the output parser.
 *
 * Owns: its buffers.  Called by: the API files.  Pure.
 * Fails how: text_new: ERR_LIMIT (stop strings), ERR_NOMEM.  Limits: a name opened by a spelled
 * tag, TEXT_NAME_BYTES_MAX; the rest is bounded by the tokens of the request.
 * Tested by: tests/unit/test_text.c, tests/fuzz/fuzz_text.c
 *
 *   token ─┬─ tag ───────────────────────────────────┐
 *          └─ bytes → raw (whole code points) → pend (spelled tags) → state → stop → hold → sink
 *
 * Each stage keeps back exactly what it cannot decide yet: raw the beginning of a code point, pend
 * the beginning of a tag that would mean something in this state, stop the beginning of a stop
 * string, hold the white space that is dropped if reasoning ends or a call begins. A tag that comes
 * as its own token settles everything before it. Because every stage decides on the joined text and
 * not on its pieces, the joined output does not depend on how the text was cut into tokens.
 *
 * In a state where a tag means nothing, its token is dropped (it must not leak) and its spelling is
 * text (somebody is writing about it). Inside an argument only the closing tag means anything.
 * Stop strings apply to reasoning and content, each for itself, not inside calls.
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/chat.h"
#include "coordinator/stop.h"
#include "coordinator/text.h"
#include "coordinator/toolarg.h"

#define TEXT_NAME_BYTES_MAX 256

enum tag {
    TAG_THINK_OPEN,
    TAG_THINK_CLOSE,
    TAG_CALL_OPEN,
    TAG_CALL_CLOSE,
    TAG_KEY_OPEN,
    TAG_KEY_CLOSE,
    TAG_VALUE_OPEN,
    TAG_VALUE_CLOSE,
    TAG_RESPONSE_OPEN,
    TAG_RESPONSE_CLOSE,
    TAGS
};

static const char *const tag_text[TAGS] = {
    "<think>",    "</think>",    "<tool_call>",  "</tool_call>",    "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"};

enum state {
    IN_REASONING,
    IN_CONTENT,
    IN_NAME,      /* after <tool_call> */
    BETWEEN_ARGS, /* expecting <arg_key> or </tool_call> */
    IN_KEY,
    AFTER_KEY, /* expecting <arg_value> */
    IN_VALUE,
    AFTER_SPELLED_CLOSE, /* in a value opened by token, after a spelled </arg_value>: see below */
};

struct text {
    const struct tok *tok;
    struct text_options o;
    text_sink *sink;
    void *user;
    int32_t tag_id[TAGS];
    enum state state;
    bool at_start;    /* nothing was shown yet and no tag was met */
    bool trim_lines;  /* leading line ends are dropped */
    bool trim_spaces; /* leading white space is dropped (after a call) */
    bool ended;
    const char *stopped_by;
    int reasoning_tokens;
    struct stop stop;
    struct buf raw, pend, hold, scratch;
    /* the call being read */
    bool call_by_id, value_by_id;
    bool nameless; /* it has no name and is swallowed */
    bool streamed; /* its argument is a string and is shown as it comes */
    int calls_begun, calls, args;
    unsigned types;
    struct buf before; /* white space held when a spelled tag opened it */
    struct buf name, key, value, doubt;
};

/* ---- life ---- */

int text_new(struct text **out, const struct tok *t, const struct text_options *o, text_sink *sink,
             void *user) {
    struct text *x = calloc(1, sizeof *x);
    if (!x) return ERR_NOMEM;
    *x = (struct text){.tok = t, .o = *o, .sink = sink, .user = user, .at_start = true};
    int rc = stop_init(&x->stop, o->stops, o->n_stops);
    if (rc < 0) {
        free(x);
        return rc;
    }
    x->o.parse_tools = o->chat && o->parse_tools;
    x->trim_lines = o->chat;
    x->state = o->chat && o->in_reasoning ? IN_REASONING : IN_CONTENT;
    for (int i = 0; i < TAGS; i++) x->tag_id[i] = tok_added(t, tag_text[i]);
    *out = x;
    return OK;
}

void text_free(struct text *x) {
    if (!x) return;
    struct buf *all[] = {&x->raw,  &x->pend, &x->hold,  &x->scratch, &x->before,
                         &x->name, &x->key,  &x->value, &x->doubt};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) buf_deinit(all[i]);
    stop_deinit(&x->stop);
    free(x);
}

int text_calls(const struct text *x) {
    return x->calls;
}
const char *text_stopped_by(const struct text *x) {
    return x->stopped_by;
}
int text_reasoning_tokens(const struct text *x) {
    return x->reasoning_tokens;
}

/* ---- showing ---- */

static void emit(struct text *x, enum text_kind kind, const char *p, size_t n) {
    if (n == 0) return;
    struct text_delta d = {.kind = kind, .s = p, .n = n};
    if (kind == TEXT_TOOL_NAME || kind == TEXT_TOOL_ARGS) d.call = x->calls_begun - 1;
    x->sink(x->user, &d);
}

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}
static bool is_line_end(char c) {
    return c == '\n' || c == '\r';
}

/* Whether c at the end of a stretch waits for what comes next. */
static bool is_held(const struct text *x, char c) {
    if (x->state == IN_REASONING) return is_line_end(c);
    return x->o.parse_tools && is_space(c);
}

static void emit_but_hold(struct text *x, const struct buf *b) {
    size_t shown = b->n;
    while (shown > 0 && is_held(x, b->p[shown - 1])) shown--;
    if (shown > 0) {
        buf_add(&x->hold, b->p, shown);
        emit(x, x->state == IN_REASONING ? TEXT_REASONING : TEXT_CONTENT, x->hold.p, x->hold.n);
        buf_clear(&x->hold);
    }
    if (b->n > shown) buf_add(&x->hold, b->p + shown, b->n - shown);
}

static void emit_hold(struct text *x) {
    if (x->hold.n)
        emit(x, x->state == IN_REASONING ? TEXT_REASONING : TEXT_CONTENT, x->hold.p, x->hold.n);
    buf_clear(&x->hold);
}

/* Reasoning or content. */
static void show(struct text *x, const char *p, size_t n) {
    while (n > 0 && ((x->trim_lines && is_line_end(*p)) || (x->trim_spaces && is_space(*p)))) {
        p++;
        n--;
    }
    if (n == 0) return;
    x->trim_lines = x->trim_spaces = x->at_start = false;
    buf_clear(&x->scratch);
    x->stopped_by = stop_feed(&x->stop, p, n, x->o.include_stop, &x->scratch);
    emit_but_hold(x, &x->scratch);
    if (x->stopped_by) emit_hold(x);
}

/* Reasoning or content is over: no stop string can be completed. Its last spaces stay held. */
static void end_stretch(struct text *x) {
    buf_clear(&x->scratch);
    stop_flush(&x->stop, &x->scratch);
    emit_but_hold(x, &x->scratch);
    x->at_start = false;
}

/* ---- tool calls ---- */

static void begin_call(struct text *x, bool by_id) {
    end_stretch(x);
    buf_clear(&x->before);
    if (!by_id && x->hold.n) buf_add(&x->before, x->hold.p, x->hold.n);
    buf_clear(&x->hold);
    x->call_by_id = by_id;
    x->nameless = false;
    x->args = 0;
    buf_clear(&x->name);
    x->state = IN_NAME;
}

static void trim(struct buf *b) {
    size_t lead = 0;
    while (b->n && is_space(b->p[b->n - 1])) b->p[--b->n] = 0;
    while (lead < b->n && is_space(b->p[lead])) lead++;
    buf_drop(b, lead);
}

static void end_name(struct text *x) {
    trim(&x->name);
    x->nameless = x->name.n == 0;
    if (x->nameless) return;
    x->calls_begun++;
    emit(x, TEXT_TOOL_NAME, x->name.p, x->name.n);
}

static void end_call(struct text *x) {
    if (!x->nameless) {
        emit(x, TEXT_TOOL_ARGS, x->args ? "}" : "{}", x->args ? 1 : 2);
        x->calls++;
    }
    x->state = IN_CONTENT;
    x->trim_lines = x->trim_spaces = true;
}

/* A spelled <tool_call> in prose opened nothing: what was taken for a name is content again. */
static void take_back_call(struct text *x) {
    x->state = IN_CONTENT;
    x->trim_lines = x->trim_spaces = false;
    buf_add_str(&x->before, tag_text[TAG_CALL_OPEN]);
    if (x->name.n) buf_add(&x->before, x->name.p, x->name.n);
    show(x, x->before.p, x->before.n);
}

/* Names have no white space inside. */
static bool is_prose(const struct buf *name) {
    size_t i = 0, n = name->n;
    while (n && is_space(name->p[n - 1])) n--;
    while (i < n && is_space(name->p[i])) i++;
    if (i == n) return true;
    while (i < n && !is_space(name->p[i])) i++;
    return i < n;
}

static void begin_key(struct text *x) {
    buf_clear(&x->key);
    x->state = IN_KEY;
}

/* `{"key": ` or `, "key": ` into scratch. */
static void put_key(struct text *x) {
    buf_clear(&x->scratch);
    buf_add_str(&x->scratch, x->args++ ? ", \"" : "{\"");
    chat_json_escape(&x->scratch, x->key.p, x->key.n);
    buf_add_str(&x->scratch, "\": ");
}

static void begin_value(struct text *x, bool by_id) {
    x->state = IN_VALUE;
    x->value_by_id = by_id;
    buf_add(&x->key, "", 0);
    trim(&x->key);
    buf_clear(&x->value);
    x->types = x->nameless ? 0 : toolarg_types(x->o.tools, x->name.p, x->key.p);
    x->streamed = x->types == TOOLARG_STRING;
    if (!x->streamed) return;
    put_key(x);
    buf_add_byte(&x->scratch, '"');
    emit(x, TEXT_TOOL_ARGS, x->scratch.p, x->scratch.n);
}

static void add_value(struct text *x, const char *p, size_t n) {
    if (n == 0 || x->nameless) return;
    if (!x->streamed) {
        buf_add(&x->value, p, n);
        return;
    }
    buf_clear(&x->scratch);
    chat_json_escape(&x->scratch, p, n);
    emit(x, TEXT_TOOL_ARGS, x->scratch.p, x->scratch.n);
}

static void end_value(struct text *x) {
    x->state = BETWEEN_ARGS;
    if (x->nameless) return;
    if (x->streamed) {
        emit(x, TEXT_TOOL_ARGS, "\"", 1);
        return;
    }
    put_key(x);
    toolarg_value(&x->scratch, x->types, x->value.p ? x->value.p : "", x->value.n);
    emit(x, TEXT_TOOL_ARGS, x->scratch.p, x->scratch.n);
}

/* A value opened by its token should be closed by its token, and a spelled closing tag in it is
 * text, unless what follows shows that it did close: then, and only then, an <arg_key> or
 * </tool_call> token comes next. The spelled tag waits in `doubt` for that. */
static void settle_doubt(struct text *x) {
    x->state = IN_VALUE;
    add_value(x, x->doubt.p, x->doubt.n);
    buf_clear(&x->doubt);
}

/* ---- tags ---- */

static void enter_reasoning(struct text *x) {
    x->state = IN_REASONING;
    x->at_start = false;
    x->trim_lines = true;
}

static void leave_reasoning(struct text *x) {
    end_stretch(x);
    buf_clear(&x->hold);
    x->state = IN_CONTENT;
    x->trim_lines = true;
}

static void tag_in_call(struct text *x, enum tag tag, bool by_id) {
    switch (tag) {
    case TAG_KEY_OPEN:
        if (x->state == IN_NAME) end_name(x);
        begin_key(x);
        break;
    case TAG_KEY_CLOSE:
        if (x->state == IN_KEY) x->state = AFTER_KEY;
        break;
    case TAG_VALUE_OPEN:
        if (x->state == IN_KEY || x->state == AFTER_KEY) begin_value(x, by_id);
        break;
    case TAG_CALL_CLOSE:
        if (x->state == IN_NAME) end_name(x);
        end_call(x);
        break;
    case TAG_CALL_OPEN: /* the last one was never closed */
        if (x->state != IN_NAME) end_call(x);
        begin_call(x, by_id);
        break;
    default:
        break;
    }
}

static void tag_in_value(struct text *x, enum tag tag, bool by_id) {
    bool doubt = x->state == AFTER_SPELLED_CLOSE;
    if (doubt && (tag == TAG_KEY_OPEN || tag == TAG_CALL_CLOSE)) {
        buf_clear(&x->doubt);
        end_value(x);
        tag_in_call(x, tag, by_id);
        return;
    }
    if (doubt) settle_doubt(x);
    if (tag != TAG_VALUE_CLOSE) {
        add_value(x, tag_text[tag], strlen(tag_text[tag]));
    } else if (by_id || !x->value_by_id) {
        end_value(x);
    } else {
        x->state = AFTER_SPELLED_CLOSE;
        buf_clear(&x->doubt);
        buf_add_str(&x->doubt, tag_text[tag]);
    }
}

static void on_tag(struct text *x, enum tag tag, bool by_id) {
    switch (x->state) {
    case IN_REASONING:
        if (tag == TAG_THINK_CLOSE) leave_reasoning(x);
        if (tag == TAG_THINK_OPEN) x->at_start = false;
        if (tag == TAG_CALL_OPEN) { /* by token only: the model forgot </think> */
            leave_reasoning(x);
            begin_call(x, by_id);
        }
        break;
    case IN_CONTENT:
        if (tag == TAG_CALL_OPEN) begin_call(x, by_id);
        if (tag == TAG_THINK_OPEN && x->at_start) enter_reasoning(x);
        x->at_start = false;
        break;
    case IN_VALUE:
    case AFTER_SPELLED_CLOSE:
        tag_in_value(x, tag, by_id);
        break;
    default:
        tag_in_call(x, tag, by_id);
        break;
    }
}

/* The tags whose spelling means something here. */
static unsigned spelled_tags(const struct text *x) {
    unsigned tool = x->o.parse_tools ? 1u << TAG_CALL_OPEN : 0;
    unsigned start = x->at_start ? 1u << TAG_THINK_OPEN : 0;
    if (!x->o.chat) return 0;
    switch (x->state) {
    case IN_REASONING:
        return 1u << TAG_THINK_CLOSE | start;
    case IN_CONTENT:
        return tool | start | (x->at_start ? 1u << TAG_THINK_CLOSE : 0);
    case IN_NAME:
    case BETWEEN_ARGS:
        return 1u << TAG_KEY_OPEN | 1u << TAG_CALL_CLOSE;
    case IN_KEY:
        return 1u << TAG_KEY_CLOSE;
    case AFTER_KEY:
        return 1u << TAG_VALUE_OPEN | 1u << TAG_KEY_OPEN | 1u << TAG_CALL_CLOSE;
    case IN_VALUE:
        return 1u << TAG_VALUE_CLOSE;
    case AFTER_SPELLED_CLOSE:
        return 0;
    }
    return 0;
}

/* ---- text ---- */

/* Text that holds no tag. */
static void on_text(struct text *x, const char *p, size_t n) {
    switch (x->state) {
    case IN_REASONING:
    case IN_CONTENT:
        show(x, p, n);
        break;
    case IN_NAME:
        buf_add(&x->name, p, n);
        break;
    case IN_KEY:
        buf_add(&x->key, p, n);
        break;
    case IN_VALUE:
        add_value(x, p, n);
        break;
    case BETWEEN_ARGS:
    case AFTER_KEY:
    case AFTER_SPELLED_CLOSE:
        break;
    }
}

/* Spaces stay in doubt; anything else makes the spelled closing tag text. Returns bytes used. */
static size_t text_in_doubt(struct text *x, const char *p, size_t n) {
    size_t spaces = 0;
    while (spaces < n && is_space(p[spaces])) spaces++;
    buf_add(&x->doubt, p, spaces);
    if (spaces < n) settle_doubt(x);
    return spaces;
}

/* The tag spelled at p, or TAGS; *partial if p[0..n) is the beginning of one. */
static enum tag spelled_at(unsigned tags, const char *p, size_t n, bool *partial) {
    *partial = false;
    for (int i = 0; i < TAGS; i++) {
        size_t len = strlen(tag_text[i]);
        if (!(tags & 1u << i)) continue;
        if (n >= len && memcmp(p, tag_text[i], len) == 0) return (enum tag)i;
        if (n < len && memcmp(p, tag_text[i], n) == 0) *partial = true;
    }
    return TAGS;
}

static size_t code_point_bytes(const char *p) {
    unsigned char c = (unsigned char)*p;
    return c < 0xC0 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

/* False where text at p[0..n) makes a name of a spelled call too long to be one. Decided code point
 * by code point, so that it does not depend on how the text was cut. */
static bool name_has_room(const struct text *x, const char *p, size_t n) {
    if (x->state != IN_NAME || x->call_by_id) return true;
    bool partial;
    if (spelled_at(spelled_tags(x), p, n, &partial) != TAGS || partial) return true;
    return x->name.n + code_point_bytes(p) <= TEXT_NAME_BYTES_MAX;
}

/* Takes what can be decided from the front of p[0..n), at least a byte; 0: wait for more. */
static size_t parse_some(struct text *x, const char *p, size_t n) {
    if (x->state == AFTER_SPELLED_CLOSE) {
        size_t used = text_in_doubt(x, p, n);
        if (used) return used;
    }
    unsigned tags = spelled_tags(x);
    const char *angle = tags ? memchr(p, '<', n) : NULL;
    size_t plain = angle ? (size_t)(angle - p) : n;
    if (!name_has_room(x, p, n)) {
        take_back_call(x);
        return x->stopped_by ? n : parse_some(x, p, n);
    }
    if (plain > 0) {
        if (x->state == IN_NAME && !x->call_by_id) plain = code_point_bytes(p);
        on_text(x, p, plain);
        return plain;
    }
    bool partial;
    enum tag tag = spelled_at(tags, p, n, &partial);
    if (tag != TAGS) {
        on_tag(x, tag, false);
        return strlen(tag_text[tag]);
    }
    if (partial) return 0;
    on_text(x, p, 1);
    return 1;
}

static void parse(struct text *x) {
    size_t at = 0, used = 1;
    while (at < x->pend.n && used > 0 && !x->stopped_by)
        at += used = parse_some(x, x->pend.p + at, x->pend.n - at);
    buf_drop(&x->pend, MIN(at, x->pend.n));
}

/* Whole code points of p[0..n) and of what was cut off before. all: nothing will complete it. */
static void decode(struct text *x, const char *p, size_t n, bool all) {
    buf_add(&x->raw, p, n);
    size_t whole = all ? x->raw.n : utf8_complete(x->raw.p, x->raw.n);
    buf_reserve(&x->pend, 3 * whole + 1);
    x->pend.n += utf8_scrub(x->pend.p + x->pend.n, x->raw.p, whole);
    buf_drop(&x->raw, whole);
    parse(x);
}

/* Something follows that is no text: what is undecided is text. */
static void settle(struct text *x) {
    decode(x, "", 0, true);
    while (x->pend.n && !x->stopped_by) {
        on_text(x, x->pend.p, 1);
        buf_drop(&x->pend, 1);
        parse(x);
    }
}

/* ---- the doors ---- */

static enum tag tag_of(const struct text *x, int32_t token) {
    if (!x->o.chat) return TAGS;
    int last = x->o.parse_tools ? TAGS : TAG_THINK_CLOSE + 1;
    for (int i = 0; i < last; i++)
        if (x->tag_id[i] == token) return (enum tag)i;
    return TAGS;
}

int text_feed(struct text *x, int32_t token) {
    if (x->stopped_by) return 1;
    enum tag tag = tag_of(x, token); /* before the look at control: some files call tags control */
    if (x->ended || (tag == TAGS && tok_is_control(x->tok, token))) return 0;
    if (x->state == IN_REASONING && tag != TAG_THINK_CLOSE && tag != TAG_CALL_OPEN)
        x->reasoning_tokens++;
    if (tag == TAGS) {
        size_t n;
        const char *p = tok_bytes(x->tok, token, &n);
        return text_feed_bytes(x, p, n);
    }
    settle(x);
    if (!x->stopped_by) on_tag(x, tag, true);
    return x->stopped_by != NULL;
}

int text_feed_bytes(struct text *x, const char *p, size_t n) {
    if (!x->stopped_by && !x->ended && n > 0) decode(x, p, n, false);
    return x->stopped_by != NULL;
}

/* The model stopped inside a call: what is there is a whole call as far as it goes. */
static void end_open_call(struct text *x) {
    if (x->state == IN_NAME && !x->call_by_id && is_prose(&x->name)) {
        take_back_call(x);
        return;
    }
    if (x->state == IN_NAME) end_name(x);
    if (x->state == IN_VALUE || x->state == AFTER_SPELLED_CLOSE) end_value(x);
    end_call(x);
}

void text_end(struct text *x, bool truncated) {
    if (x->ended || x->stopped_by) return;
    bool in_call = x->state != IN_REASONING && x->state != IN_CONTENT;
    if (!in_call || !truncated) {
        settle(x);
        if (x->state != IN_REASONING && x->state != IN_CONTENT && !x->stopped_by) end_open_call(x);
    }
    if (!x->stopped_by && (x->state == IN_CONTENT || x->state == IN_REASONING)) {
        end_stretch(x);
        if (x->state == IN_CONTENT) emit_hold(x);
    }
    x->ended = true;
}
