/* coordinator/chat.h: the GLM-5 chat format: messages to token ids.
 *
 * Rendered natively, never by executing the file's template; the family (GLM-5, 5.1, 5.2) is
 * recognised from the template's text. Message contents are encoded as plain text, so content that
 * spells a control token stays text; role marks and tags of the format itself are added tokens.
 * Runs of text between added tokens are encoded as one piece, as the reference tokenizer does.
 *
 * Owns: nothing.  Called by: api_chat.c (on a pool thread).  Pure.
 * Fails how: ERR_FORMAT with a sentence for the client and the JSON path of the offending value.
 * Tested by: tests/unit/test_chat.c against golden renders; tests/conformance/test_chat.py
 */
#ifndef OCTAVO_COORDINATOR_CHAT_H
#define OCTAVO_COORDINATOR_CHAT_H

#include <jansson.h>

#include "coordinator/buf.h"
#include "coordinator/tok.h"

enum chat_family { CHAT_GLM5, CHAT_GLM51, CHAT_GLM52 };

struct chat_options {
    bool thinking;               /* default true */
    bool clear_thinking;         /* default true: reasoning of earlier turns is dropped */
    bool add_generation_prompt;  /* default true */
    const char *reasoning_effort; /* "high", "max" or NULL (5.2) */
};

struct chat_prompt {
    struct tok_ids ids;
    char *text;          /* the rendered string, for /apply-template and tests; NUL-terminated */
    size_t n_text;
    bool in_reasoning;   /* the generation starts inside <think> */
};
void chat_prompt_deinit(struct chat_prompt *p);

enum chat_family chat_family_of(const struct gguf *g);

/* messages: array of message objects as the OpenAI API has them; tools: array or NULL.
 * param (may be NULL) receives the name for the error object, e.g. "messages". */
int chat_render(enum chat_family family, const struct tok *t, json_t *messages, json_t *tools,
                const struct chat_options *o, struct chat_prompt *out, const char **param,
                struct err_text *err);

/* JSON as the template's tojson prints it: ", " and ": ", UTF-8 kept, key order kept, shortest
 * floats. malloc'ed. */
char *chat_json(const json_t *v);
void chat_json_add(struct buf *b, const json_t *v);                  /* the same, appended */
void chat_json_escape(struct buf *b, const char *p, size_t n);       /* the inside of a string */

#endif
