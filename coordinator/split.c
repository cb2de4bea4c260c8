/* coordinator/split.c: the GLM-4 pre-split expression through PCRE2.
 *
 * Owns: the compiled (and, where the system allows it, JIT-compiled) expression.
 * Called by: tok.c.  Fails how: see split.h.  Limits: linear in the text.
 * Tested by: tests/unit/test_tok.c, tests/conformance/test_tokenizer.py
 *
 * The expression is the published one with two classes written out. \s: PCRE2's takes U+180E too,
 * the reference's does not. The contractions: folding case by hand (with U+017F, which folds to s)
 * keeps PCRE2's caseless mode, and its opinion of the Kelvin sign, out of the letters. Possessive
 * quantifiers stand where giving back cannot help. The text is validated once by the caller and
 * every match is told so: validating at each word would make a long prompt quadratic.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/split.h"

#define SPACES                                                                                     \
    "\\x{09}-\\x{0D}\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}"  \
    "\\x{205F}\\x{3000}"

static const char glm4_expression[] = "'(?:[sS\\x{17F}]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
                                      "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}++"
                                      "|\\p{N}{1,3}+"
                                      "|\\x{20}?[^" SPACES "\\p{L}\\p{N}]++[\\r\\n]*+"
                                      "|[" SPACES "]*[\\r\\n]++"
                                      "|[" SPACES "]+(?![^" SPACES "])"
                                      "|[" SPACES "]++";

struct split {
    pcre2_code *code;
    pcre2_match_context *limits;
};

struct split_walk {
    const struct split *split;
    pcre2_match_data *found;
};

int split_new(struct split **out, struct gguf_str name, struct err_text *err) {
    static const char *const glm4_names[] = {"glm4", "chatglm-bpe"};
    bool known = false;
    for (size_t i = 0; i < ARRAY_LEN(glm4_names); i++)
        known |= name.n == strlen(glm4_names[i]) && memcmp(name.p, glm4_names[i], name.n) == 0;
    if (!known)
        return err_set(err, ERR_FORMAT,
                       "tokenizer.ggml.pre: expected glm4 or chatglm-bpe, found \"%.*s\"",
                       (int)MIN(name.n, (uint64_t)64), name.p);
    struct split *s = calloc(1, sizeof *s);
    if (!s) return err_set(err, ERR_NOMEM, "tokenizer: no memory for the pre-split expression");
    int code;
    PCRE2_SIZE where;
    s->code = pcre2_compile((PCRE2_SPTR)glm4_expression, PCRE2_ZERO_TERMINATED,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &code, &where, NULL);
    s->limits = pcre2_match_context_create(NULL);
    if (!s->code || !s->limits) {
        split_free(s);
        return err_set(err, ERR_NOMEM, "tokenizer: PCRE2 refused the pre-split expression");
    }
    /* Stepping back over a long run of spaces counts as matching; a prompt of spaces is allowed. */
    pcre2_set_match_limit(s->limits, UINT32_MAX);
    pcre2_set_depth_limit(s->limits, UINT32_MAX);
    (void)pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE); /* where it fails, matching interprets */
    *out = s;
    return OK;
}

void split_free(struct split *s) {
    if (!s) return;
    pcre2_code_free(s->code);
    pcre2_match_context_free(s->limits);
    free(s);
}

struct split_walk *split_walk_new(const struct split *s) {
    struct split_walk *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    w->split = s;
    w->found = pcre2_match_data_create(1, NULL);
    if (!w->found) {
        free(w);
        return NULL;
    }
    return w;
}

void split_walk_free(struct split_walk *w) {
    if (!w) return;
    pcre2_match_data_free(w->found);
    free(w);
}

int split_next(struct split_walk *w, const char *text, size_t n, size_t at, size_t *end) {
    const struct split *s = w->split;
    int rc = pcre2_match(s->code, (PCRE2_SPTR)text, n, at, PCRE2_NO_UTF_CHECK, w->found, s->limits);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(s->code, (PCRE2_SPTR)text, n, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                         w->found, s->limits);
    assert(rc != PCRE2_ERROR_NOMATCH); /* the alternatives cover every code point */
    if (rc < 0) return ERR_NOMEM;
    const PCRE2_SIZE *span = pcre2_get_ovector_pointer(w->found);
    assert(span[0] == at && span[1] > at && span[1] <= n);
    *end = span[1];
    return OK;
}
