/* worker/switches.c: debug switches of the backend. See switches.h.
 *
 * Owns: nothing.  Called by: options.c, main.c, bench.c, tests.  Fails how: see switches.h.
 * Limits: none.
 * Tested by: tests/unit/test_switches.c
 *
 * The list is walked twice, so that a mistake at its end leaves nothing half set.
 */
#include <string.h>

#include "worker/switches.h"

static bool is_word(const char *word, const char *text, size_t n) {
    return strlen(word) == n && !memcmp(word, text, n);
}

static int find_choice(const struct kswitch *s, const char *text, size_t n) {
    for (int i = 0; i < K_CHOICES && s->choices[i]; i++)
        if (is_word(s->choices[i], text, n)) return i;
    return -1;
}

static int refuse(const struct kernels *k, const char *text, size_t n, struct err_text *err) {
    char known[256] = "";
    size_t at = 0;
    for (int i = 0; i < k->n_switches && at < sizeof known; i++)
        for (int c = 0; c < K_CHOICES && k->switches[i].choices[c] && at < sizeof known; c++)
            at += (size_t)snprintf(known + at, sizeof known - at, "%s%s=%s", at ? ", " : "",
                                   k->switches[i].name, k->switches[i].choices[c]);
    return err_set(err, ERR_SETUP, "--switch: expected one of %s, found %.*s", known, (int)n, text);
}

/* One "name=value" of n characters; set: not only checked. */
static int take_one(const struct kernels *k, const char *text, size_t n, bool set,
                    struct err_text *err) {
    const char *equals = memchr(text, '=', n);
    for (int i = 0; equals && i < k->n_switches; i++) {
        struct kswitch *s = &k->switches[i];
        if (!is_word(s->name, text, (size_t)(equals - text))) continue;
        int choice = find_choice(s, equals + 1, n - (size_t)(equals + 1 - text));
        if (choice < 0) break;
        if (set) s->chosen = choice;
        return OK;
    }
    return refuse(k, text, n, err);
}

int switches_set(const struct kernels *k, const char *list, struct err_text *err) {
    if (!list || !*list) return OK;
    for (int set = 0; set < 2; set++)
        for (const char *at = list;;) {
            size_t n = strcspn(at, ",");
            TRY(take_one(k, at, n, set, err));
            if (!at[n]) break;
            at += n + 1;
        }
    return OK;
}

void switches_print(FILE *f, const struct kernels *k) {
    for (int i = 0; i < k->n_switches; i++) {
        const struct kswitch *s = &k->switches[i];
        fprintf(f, "%-12s", s->name);
        for (int c = 0; c < K_CHOICES && s->choices[c]; c++)
            fprintf(f, "%s%s%s", c ? "|" : " ", s->choices[c], c == s->chosen ? "*" : "");
        fprintf(f, "  %s\n", s->help);
    }
}
