/* coordinator/openai.c: request bodies of the OpenAI API: the fields that chat and text share.
 *
 * Owns: the parsed JSON of a request.  Called by: api_chat.c, api_text.c, api_tok.c.
 * Fails how: struct openai_error naming the field, what was expected, what was found.
 * Limits: see openai.h.  Tested by: tests/unit/test_openai.c, tests/fuzz/fuzz_openai.c
 *
 * Every field is read by one of a few readers (number, integer, boolean), each of which knows
 * absent, null, wrong type and out of range, so that no field has its own idea of those. Numbers
 * are compared with >= and <=, which is false for what is not a number.
 */
#include "coordinator/openai.h"

#include "coordinator/outline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int openai_fail(struct openai_error *e, int code, int status, const char *error_code,
                const char *param, const char *fmt, ...) {
    *e = (struct openai_error){.status = status, .code = error_code};
    e->type = status >= 500 ? "server_error" : "invalid_request_error";
    snprintf(e->param, sizeof e->param, "%s", param ? param : "");
    char raw[sizeof e->message], clean[3 * sizeof e->message + 1];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(raw, sizeof raw, fmt, ap);
    va_end(ap);
    size_t n = utf8_scrub(clean, raw, strlen(raw)); /* %.200s may cut a code point */
    n = MIN(n, sizeof e->message - 1);
    memcpy(e->message, clean, n);
    e->message[utf8_complete(e->message, n)] = 0;
    e->param[utf8_complete(e->param, strlen(e->param))] = 0;
    return code;
}

#define BAD(e, param, ...) openai_fail(e, ERR_FORMAT, 400, NULL, param, __VA_ARGS__)

static const char *type_name(const json_t *v) {
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    default:
        return "null";
    }
}

/* NULL when absent or null. */
static json_t *field(json_t *o, const char *key) {
    json_t *v = json_object_get(o, key);
    return v && !json_is_null(v) ? v : NULL;
}

/* ---- readers of one field ---------------------------------------------------------------------
 */

int openai_bool(json_t *o, const char *key, const char *param, bool *out, struct openai_error *e) {
    json_t *v = field(o, key);
    if (!v) return OK;
    if (!json_is_boolean(v))
        return BAD(e, param, "%s: expected a boolean, found %s.", param, type_name(v));
    *out = json_is_true(v);
    return OK;
}

static int number(json_t *o, const char *key, double min, double max, double *out,
                  struct openai_error *e) {
    json_t *v = field(o, key);
    if (!v) return OK;
    if (!json_is_number(v))
        return BAD(e, key, "%s: expected a number, found %s.", key, type_name(v));
    double d = json_number_value(v);
    if (!(d >= min && d <= max))
        return BAD(e, key, "%s: expected a number from %g to %g, found %g.", key, min, max, d);
    *out = d;
    return OK;
}

/* An integral value of v; false if it is not one. */
static bool integral(const json_t *v, int64_t *out) {
    if (json_is_integer(v)) {
        *out = json_integer_value(v);
        return true;
    }
    if (!json_is_real(v)) return false;
    double d = json_real_value(v);
    if (!(d >= -9007199254740992.0 && d <= 9007199254740992.0) || d != floor(d)) return false;
    *out = (int64_t)d;
    return true;
}

/* *given (may be NULL) says whether the field was there. */
static int integer(json_t *o, const char *key, int64_t min, int64_t max, int64_t *out, bool *given,
                   struct openai_error *e) {
    json_t *v = field(o, key);
    if (given) *given = v != NULL;
    if (!v) return OK;
    int64_t i;
    if (!integral(v, &i)) {
        if (json_is_real(v))
            return BAD(e, key, "%s: expected an integer, found %g.", key, json_real_value(v));
        return BAD(e, key, "%s: expected an integer, found %s.", key, type_name(v));
    }
    if (i < min || i > max)
        return BAD(e, key, "%s: expected an integer from %lld to %lld, found %lld.", key,
                   (long long)min, (long long)max, (long long)i);
    *out = i;
    return OK;
}

int openai_ids(json_t *list, const char *param, int32_t vocab, int32_t **ids, size_t *n,
               struct openai_error *e) {
    size_t count = json_array_size(list);
    int32_t *p = malloc((count + 1) * sizeof *p);
    if (!p) return openai_fail(e, ERR_NOMEM, 503, NULL, NULL, "Out of memory.");
    for (size_t i = 0; i < count; i++) {
        int64_t id;
        if (!integral(json_array_get(list, i), &id) || id < 0 || id >= vocab) {
            free(p);
            return BAD(e, param,
                       "%s: expected token ids from 0 to %d, found something else at %zu.", param,
                       vocab - 1, i);
        }
        p[i] = (int32_t)id;
    }
    *ids = p;
    *n = count;
    return OK;
}

/* ---- the body ---------------------------------------------------------------------------------
 */

static int check_outline(const char *body, size_t n, struct openai_error *e) {
    struct outline o = outline_of(body, n);
    if (o.depth > LIMIT_JSON_DEPTH)
        return BAD(e, NULL, "The body is nested more than %d deep.", LIMIT_JSON_DEPTH);
    if (!outline_fits(&o))
        return BAD(e, NULL,
                   "The body: expected at most %d objects and lists and %d values, found %zu and "
                   "%zu.",
                   LIMIT_JSON_LISTS, LIMIT_JSON_VALUES, o.lists, o.values);
    return OK;
}

json_t *openai_object(const char *body, size_t n, struct openai_error *e) {
    if (check_outline(body, n, e) < 0) return NULL;
    json_error_t why;
    json_t *root = json_loadb(body, n, JSON_ALLOW_NUL, &why);
    if (!root) {
        BAD(e, NULL, "The body is not valid JSON: line %d column %d: %s.", why.line, why.column,
            n ? why.text : "it is empty");
        return NULL;
    }
    if (!json_is_object(root)) {
        BAD(e, NULL, "The body: expected a JSON object, found %s.", type_name(root));
        json_decref(root);
        return NULL;
    }
    return root;
}

static int read_model(json_t *root, const struct openai_defaults *d, struct openai_error *e) {
    json_t *v = field(root, "model");
    if (!v) return OK;
    if (!json_is_string(v))
        return BAD(e, "model", "model: expected a string, found %s.", type_name(v));
    if (strcmp(json_string_value(v), d->model))
        return openai_fail(e, ERR_NOT_FOUND, 404, "model_not_found", "model",
                           "The model `%.200s` does not exist here; this server serves `%.200s`.",
                           json_string_value(v), d->model);
    return OK;
}

static int read_length(json_t *root, enum openai_kind kind, struct openai_request *r,
                       struct openai_error *e) {
    /* The newer name wins where both are given. */
    TRY(integer(root, "max_tokens", 1, INT32_MAX, &r->max_tokens, NULL, e));
    if (kind == OPENAI_CHAT)
        TRY(integer(root, "max_completion_tokens", 1, INT32_MAX, &r->max_tokens, NULL, e));
    int64_t n = 1, best = 0;
    TRY(integer(root, "n", 1, LIMIT_CHOICES, &n, NULL, e));
    r->n = (int)n;
    if (kind == OPENAI_TEXT) {
        TRY(integer(root, "best_of", 1, LIMIT_CHOICES, &best, NULL, e));
        if (best && best != n)
            return BAD(e, "best_of", "best_of: expected to equal n (%d), found %d.", (int)n,
                       (int)best);
    }
    return OK;
}

static int read_bias(json_t *root, int32_t vocab, struct msg_sampling *s, struct openai_error *e) {
    json_t *v = field(root, "logit_bias");
    if (!v) return OK;
    if (!json_is_object(v))
        return BAD(e, "logit_bias", "logit_bias: expected an object, found %s.", type_name(v));
    if (json_object_size(v) > LIMIT_BIAS)
        return BAD(e, "logit_bias", "logit_bias: expected at most %d entries, found %zu.",
                   LIMIT_BIAS, json_object_size(v));
    const char *key;
    json_t *value;
    json_object_foreach(v, key, value) {
        char *end;
        long id = key[0] >= '0' && key[0] <= '9' ? strtol(key, &end, 10) : -1;
        if (id < 0 || *end || id >= vocab || strlen(key) > 10)
            return BAD(
                e, "logit_bias",
                "logit_bias: expected keys that are token ids from 0 to %d, found \"%.40s\".",
                vocab - 1, key);
        double bias = json_is_number(value) ? json_number_value(value) : NAN;
        if (!(bias >= -100 && bias <= 100))
            return BAD(e, "logit_bias", "logit_bias: expected values from -100 to 100 at \"%s\".",
                       key);
        s->bias_token[s->n_bias] = (int32_t)id;
        s->bias_value[s->n_bias++] = (float)bias;
    }
    return OK;
}

static int read_sampling(json_t *root, const struct openai_defaults *d, struct openai_request *r,
                         struct openai_error *e) {
    struct msg_sampling *s = &r->sampling;
    double temperature = d->temperature, top_p = d->top_p, min_p = d->min_p;
    double repetition = d->repetition, presence = 0, frequency = 0;
    int64_t top_k = d->top_k, seed = 0;
    bool seeded;
    TRY(number(root, "temperature", 0, 2, &temperature, e));
    TRY(number(root, "top_p", 0, 1, &top_p, e));
    TRY(number(root, "min_p", 0, 1, &min_p, e));
    TRY(integer(root, "top_k", -1, INT32_MAX, &top_k, NULL, e));
    TRY(number(root, "presence_penalty", -2, 2, &presence, e));
    TRY(number(root, "frequency_penalty", -2, 2, &frequency, e));
    TRY(number(root, "repetition_penalty", 0.01, 100, &repetition, e));
    TRY(integer(root, "seed", INT64_MIN, INT64_MAX, &seed, &seeded, e));
    s->temperature = (float)temperature;
    s->top_p = (float)fmax(top_p, 1e-6); /* 0 keeps the first token only, and so does this */
    s->min_p = (float)min_p;
    s->top_k = top_k < 0 ? 0 : (int32_t)MIN(top_k, d->vocab);
    s->presence = (float)presence;
    s->frequency = (float)frequency;
    s->repetition = (float)repetition;
    s->seed = seeded ? (uint64_t)seed : d->random_seed;
    return read_bias(root, d->vocab, s, e);
}

static int read_one_stop(json_t *v, struct openai_request *r, struct openai_error *e) {
    if (!json_is_string(v))
        return BAD(e, "stop", "stop: expected a string or a list of strings, found %s.",
                   type_name(v));
    size_t n = json_string_length(v);
    if (n == 0 || n > LIMIT_STOP_STRING_BYTES || strlen(json_string_value(v)) != n)
        return BAD(e, "stop", "stop: expected strings of 1 to %d bytes without NUL, found %zu.",
                   LIMIT_STOP_STRING_BYTES, n);
    r->stops[r->n_stops++] = json_string_value(v);
    return OK;
}

static int read_stops(json_t *root, const struct openai_defaults *d, struct openai_request *r,
                      struct openai_error *e) {
    json_t *v = field(root, "stop");
    if (v && !json_is_array(v)) TRY(read_one_stop(v, r, e));
    if (v && json_is_array(v)) {
        if (json_array_size(v) > LIMIT_STOP_STRINGS)
            return BAD(e, "stop", "stop: expected at most %d strings, found %zu.",
                       LIMIT_STOP_STRINGS, json_array_size(v));
        for (size_t i = 0; i < json_array_size(v); i++)
            TRY(read_one_stop(json_array_get(v, i), r, e));
    }
    v = field(root, "stop_token_ids");
    if (v) {
        if (!json_is_array(v) || json_array_size(v) > LIMIT_STOP_STRINGS)
            return BAD(e, "stop_token_ids", "stop_token_ids: expected a list of at most %d ids.",
                       LIMIT_STOP_STRINGS);
        int32_t *ids;
        size_t n;
        TRY(openai_ids(v, "stop_token_ids", d->vocab, &ids, &n, e));
        memcpy(r->stop_ids, ids, n * sizeof *ids);
        r->n_stop_ids = (int)n;
        free(ids);
    }
    TRY(openai_bool(root, "ignore_eos", "ignore_eos", &r->ignore_eos, e));
    return openai_bool(root, "include_stop_str_in_output", "include_stop_str_in_output",
                       &r->include_stop, e);
}

static int read_logprobs(json_t *root, enum openai_kind kind, struct openai_request *r,
                         struct openai_error *e) {
    int64_t top = 0;
    bool given;
    if (kind == OPENAI_TEXT) {
        TRY(integer(root, "logprobs", 0, LIMIT_TOP_LOGPROBS, &top, &given, e));
        r->logprobs = given;
    } else {
        TRY(openai_bool(root, "logprobs", "logprobs", &r->logprobs, e));
        TRY(integer(root, "top_logprobs", 0, LIMIT_TOP_LOGPROBS, &top, &given, e));
        if (given && top > 0 && !r->logprobs)
            return BAD(e, "top_logprobs", "top_logprobs: expected logprobs to be true as well.");
    }
    r->sampling.top_logprobs = r->logprobs ? (int32_t)top : 0;
    return OK;
}

static int read_stream(json_t *root, struct openai_request *r, struct openai_error *e) {
    TRY(openai_bool(root, "stream", "stream", &r->stream, e));
    json_t *v = field(root, "stream_options");
    if (!v) return OK;
    if (!json_is_object(v))
        return BAD(e, "stream_options", "stream_options: expected an object, found %s.",
                   type_name(v));
    return openai_bool(v, "include_usage", "stream_options.include_usage", &r->include_usage, e);
}

static int read_admission(json_t *root, struct openai_request *r, struct openai_error *e) {
    TRY(integer(root, "priority", -1000, 1000, &r->priority, NULL, e));
    TRY(number(root, "timeout", 0.001, 86400, &r->timeout_s, e));
    json_t *v = field(root, "cache_salt");
    if (!v) return OK;
    if (!json_is_string(v))
        return BAD(e, "cache_salt", "cache_salt: expected a string, found %s.", type_name(v));
    size_t n = json_string_length(v);
    if (n == 0 || n > LIMIT_CACHE_SALT_BYTES || strlen(json_string_value(v)) != n)
        return BAD(e, "cache_salt", "cache_salt: expected 1 to %d bytes without NUL, found %zu.",
                   LIMIT_CACHE_SALT_BYTES, n);
    r->cache_salt = json_string_value(v);
    return OK;
}

/* Asking for a shape that is not enforced here is refused, not quietly ignored. */
static int read_unsupported(json_t *root, struct openai_error *e) {
    json_t *v = field(root, "response_format");
    if (!v) return OK;
    const char *type = json_string_value(json_object_get(v, "type"));
    if (!type) return BAD(e, "response_format", "response_format: expected an object with a type.");
    if (strcmp(type, "text"))
        return BAD(e, "response_format",
                   "response_format: only \"text\" is supported, found \"%.40s\".", type);
    return OK;
}

/* ---- chat -------------------------------------------------------------------------------------
 */

int openai_messages(json_t *root, json_t **messages, struct openai_error *e) {
    json_t *v = field(root, "messages");
    if (!v || !json_is_array(v) || !json_array_size(v))
        return BAD(e, "messages", "messages: expected a list with at least one message, found %s.",
                   v ? (json_is_array(v) ? "an empty list" : type_name(v)) : "nothing");
    size_t i;
    json_t *m;
    json_array_foreach(v, i, m) {
        if (!json_is_object(m))
            return BAD(e, "messages", "messages[%zu]: expected an object, found %s.", i,
                       type_name(m));
        if (!json_is_string(json_object_get(m, "role")))
            return BAD(e, "messages", "messages[%zu].role: expected a string.", i);
    }
    *messages = v;
    return OK;
}

int openai_tools(json_t *root, json_t **tools, struct openai_error *e) {
    json_t *v = field(root, "tools");
    *tools = NULL;
    if (!v) return OK;
    if (!json_is_array(v) || json_array_size(v) > LIMIT_TOOLS)
        return BAD(e, "tools", "tools: expected a list of at most %d tools.", LIMIT_TOOLS);
    size_t i;
    json_t *t;
    json_array_foreach(v, i, t) {
        const char *type = json_string_value(json_object_get(t, "type"));
        if (!type || strcmp(type, "function"))
            return BAD(e, "tools", "tools[%zu].type: expected \"function\", found \"%.40s\".", i,
                       type ? type : "");
        json_t *f = json_object_get(t, "function");
        const char *name = json_string_value(json_object_get(f, "name"));
        if (!name || !*name)
            return BAD(e, "tools", "tools[%zu].function.name: expected a string.", i);
        json_t *p = field(f, "parameters");
        if (p && !json_is_object(p))
            return BAD(e, "tools", "tools[%zu].function.parameters: expected an object, found %s.",
                       i, type_name(p));
    }
    if (json_array_size(v)) *tools = v;
    return OK;
}

static int read_tool_choice(json_t *root, struct openai_request *r, struct openai_error *e) {
    TRY(openai_tools(root, &r->tools, e));
    bool parallel;
    TRY(openai_bool(root, "parallel_tool_calls", "parallel_tool_calls", &parallel, e));
    json_t *v = field(root, "tool_choice");
    if (!v) return OK;
    const char *s = json_string_value(v);
    if (s && !strcmp(s, "auto")) return OK;
    if (s && !strcmp(s, "none")) {
        r->tools = NULL;
        return OK;
    }
    if (json_is_object(v) || (s && !strcmp(s, "required")))
        return BAD(e, "tool_choice",
                   "tool_choice: a call cannot be forced here; use \"auto\" or \"none\".");
    return BAD(e, "tool_choice", "tool_choice: expected \"auto\" or \"none\".");
}

static int read_effort(json_t *o, struct chat_options *c, struct openai_error *e) {
    json_t *v = field(o, "reasoning_effort");
    if (!v) return OK;
    const char *s = json_string_value(v);
    static const struct {
        const char *asked, *given;
    } map[] = {{"minimal", "high"}, {"low", "high"},  {"medium", "high"},
               {"high", "high"},    {"xhigh", "max"}, {"max", "max"}};
    for (size_t i = 0; s && i < ARRAY_LEN(map); i++)
        if (!strcmp(s, map[i].asked)) {
            c->reasoning_effort = map[i].given;
            return OK;
        }
    if (s && !strcmp(s, "none")) {
        c->thinking = false;
        return OK;
    }
    return BAD(e, "reasoning_effort",
               "reasoning_effort: expected none, minimal, low, medium, high, xhigh or max.");
}

/* The ways to say whether to think, from the least to the most specific; the last one wins. */
int openai_chat_options(json_t *root, struct chat_options *c, struct openai_error *e) {
    *c = (struct chat_options){
        .thinking = true, .clear_thinking = true, .add_generation_prompt = true};
    TRY(openai_bool(root, "add_generation_prompt", "add_generation_prompt",
                    &c->add_generation_prompt, e));
    TRY(read_effort(root, c, e));
    json_t *v = field(root, "thinking");
    if (v) {
        const char *type = json_string_value(json_object_get(v, "type"));
        bool on = type && !strcmp(type, "enabled");
        if (!on && !(type && !strcmp(type, "disabled")))
            return BAD(e, "thinking", "thinking.type: expected \"enabled\" or \"disabled\".");
        c->thinking = on;
        TRY(openai_bool(v, "clear_thinking", "thinking.clear_thinking", &c->clear_thinking, e));
    }
    TRY(openai_bool(root, "enable_thinking", "enable_thinking", &c->thinking, e));
    TRY(openai_bool(root, "clear_thinking", "clear_thinking", &c->clear_thinking, e));
    v = field(root, "chat_template_kwargs");
    if (!v) return OK;
    if (!json_is_object(v))
        return BAD(e, "chat_template_kwargs", "chat_template_kwargs: expected an object, found %s.",
                   type_name(v));
    TRY(read_effort(v, c, e));
    TRY(openai_bool(v, "enable_thinking", "chat_template_kwargs.enable_thinking", &c->thinking, e));
    return openai_bool(v, "clear_thinking", "chat_template_kwargs.clear_thinking",
                       &c->clear_thinking, e);
}

/* ---- text -------------------------------------------------------------------------------------
 */

static int read_one_prompt(json_t *v, int32_t vocab, struct openai_prompt *p,
                           struct openai_error *e) {
    if (json_is_string(v)) {
        p->text = json_string_value(v);
        p->n = json_string_length(v);
        return OK;
    }
    if (!json_is_array(v) || !json_array_size(v))
        return BAD(e, "prompt", "prompt: expected strings or non-empty lists of token ids.");
    return openai_ids(v, "prompt", vocab, &p->ids, &p->n_ids, e);
}

static int read_prompts(json_t *root, int32_t vocab, struct openai_request *r,
                        struct openai_error *e) {
    json_t *v = field(root, "prompt");
    json_t *first = v && json_is_array(v) ? json_array_get(v, 0) : NULL;
    if (!v || (json_is_array(v) && !first) || !(json_is_array(v) || json_is_string(v)))
        return BAD(e, "prompt",
                   "prompt: expected a string, a list of strings, token ids, or a list of those.");
    bool many = first && !json_is_number(first);
    size_t count = many ? json_array_size(v) : 1;
    if (count * (size_t)r->n > LIMIT_SEQUENCES)
        return BAD(e, "prompt", "prompt: expected at most %d prompts times n, found %zu.",
                   LIMIT_SEQUENCES, count * (size_t)r->n);
    r->prompts = calloc(count, sizeof *r->prompts);
    if (!r->prompts) return openai_fail(e, ERR_NOMEM, 503, NULL, NULL, "Out of memory.");
    for (size_t i = 0; i < count; i++) {
        TRY(read_one_prompt(many ? json_array_get(v, i) : v, vocab, &r->prompts[i], e));
        r->n_prompts++;
    }
    return OK;
}

static int read_text(json_t *root, const struct openai_defaults *d, struct openai_request *r,
                     struct openai_error *e) {
    json_t *suffix = field(root, "suffix");
    if (suffix && !(json_is_string(suffix) && !json_string_length(suffix)))
        return BAD(e, "suffix", "suffix: filling in the middle is not supported.");
    TRY(openai_bool(root, "echo", "echo", &r->echo, e));
    if (r->echo && r->logprobs)
        return BAD(e, "echo", "echo: not supported together with logprobs, the prompt has none.");
    r->add_special = true;
    TRY(openai_bool(root, "add_special_tokens", "add_special_tokens", &r->add_special, e));
    return read_prompts(root, d->vocab, r, e);
}

/* ---- all of it --------------------------------------------------------------------------------
 */

static int read_fields(struct openai_request *r, enum openai_kind kind,
                       const struct openai_defaults *d, struct openai_error *e) {
    json_t *root = r->root;
    TRY(read_model(root, d, e));
    TRY(read_stream(root, r, e));
    TRY(read_length(root, kind, r, e));
    TRY(read_sampling(root, d, r, e));
    TRY(read_stops(root, d, r, e));
    TRY(read_logprobs(root, kind, r, e));
    TRY(read_admission(root, r, e));
    TRY(read_unsupported(root, e));
    if (kind == OPENAI_TEXT) return read_text(root, d, r, e);
    TRY(openai_messages(root, &r->messages, e));
    TRY(read_tool_choice(root, r, e));
    return openai_chat_options(root, &r->chat, e);
}

/* What the request points to lives as long as it does, which may be hours. The rest of the body,
 * whatever else a client put there, does not. */
static void forget_rest(struct openai_request *r) {
    void *next;
    const char *key;
    json_t *v;
    json_object_foreach_safe(r->root, next, key, v) {
        bool stops = r->n_stops && !strcmp(key, "stop");
        bool prompts = r->n_prompts && !strcmp(key, "prompt");
        bool salt = r->cache_salt && !strcmp(key, "cache_salt");
        if (v != r->messages && v != r->tools && !stops && !prompts && !salt)
            json_object_del(r->root, key);
    }
}

int openai_parse(struct openai_request *r, enum openai_kind kind, const char *body, size_t n,
                 const struct openai_defaults *d, struct openai_error *e) {
    memset(r, 0, sizeof *r);
    r->root = openai_object(body, n, e);
    if (!r->root) return ERR_FORMAT;
    int rc = read_fields(r, kind, d, e);
    if (rc < 0)
        openai_request_deinit(r);
    else
        forget_rest(r);
    return rc;
}

void openai_request_deinit(struct openai_request *r) {
    for (int i = 0; r->prompts && i < r->n_prompts; i++) free(r->prompts[i].ids);
    free(r->prompts);
    json_decref(r->root);
    memset(r, 0, sizeof *r);
}
