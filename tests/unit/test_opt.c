/* tests/unit/test_opt.c: options from the command line and the environment, and every refusal. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/opt.h"

static struct {
    int64_t port, neg;
    bool once, verbose;
    double temperature;
    const char *model, *device;
} got;

static const struct opt rows[] = {
    {.name = "port", .value = "N", .kind = OPT_INT, .out = &got.port, .min = 1, .max = 65535,
     .shown = "8000", .help = "Port to listen on."},
    {.name = "neg", .value = "N", .kind = OPT_INT, .out = &got.neg, .min = INT64_MIN,
     .max = INT64_MAX},
    {.name = "once", .kind = OPT_FLAG, .out = &got.once, .help = "Exit after the first answer."},
    {.name = "verbose", .kind = OPT_FLAG, .out = &got.verbose},
    {.name = "temperature", .value = "X", .kind = OPT_FLOAT, .out = &got.temperature},
    {.name = "model-path", .value = "PATH", .kind = OPT_STRING, .out = &got.model,
     .help = "The model. A sentence that is long enough that it has to be broken into several "
             "lines when it is shown on a terminal of a hundred columns."},
    {.name = "device", .kind = OPT_CHOICE, .out = &got.device, .choices = "cpu|cuda"},
    {.name = "secret", .value = "N", .kind = OPT_INT, .out = &got.neg, .max = 9, .hidden = true},
};

static const char *const variables[] = {"OCTAVO_PORT", "OCTAVO_ONCE", "OCTAVO_MODEL_PATH",
                                        "OCTAVO_DEVICE", "OCTAVO_TEMPERATURE"};

static int clean(void **state) {
    UNUSED(state);
    memset(&got, 0, sizeof got);
    for (size_t i = 0; i < ARRAY_LEN(variables); i++) unsetenv(variables[i]);
    return 0;
}

/* Splits a line at spaces and parses it. */
static char *args[32];
static int parse(const char *line, int max_positional, struct err_text *err) {
    static char text[512];
    int n = 0;
    snprintf(text, sizeof text, "octavo %s", line);
    for (char *w = strtok(text, " "); w; w = strtok(NULL, " ")) args[n++] = w;
    args[n] = NULL;
    err->text[0] = 0;
    return opt_parse(rows, ARRAY_LEN(rows), n, args, max_positional, "usage: octavo", err);
}

static void every_kind_is_read_from_the_command_line(void **state) {
    UNUSED(state);
    struct err_text err;
    int rc = parse("--port 80 --once --temperature=-1.5e1 --model-path a=b.gguf --device cuda "
                   "--neg -9223372036854775808 --verbose=no --secret 3 --neg=7", 0, &err);
    if (rc) fail_msg("expected 0, found %d %s", rc, err.text);
    assert_int_equal(got.port, 80);
    assert_true(got.once);
    assert_false(got.verbose);
    assert_true(got.temperature == -15.0);
    assert_string_equal(got.model, "a=b.gguf");
    assert_string_equal(got.device, "cuda");
    assert_int_equal(got.neg, 7); /* the last one wins */
}

static void positional_arguments_move_to_the_front(void **state) {
    UNUSED(state);
    struct err_text err;
    assert_int_equal(parse("first --port 80 - --once -- --port", 3, &err), 3);
    assert_string_equal(args[0], "octavo");
    assert_string_equal(args[1], "first");
    assert_string_equal(args[2], "-");
    assert_string_equal(args[3], "--port");
    assert_int_equal(parse("", 3, &err), 0);
}

static void the_environment_is_read_and_the_command_line_wins(void **state) {
    UNUSED(state);
    struct err_text err;
    setenv("OCTAVO_PORT", "81", 1);
    setenv("OCTAVO_ONCE", "true", 1);
    setenv("OCTAVO_MODEL_PATH", "env.gguf", 1);
    setenv("OCTAVO_DEVICE", "", 1); /* as good as unset */
    assert_int_equal(parse("--port 82", 0, &err), 0);
    assert_int_equal(got.port, 82);
    assert_true(got.once);
    assert_string_equal(got.model, "env.gguf");
    assert_null(got.device);
}

static void a_bad_variable_is_refused_by_its_name(void **state) {
    UNUSED(state);
    struct err_text err;
    setenv("OCTAVO_PORT", "eighty", 1);
    setenv("OCTAVO_DEVICE", "tpu", 1);
    assert_int_equal(parse("", 0, &err), ERR_SETUP);
    assert_string_equal(err.text,
                        "OCTAVO_PORT: expected an integer from 1 to 65535, found 'eighty'");
}

static const struct {
    const char *line, *expect;
} refusals[] = {
    {"--prot 80", "--prot: expected an option that --help lists, found none"},
    {"--por 80", "--por: expected an option"},
    {"-p", "-p: expected an option"},
    {"--port", "--port: expected a value N, found the end of the line"},
    {"--port 0", "--port: expected an integer from 1 to 65535, found '0'"},
    {"--port 65536", "found '65536'"},
    {"--port=", "found ''"},
    {"--port 80x", "found '80x'"},
    {"--port 0x50", "found '0x50'"},
    {"--port +80", "found '+80'"},
    {"--port 8e1", "found '8e1'"},
    {"--port -", "found '-'"},
    {"--port 99999999999999999999", "found '99999999999999999999'"},
    {"--neg 9223372036854775808", "--neg: expected an integer from -9223372036854775808"},
    {"--temperature warm", "--temperature: expected a number, found 'warm'"},
    {"--temperature nan", "found 'nan'"},
    {"--temperature inf", "found 'inf'"},
    {"--temperature 0x1p3", "found '0x1p3'"},
    {"--temperature 1e999", "found '1e999'"},
    {"--temperature 1.5.2", "found '1.5.2'"},
    {"--device tpu", "--device: expected one of cpu|cuda, found 'tpu'"},
    {"--device cp", "found 'cp'"},
    {"--device cpu|cuda", "found 'cpu|cuda'"},
    {"--device=", "found ''"},
    {"--model-path=", "--model-path: expected a value PATH, found ''"},
    {"--once=maybe", "--once: expected true or false, found 'maybe'"},
    {"stray", "'stray': expected only options, found a stray argument"},
    {"--once stray", "'stray': expected only options"},
};

static void what_is_wrong_is_refused_with_expected_and_found(void **state) {
    UNUSED(state);
    int failures = 0;
    for (size_t i = 0; i < ARRAY_LEN(refusals); i++) {
        struct err_text err;
        int rc = parse(refusals[i].line, 0, &err);
        if (rc == ERR_SETUP && strstr(err.text, refusals[i].expect)) continue;
        failures++;
        print_error("%s\n  expected: %s\n  found:    %d %s\n", refusals[i].line,
                    refusals[i].expect, rc, err.text);
    }
    assert_int_equal(failures, 0);
}

/* What help prints, as text. */
static char *help_text(void) {
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    opt_print_help(f, rows, ARRAY_LEN(rows), "usage: octavo serve [options]");
    fclose(f);
    return text;
}

static void help_shows_options_and_defaults_but_nothing_hidden(void **state) {
    UNUSED(state);
    char *text = help_text();
    assert_non_null(strstr(text, "usage: octavo serve [options]\n"));
    assert_non_null(strstr(text, "--port N"));
    assert_non_null(strstr(text, "Port to listen on. (default: 8000)"));
    assert_non_null(strstr(text, "--device cpu|cuda"));
    assert_non_null(strstr(text, "--once "));
    assert_null(strstr(text, "secret"));
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        size_t n = strcspn(line, "\n");
        if (n > 100) fail_msg("expected lines of at most 100 columns, found %zu", n);
    }
    free(text);
}

static void help_goes_to_stdout_even_when_the_environment_is_bad(void **state) {
    UNUSED(state);
    struct err_text err;
    char first[16] = {0};
    int fds[2];
    setenv("OCTAVO_PORT", "eighty", 1);
    assert_int_equal(pipe(fds), 0);
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    dup2(fds[1], STDOUT_FILENO);
    int rc = parse("--once --help", 0, &err);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    close(fds[1]);
    assert_int_equal(rc, ERR_CLOSED);
    assert_true(read(fds[0], first, sizeof first - 1) > 0);
    assert_memory_equal(first, "usage: octavo", 13);
    close(fds[0]);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, clean, clean)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(every_kind_is_read_from_the_command_line),
        TEST(positional_arguments_move_to_the_front),
        TEST(the_environment_is_read_and_the_command_line_wins),
        TEST(a_bad_variable_is_refused_by_its_name),
        TEST(what_is_wrong_is_refused_with_expected_and_found),
        TEST(help_shows_options_and_defaults_but_nothing_hidden),
        TEST(help_goes_to_stdout_even_when_the_environment_is_bad),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
