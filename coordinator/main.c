/* coordinator/main.c: octavo: picks the sub-command.
 *
 * Owns: the table of sub-commands.  Fails how: an unknown one is a sentence and exit code 2.
 * Tested by: tests/faults/test_processes.py
 */
#include <string.h>

#include "coordinator/cmd.h"
#include "proto/base.h"
#include "proto/log.h"

static int cmd_version(int argc, char **argv) {
    UNUSED(argc), UNUSED(argv);
    printf("octavo %s\n", log_build());
    return EXIT_ASKED;
}

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"serve", cmd_serve, "Serves a model over HTTP, OpenAI style."},
    {"inspect", cmd_inspect, "Prints what is in a GGUF file."},
    {"plan", cmd_plan, "Says what a model needs of which devices, and how fast it would be."},
    {"probe", cmd_probe, "Asks a server or its workers how they are, for scripts."},
    {"restart", cmd_restart, "Has a running server replace one rank."},
    {"guard", cmd_guard, "Waits until device memory is back, before a start."},
    {"doctor", cmd_doctor, "Looks at this machine, lets ranks add up, says what to fix."},
    {"version", cmd_version, "Prints version and commit."},
};

static void print_help(FILE *f) {
    fputs("usage: octavo COMMAND [OPTION…]\n"
          "Serves one large GLM-5 class model from one box.\n\n",
          f);
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        fprintf(f, "  %-12s %s\n", commands[i].name, commands[i].help);
    fputs("\nEach command says more with --help.\n", f);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return EXIT_SETUP;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        print_help(stdout);
        return EXIT_ASKED;
    }
    const char *name = strcmp(argv[1], "--version") ? argv[1] : "version";
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (!strcmp(name, commands[i].name)) return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "octavo: expected a command that --help lists, found '%s'\n", argv[1]);
    return EXIT_SETUP;
}
