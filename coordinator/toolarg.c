/* coordinator/toolarg.c: types from schemas, values from text.
 *
 * Owns, called by, fails how, limits, tested by: see toolarg.h.
 *
 * The format writes strings bare and everything else as JSON, so "3" is ambiguous without the
 * schema. Where the schema says string, the text is the value. Otherwise JSON is tried, then what
 * models write when they think in Python (True, None, single quotes, tuples), then the text is
 * kept as a string: a call with a doubtful argument is more use to a client than none. Valid JSON
 * is passed on as it is written, so that integers beyond 64 bits survive.
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/chat.h"
#include "coordinator/toolarg.h"

/* ---- schemas ---- */

static unsigned type_named(const char *name) {
    static const struct {
        const char *name;
        unsigned type;
    } names[] = {{"string", TOOLARG_STRING},  {"number", TOOLARG_NUMBER},
                 {"integer", TOOLARG_NUMBER}, {"boolean", TOOLARG_BOOLEAN},
                 {"null", TOOLARG_NULL},      {"object", TOOLARG_OBJECT},
                 {"array", TOOLARG_ARRAY}};
    for (size_t i = 0; name && i < ARRAY_LEN(names); i++)
        if (strcmp(name, names[i].name) == 0) return names[i].type;
    return 0;
}

static unsigned type_of(const json_t *v) {
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return TOOLARG_OBJECT;
    case JSON_ARRAY:
        return TOOLARG_ARRAY;
    case JSON_STRING:
        return TOOLARG_STRING;
    case JSON_INTEGER:
    case JSON_REAL:
        return TOOLARG_NUMBER;
    case JSON_TRUE:
    case JSON_FALSE:
        return TOOLARG_BOOLEAN;
    case JSON_NULL:
        return TOOLARG_NULL;
    }
    return 0;
}

static unsigned schema_types(const json_t *schema, int depth);

/* Of alternatives: all of them; nothing is known if one says nothing. */
static unsigned union_types(const json_t *list, int depth) {
    unsigned types = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        unsigned one = schema_types(json_array_get(list, i), depth);
        if (one == 0) return 0;
        types |= one;
    }
    return types;
}

static unsigned schema_types(const json_t *schema, int depth) {
    if (depth == 0 || !json_is_object(schema)) return 0;
    const json_t *type = json_object_get(schema, "type"), *list;
    unsigned types = type_named(json_string_value(type));
    for (size_t i = 0; i < json_array_size(type); i++)
        types |= type_named(json_string_value(json_array_get(type, i)));
    list = types ? NULL : json_object_get(schema, "enum");
    for (size_t i = 0; i < json_array_size(list); i++) types |= type_of(json_array_get(list, i));
    const json_t *constant = json_object_get(schema, "const");
    if (!types && constant) types = type_of(constant);
    if (!types) types = union_types(json_object_get(schema, "anyOf"), depth - 1);
    if (!types) types = union_types(json_object_get(schema, "oneOf"), depth - 1);
    list = json_object_get(schema, "allOf");
    for (size_t i = 0; !types && i < json_array_size(list); i++)
        types = schema_types(json_array_get(list, i), depth - 1);
    if (types && json_is_true(json_object_get(schema, "nullable"))) types |= TOOLARG_NULL;
    return types;
}

unsigned toolarg_types(json_t *tools, const char *name, const char *key) {
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i), *f = json_object_get(tool, "function");
        if (!json_is_object(f)) f = tool;
        const char *is = json_string_value(json_object_get(f, "name"));
        if (!is || strcmp(is, name) != 0) continue;
        const json_t *properties = json_object_get(json_object_get(f, "parameters"), "properties");
        return schema_types(json_object_get(properties, key), TOOLARG_DEPTH);
    }
    return 0;
}

/* ---- what Python would print ---- */

struct literal {
    const char *p, *end;
};

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static void skip_space(struct literal *l) {
    while (l->p < l->end && is_space(*l->p)) l->p++;
}

static bool take(struct literal *l, const char *word) {
    size_t n = strlen(word);
    if ((size_t)(l->end - l->p) < n || memcmp(l->p, word, n) != 0) return false;
    l->p += n;
    return true;
}

static json_t *literal_string(struct literal *l) {
    static const char plain[] = "\\'\"ntr", meant[] = "\\'\"\n\t\r";
    char quote = *l->p++;
    struct buf s = {0};
    buf_reserve(&s, 0);
    for (; l->p < l->end && *l->p != quote; l->p++) {
        const char *escape = NULL;
        if (*l->p == '\\' && l->p + 1 < l->end) escape = strchr(plain, l->p[1]);
        if (escape && *escape) {
            buf_add_byte(&s, meant[escape - plain]);
            l->p++;
        } else {
            buf_add_byte(&s, *l->p);
        }
    }
    json_t *v = l->p < l->end ? json_stringn(s.p, s.n) : NULL;
    if (v) l->p++;
    buf_deinit(&s);
    return v;
}

static json_t *literal_value(struct literal *l, int depth);

/* The items after an opening bracket: a list, a tuple or, with `keys`, a dictionary. */
static json_t *literal_items(struct literal *l, char close, bool keys, int depth) {
    json_t *all = keys ? json_object() : json_array();
    for (;;) {
        skip_space(l);
        if (l->p < l->end && *l->p == close) {
            l->p++;
            return all;
        }
        json_t *key = keys ? literal_value(l, depth) : NULL;
        if (keys && !json_is_string(key)) {
            json_decref(key);
            break;
        }
        skip_space(l);
        json_t *value = keys && !take(l, ":") ? NULL : literal_value(l, depth);
        int rc = keys ? json_object_set_new(all, json_string_value(key), value)
                      : json_array_append_new(all, value);
        json_decref(key);
        skip_space(l);
        if (rc < 0 || l->p == l->end || (*l->p != close && !take(l, ","))) {
            json_decref(all);
            return NULL;
        }
    }
    json_decref(all);
    return NULL;
}

static json_t *literal_value(struct literal *l, int depth) {
    skip_space(l);
    if (depth == 0 || l->p == l->end) return NULL;
    if (take(l, "True") || take(l, "true")) return json_true();
    if (take(l, "False") || take(l, "false")) return json_false();
    if (take(l, "None") || take(l, "null")) return json_null();
    if (*l->p == '\'' || *l->p == '"') return literal_string(l);
    if (take(l, "[")) return literal_items(l, ']', false, depth - 1);
    if (take(l, "(")) return literal_items(l, ')', false, depth - 1);
    if (take(l, "{")) return literal_items(l, '}', true, depth - 1);
    size_t n = 0;
    while (l->p + n < l->end && l->p[n] && strchr("+-.0123456789eE", l->p[n])) n++;
    json_t *number = n ? json_loadb(l->p, n, JSON_DECODE_ANY, NULL) : NULL;
    l->p += n;
    return number;
}

/* ---- values ---- */

static void add_string(struct buf *out, const char *p, size_t n) {
    buf_add_byte(out, '"');
    chat_json_escape(out, p, n);
    buf_add_byte(out, '"');
}

static json_t *parse_json(const char *p, size_t n) {
    json_error_t why;
    json_t *v = json_loadb(p, n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &why);
    if (!v && json_error_code(&why) == json_error_numeric_overflow)
        v = json_loadb(p, n, JSON_DECODE_ANY | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &why);
    return v;
}

static bool add_json(struct buf *out, unsigned types, const char *p, size_t n) {
    json_t *v = parse_json(p, n);
    unsigned wanted = types & TOOLARG_STRING ? types & ~(unsigned)TOOLARG_STRING : ~0u;
    bool fits = v && (type_of(v) & wanted);
    if (fits) buf_add(out, p, n);
    json_decref(v);
    return fits;
}

static bool add_literal(struct buf *out, const char *p, size_t n) {
    struct literal l = {p, p + n};
    json_t *v = literal_value(&l, TOOLARG_DEPTH);
    skip_space(&l);
    bool fits = v && l.p == l.end;
    if (fits) chat_json_add(out, v);
    json_decref(v);
    return fits;
}

void toolarg_value(struct buf *out, unsigned types, const char *p, size_t n) {
    struct literal inside = {p, p + n};
    skip_space(&inside);
    size_t len = (size_t)(inside.end - inside.p);
    while (len && is_space(inside.p[len - 1])) len--;
    if (types != TOOLARG_STRING && len > 0) {
        if (add_json(out, types, inside.p, len)) return;
        bool known = types && !(types & TOOLARG_STRING);
        if (known && add_literal(out, inside.p, len)) return;
    }
    add_string(out, p, n);
}
