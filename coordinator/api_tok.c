/* coordinator/api_tok.c: POST /tokenize, /detokenize, /apply-template: the tokenizer over HTTP.
 *
 *   /tokenize       {"prompt": text, "add_special_tokens": true, "parse_special": true} or
 *                   {"messages": […], "tools": […], …}   -> {"count", "max_model_len", "tokens"}
 *   /detokenize     {"tokens": [ids]}                    -> {"prompt": text}
 *   /apply-template {"messages": […], "tools": […], …}   -> {"prompt": text}
 * "content" is taken for "prompt" and given beside it, as another family of servers calls it.
 *
 * Owns: its work structs.  Called by: http.c (routes).  Fails how: struct openai_error.
 * Limits: the body's.  Tested by: tests/unit/test_api.c
 */
#include "coordinator/api_job.h"

#include <stdlib.h>
#include <string.h>

struct tool_work {
    struct api_work work; /* first */
    struct http_buf out;
};

static struct http_buf *out_of(struct api_work *w) {
    return &((struct tool_work *)w)->out;
}

static void proceed(struct api_work *w) {
    api_answer_json(w->x, 200, out_of(w));
    api_work_end(w);
}

static void cancel(struct api_work *w) {
    UNUSED(w);
}

static void free_work(struct api_work *w) {
    http_buf_deinit(out_of(w));
    free(w);
}

static void start(struct http_exchange *x, void (*prepare)(struct api_work *)) {
    struct tool_work *t = calloc(1, sizeof *t);
    if (!t) {
        http_answer_error(x, 503, "server_error", NULL, NULL, "", "Out of memory.");
        return;
    }
    t->work.prepare = prepare;
    t->work.proceed = proceed;
    t->work.cancel = cancel;
    t->work.free = free_work;
    api_work_start(&t->work, x);
}

static int render(struct api_work *w, json_t *root, struct chat_prompt *p) {
    json_t *messages, *tools;
    struct chat_options o;
    struct err_text err = {{0}};
    const char *param = NULL;
    TRY(openai_messages(root, &messages, &w->err));
    TRY(openai_tools(root, &tools, &w->err));
    TRY(openai_chat_options(root, &o, &w->err));
    int rc = chat_render(w->api->family, w->api->tok, messages, tools, &o, p, &param, &err);
    if (rc < 0)
        return openai_fail(&w->err, rc, rc == ERR_NOMEM ? 503 : 400, NULL,
                           param ? param : "messages", "%s",
                           err.text[0] ? err.text : "messages: cannot be rendered.");
    return rc;
}

static json_t *text_of(json_t *root) {
    json_t *v = json_object_get(root, "prompt");
    return json_is_string(v) ? v : json_object_get(root, "content");
}

static int encode(struct api_work *w, json_t *root, struct tok_ids *ids) {
    if (json_object_get(root, "messages")) {
        struct chat_prompt p = {0};
        int rc = render(w, root, &p);
        if (rc >= 0) {
            *ids = p.ids;
            p.ids = (struct tok_ids){0};
        }
        chat_prompt_deinit(&p);
        return rc;
    }
    json_t *v = text_of(root);
    bool special = true, parse = true;
    if (!json_is_string(v))
        return openai_fail(&w->err, ERR_FORMAT, 400, NULL, "prompt", "prompt: expected a string.");
    TRY(openai_bool(root, "add_special_tokens", "add_special_tokens", &special, &w->err));
    TRY(openai_bool(root, "parse_special", "parse_special", &parse, &w->err));
    const char *s = json_string_value(v);
    size_t n = json_string_length(v);
    const struct tok *t = w->api->tok;
    int rc = OK;
    if (parse) {
        rc = api_encode_text(t, s, n, special, ids);
    } else {
        if (special) rc = api_push_prefix(t, ids);
        if (rc >= 0) rc = tok_encode(t, s, n, TOK_PLAIN, ids);
    }
    if (rc < 0)
        return openai_fail(&w->err, rc, rc == ERR_NOMEM ? 503 : 400, NULL, "prompt",
                           "prompt: cannot be tokenised.");
    return OK;
}

static void prepare_tokenize(struct api_work *w) {
    json_t *root = openai_object(w->body, w->n_body, &w->err);
    if (!root) return;
    struct tok_ids ids = {0};
    if (encode(w, root, &ids) >= 0) {
        struct http_buf *b = out_of(w);
        http_buf_printf(b, "{\"count\":%zu,\"max_model_len\":%lld,\"tokens\":[", ids.n,
                        (long long)w->api->o.context);
        for (size_t i = 0; i < ids.n; i++) http_buf_printf(b, i ? ",%d" : "%d", ids.ids[i]);
        http_buf_puts(b, "]}");
    }
    tok_ids_deinit(&ids);
    json_decref(root);
}

static void put_prompt(struct http_buf *b, const char *p, size_t n) {
    http_buf_puts(b, "{\"prompt\":");
    http_buf_json(b, p, n);
    http_buf_puts(b, ",\"content\":");
    http_buf_json(b, p, n);
    http_buf_puts(b, "}");
}

static void prepare_detokenize(struct api_work *w) {
    json_t *root = openai_object(w->body, w->n_body, &w->err);
    if (!root) return;
    json_t *list = json_object_get(root, "tokens");
    int32_t *ids = NULL;
    size_t n = 0;
    if (!json_is_array(list))
        openai_fail(&w->err, ERR_FORMAT, 400, NULL, "tokens", "tokens: expected a list of ids.");
    else if (openai_ids(list, "tokens", tok_vocab(w->api->tok), &ids, &n, &w->err) >= 0) {
        struct http_buf raw = {0};
        for (size_t i = 0; i < n; i++) {
            size_t n_bytes;
            const char *p = tok_bytes(w->api->tok, ids[i], &n_bytes);
            http_buf_put(&raw, p, n_bytes);
        }
        char *clean = malloc(3 * raw.n + 1);
        if (clean && !raw.failed)
            put_prompt(out_of(w), clean, raw.n ? utf8_scrub(clean, raw.p, raw.n) : 0);
        else
            out_of(w)->failed = true;
        free(clean);
        http_buf_deinit(&raw);
    }
    free(ids);
    json_decref(root);
}

static void prepare_template(struct api_work *w) {
    json_t *root = openai_object(w->body, w->n_body, &w->err);
    if (!root) return;
    struct chat_prompt p = {0};
    if (render(w, root, &p) >= 0) put_prompt(out_of(w), p.text, p.n_text);
    chat_prompt_deinit(&p);
    json_decref(root);
}

void api_tokenize(struct http_exchange *x, void *user) {
    UNUSED(user);
    start(x, prepare_tokenize);
}

void api_detokenize(struct http_exchange *x, void *user) {
    UNUSED(user);
    start(x, prepare_detokenize);
}

void api_apply_template(struct http_exchange *x, void *user) {
    UNUSED(user);
    start(x, prepare_template);
}
