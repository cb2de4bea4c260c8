/* proto/opt.h: command line and environment from one table per program.
 *
 * Each row is an option; `--name VALUE`, `--name=VALUE` or OCTAVO_NAME in the environment set it
 * (the command line wins). An unknown option, a missing or bad value, or a stray argument is one
 * sentence (what, expected, found) and ERR_SETUP, which programs turn into exit 2.
 *
 * Owns: nothing, it writes through the rows' pointers.  Called by: both programs' main.
 * Tested by: tests/unit/test_opt.c
 */
#ifndef OCTAVO_PROTO_OPT_H
#define OCTAVO_PROTO_OPT_H

#include "proto/base.h"

enum opt_kind { OPT_FLAG, OPT_INT, OPT_FLOAT, OPT_STRING, OPT_CHOICE };

struct opt {
    const char *name;     /* "max-seqs": --max-seqs, OCTAVO_MAX_SEQS */
    const char *value;    /* "N", "PATH"; NULL for a flag */
    enum opt_kind kind;
    void *out;            /* bool *, int64_t *, double *, const char ** */
    int64_t min, max;     /* OPT_INT range, inclusive; both must be given */
    const char *choices;  /* OPT_CHOICE: "cpu|cuda" */
    const char *shown;    /* default as --help shows it, NULL: nothing */
    const char *help;     /* one sentence */
    bool hidden;          /* internal: accepted, not shown */
};

/* Reads the environment first, then argv[1…argc-1]. Returns the number of positional arguments,
 * moved to argv[1…] (at most max_positional), ERR_SETUP with a sentence, or ERR_CLOSED when --help
 * or -h was printed to stdout. Strings point into argv or the environment. A flag is set by its
 * name alone, or with =true, =false (1 0 yes no on off); `--` ends the options; the last of several
 * wins; an empty variable counts as unset, an empty value of any kind is refused. */
int opt_parse(const struct opt *rows, int n_rows, int argc, char **argv, int max_positional,
              const char *usage, struct err_text *err);

void opt_print_help(FILE *f, const struct opt *rows, int n_rows, const char *usage);

#endif
