/* proto/opt.c: command line and environment from one table.
 *
 * Owns: nothing; it writes through the rows' pointers.  Called by: both programs' main.
 * Fails how: ERR_SETUP with one sentence; ERR_CLOSED after --help.  Limits: none of its own.
 * Tested by: tests/unit/test_opt.c
 *
 * getopt_long is not used: it prints its own sentences, takes abbreviations that become ambiguous
 * when an option is added, and knows neither ranges nor the environment. A bad value in the
 * environment is reported only after the command line was read, so that --help always helps.
 */
#include "proto/opt.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HELP_COLUMNS 100

static bool parse_flag(const char *s, bool *out) {
    static const char *const yes[] = {"1", "true", "yes", "on"};
    static const char *const no[] = {"0", "false", "no", "off"};
    for (int i = 0; i < (int)ARRAY_LEN(yes); i++) {
        if (!strcmp(s, yes[i])) return *out = true, true;
        if (!strcmp(s, no[i])) return *out = false, true;
    }
    return false;
}

/* Decimal digits with an optional minus, nothing else: no spaces, no plus, no 0x, no 1e3. */
static bool parse_int(const char *s, int64_t *out) {
    const char *d = s + (*s == '-');
    if (!*d || strspn(d, "0123456789") != strlen(d)) return false;
    errno = 0;
    long long v = strtoll(s, NULL, 10);
    if (errno) return false;
    *out = v;
    return true;
}

static bool parse_float(const char *s, double *out) {
    if (!*s || strspn(s, "+-.0123456789eE") != strlen(s)) return false;
    char *end;
    double v = strtod(s, &end);
    if (end == s || *end || !isfinite(v)) return false;
    *out = v;
    return true;
}

static bool is_choice(const char *choices, const char *s) {
    size_t n = strlen(s);
    for (const char *c = choices; n > 0; c++) {
        size_t k = strcspn(c, "|");
        if (k == n && !memcmp(c, s, n)) return true;
        c += k;
        if (!*c) return false;
    }
    return false;
}

/* where: "--port" or "OCTAVO_PORT", whichever the person wrote. */
static int set_value(const struct opt *o, const char *where, const char *s, struct err_text *err) {
    switch (o->kind) {
    case OPT_FLAG:
        if (parse_flag(s, o->out)) return OK;
        return err_set(err, ERR_SETUP, "%s: expected true or false, found '%.100s'", where, s);
    case OPT_INT: {
        int64_t v;
        if (parse_int(s, &v) && v >= o->min && v <= o->max) return *(int64_t *)o->out = v, OK;
        return err_set(err, ERR_SETUP, "%s: expected an integer from %lld to %lld, found '%.100s'",
                       where, (long long)o->min, (long long)o->max, s);
    }
    case OPT_FLOAT:
        if (parse_float(s, o->out)) return OK;
        return err_set(err, ERR_SETUP, "%s: expected a number, found '%.100s'", where, s);
    case OPT_STRING:
        if (*s) return *(const char **)o->out = s, OK;
        return err_set(err, ERR_SETUP, "%s: expected a value %s, found ''", where,
                       o->value ? o->value : "that is not empty");
    case OPT_CHOICE:
        if (is_choice(o->choices, s)) return *(const char **)o->out = s, OK;
        return err_set(err, ERR_SETUP, "%s: expected one of %s, found '%.100s'", where, o->choices,
                       s);
    }
    assert(!"an option of a known kind");
    return ERR_SETUP;
}

/* An empty variable counts as unset: that is how unit files and containers switch one off. */
static int read_environment(const struct opt *rows, int n_rows, struct err_text *err) {
    int first_error = OK;
    for (int i = 0; i < n_rows; i++) {
        char name[80] = "OCTAVO_";
        size_t n = strlen(name);
        for (const char *c = rows[i].name; *c && n + 1 < sizeof name; c++)
            name[n++] = *c == '-' ? '_' : (char)(*c >= 'a' && *c <= 'z' ? *c - 32 : *c);
        const char *value = getenv(name);
        if (!value || !*value) continue;
        int rc = set_value(&rows[i], name, value, first_error ? NULL : err);
        if (rc < 0) first_error = rc;
    }
    return first_error;
}

static const struct opt *find_row(const struct opt *rows, int n_rows, const char *name, size_t n) {
    for (int i = 0; i < n_rows; i++)
        if (strlen(rows[i].name) == n && !memcmp(rows[i].name, name, n)) return &rows[i];
    return NULL;
}

/* One `--name[=VALUE]`; takes the next argument as the value where it must. */
static int read_option(const struct opt *rows, int n_rows, int argc, char **argv, int *i,
                       struct err_text *err) {
    const char *arg = argv[*i];
    size_t n = strcspn(arg, "=");
    const char *value = arg[n] ? arg + n + 1 : NULL;
    const struct opt *o = n > 2 && arg[1] == '-' ? find_row(rows, n_rows, arg + 2, n - 2) : NULL;
    if (!o)
        return err_set(err, ERR_SETUP, "%.*s: expected an option that --help lists, found none",
                       (int)MIN(n, 100u), arg);
    char where[80];
    snprintf(where, sizeof where, "--%s", o->name);
    if (o->kind == OPT_FLAG && !value) return *(bool *)o->out = true, OK;
    if (!value && *i + 1 >= argc)
        return err_set(err, ERR_SETUP, "%s: expected a value %s, found the end of the line", where,
                       o->value ? o->value : "after it");
    return set_value(o, where, value ? value : argv[++*i], err);
}

int opt_parse(const struct opt *rows, int n_rows, int argc, char **argv, int max_positional,
              const char *usage, struct err_text *err) {
    struct err_text env_err = {{0}};
    int env_rc = read_environment(rows, n_rows, &env_err);
    int n_positional = 0;
    bool only_positional = false;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (!only_positional && !strcmp(arg, "--")) {
            only_positional = true;
        } else if (!only_positional && (!strcmp(arg, "--help") || !strcmp(arg, "-h"))) {
            opt_print_help(stdout, rows, n_rows, usage);
            return ERR_CLOSED;
        } else if (!only_positional && arg[0] == '-' && arg[1]) {
            TRY(read_option(rows, n_rows, argc, argv, &i, err));
        } else if (n_positional < max_positional) {
            argv[1 + n_positional++] = argv[i];
        } else {
            return err_set(err, ERR_SETUP, "'%.100s': expected %s, found a stray argument", arg,
                           max_positional ? "no further argument" : "only options");
        }
    }
    if (env_rc < 0) return err_set(err, env_rc, "%s", env_err.text);
    return n_positional;
}

/* Writes text from column `at` on, broken at spaces and indented to `at`. */
static void print_wrapped(FILE *f, const char *text, int at) {
    int width = HELP_COLUMNS - at, used = 0;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (used > 0 && used + 1 + n > width) {
            fprintf(f, "\n%*s", at, "");
            used = 0;
        }
        used += fprintf(f, "%s%.*s", used ? " " : "", n, text);
        text += n;
        text += strspn(text, " ");
    }
}

void opt_print_help(FILE *f, const struct opt *rows, int n_rows, const char *usage) {
    fprintf(f, "%s\n\n", usage);
    const int at = 30;
    for (int i = 0; i < n_rows; i++) {
        const struct opt *o = &rows[i];
        if (o->hidden) continue;
        const char *value = o->value ? o->value : o->choices;
        int n = fprintf(f, "  --%s%s%s", o->name, value ? " " : "", value ? value : "");
        if (n + 2 > at) n = fprintf(f, "\n") - 1;
        fprintf(f, "%*s", at - n, "");
        char text[1024];
        int k = snprintf(text, sizeof text, "%s", o->help ? o->help : "");
        if (o->shown && k >= 0 && k < (int)sizeof text)
            snprintf(text + k, sizeof text - (size_t)k, " (default: %s)", o->shown);
        print_wrapped(f, text, at);
        fprintf(f, "\n");
    }
    fprintf(f, "  --%-*s%s\n", at - 4, "help", "Prints this.");
    fprintf(f, "\nEach option can be set in the environment too: --max-seqs as OCTAVO_MAX_SEQS.\n"
               "The command line wins; an empty variable counts as unset.\n");
}
