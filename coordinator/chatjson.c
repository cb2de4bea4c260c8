/* coordinator/chatjson.c: JSON as the chat format prints it (chat_json of chat.h).
 *
 * Owns: nothing.  Called by: chat.c, text.c, toolarg.c.  Pure.  Fails how: never.
 * Limits: depth is that of the parsed value.  Tested by: tests/unit/test_chat.c,
 * tests/conformance/test_chat.py
 *
 * The model was trained on what Python's json.dumps(ensure_ascii=False) prints, and jansson's own
 * printer differs in separators, floats and escapes; a prompt that differs by a space is another
 * prompt.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/buf.h"
#include "coordinator/chat.h"

/* "1.25e-10" to "1.26e-10"; false where a nine would carry. */
static bool next_digit_up(char *digits) {
    char *last = strchr(digits, 'e') - 1;
    if (*last == '9') return false;
    ++*last;
    return true;
}

/* The shortest digits that read back as x. The correctly rounded ones of some length do whenever
 * any of that length do, but for powers of two, whose neighbour below is closer: there the next
 * ones up may. Returns the digits after the first. */
static int shortest_digits(char *digits, size_t room, double x) {
    for (int precision = 0;; precision++) {
        snprintf(digits, room, "%.*e", precision, x);
        if (precision == 16 || strtod(digits, NULL) == x) return precision;
        if (next_digit_up(digits) && strtod(digits, NULL) == x) return precision;
    }
}

/* Python's repr: positional from 1e-4 up to 1e16, elsewhere an exponent of at least two digits. */
static void add_real(struct buf *b, double x) {
    char text[48];
    int precision = shortest_digits(text, sizeof text, x);
    int exponent = atoi(strchr(text, 'e') + 1);
    if (exponent >= -4 && exponent < 16)
        snprintf(text, sizeof text, "%.*f", MAX(precision - exponent, 1), x);
    buf_add_str(b, text);
}

static void add_string(struct buf *b, const char *p, size_t n) {
    buf_add_byte(b, '"');
    chat_json_escape(b, p, n);
    buf_add_byte(b, '"');
}

void chat_json_escape(struct buf *b, const char *p, size_t n) {
    static const char names[] = "btn?fr"; /* 08 to 0D; 0B has no name */
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        char text[8];
        if (c == '"' || c == '\\')
            snprintf(text, sizeof text, "\\%c", c);
        else if (c >= 0x20)
            snprintf(text, sizeof text, "%c", c);
        else if (c >= 8 && c <= 13 && c != 11)
            snprintf(text, sizeof text, "\\%c", names[c - 8]);
        else
            snprintf(text, sizeof text, "\\u%04x", c);
        buf_add_str(b, text);
    }
}

static void add_value(struct buf *b, const json_t *v);

static void add_object(struct buf *b, const json_t *v) {
    bool first = true;
    json_t *object = (json_t *)(uintptr_t)v; /* jansson iterates without changing */
    buf_add_byte(b, '{');
    for (void *it = json_object_iter(object); it; it = json_object_iter_next(object, it)) {
        const char *key = json_object_iter_key(it);
        if (!first) buf_add_str(b, ", ");
        first = false;
        add_string(b, key, strlen(key));
        buf_add_str(b, ": ");
        add_value(b, json_object_iter_value(it));
    }
    buf_add_byte(b, '}');
}

static void add_array(struct buf *b, const json_t *v) {
    buf_add_byte(b, '[');
    for (size_t i = 0; i < json_array_size(v); i++) {
        if (i) buf_add_str(b, ", ");
        add_value(b, json_array_get(v, i));
    }
    buf_add_byte(b, ']');
}

static void add_value(struct buf *b, const json_t *v) {
    char number[32];
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        add_object(b, v);
        break;
    case JSON_ARRAY:
        add_array(b, v);
        break;
    case JSON_STRING:
        add_string(b, json_string_value(v), json_string_length(v));
        break;
    case JSON_INTEGER:
        snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
        buf_add_str(b, number);
        break;
    case JSON_REAL:
        add_real(b, json_real_value(v));
        break;
    case JSON_TRUE:
        buf_add_str(b, "true");
        break;
    case JSON_FALSE:
        buf_add_str(b, "false");
        break;
    case JSON_NULL:
        buf_add_str(b, "null");
        break;
    }
}

void chat_json_add(struct buf *b, const json_t *v) {
    if (v)
        add_value(b, v);
    else
        buf_add_str(b, "null");
}

char *chat_json(const json_t *v) {
    struct buf b = {0};
    chat_json_add(&b, v);
    return b.p;
}
