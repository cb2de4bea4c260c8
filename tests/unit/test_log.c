/* tests/unit/test_log.c: lines stay whole whatever is logged by whom, and a crash tells its story.
 *
 * The sink is process-wide: each test opens its own file, the crashes happen in children.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <regex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/log.h"

static char path[128];

static int setup(void **state) {
    static int turn;
    UNUSED(state);
    snprintf(path, sizeof path, "/tmp/octavo-test-log-%d-%d", (int)getpid(), turn++);
    return log_init("worker/3", LOG_INFO, path);
}

static int teardown(void **state) {
    UNUSED(state);
    if (log_init("test", LOG_INFO, NULL)) return -1;
    return unlink(path);
}

static char *contents(const char *file) {
    static char text[1 << 20];
    int fd = open(file, O_RDONLY);
    assert_true(fd >= 0);
    size_t n = 0;
    ssize_t k;
    while ((k = read(fd, text + n, sizeof text - 1 - n)) > 0) n += (size_t)k;
    text[n] = 0;
    close(fd);
    return text;
}

static int count_lines(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static bool matches(const char *text, const char *expression) {
    regex_t re;
    assert_int_equal(regcomp(&re, expression, REG_EXTENDED | REG_NOSUB | REG_NEWLINE), 0);
    bool yes = regexec(&re, text, 0, NULL, 0) == 0;
    regfree(&re);
    return yes;
}

static void a_line_is_time_level_who_event_and_pairs(void **state) {
    UNUSED(state);
    log_info("loaded", "bytes=%d seconds=%.2f", 5812345, 0.21);
    log_warn("slow", "%s", "");
    log_error("bare", "%s", "x=1");
    char *text = contents(path);
    assert_int_equal(count_lines(text), 3);
    assert_true(matches(text, "^20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]"
                              "\\.[0-9]{3}Z info worker/3 loaded bytes=5812345 seconds=0\\.21$"));
    assert_true(matches(text, " warn worker/3 slow $"));
    assert_true(matches(text, " error worker/3 bare x=1$"));
}

static void a_level_hides_what_is_below_it(void **state) {
    UNUSED(state);
    log_debug("hidden", "x=%d", 1);
    assert_int_equal(log_init("worker/3", LOG_ERROR, path), OK);
    log_warn("hidden", "x=%d", 1);
    log_error("seen", "x=%d", 1);
    char *text = contents(path);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, "seen"));
    enum log_level level;
    assert_true(log_parse_level("warn", &level));
    assert_int_equal(level, LOG_WARN);
    assert_false(log_parse_level("loud", &level));
}

static void what_a_stranger_sends_cannot_start_a_line(void **state) {
    UNUSED(state);
    log_info("request", "path=\"%s\"", "/a\n2026-12-01T00:00:00.000Z error fake\r\x1b[2J");
    char *text = contents(path);
    assert_int_equal(count_lines(text), 1);
    assert_null(strchr(text, '\r'));
    assert_null(strchr(text, '\x1b'));
}

static void a_line_too_long_is_cut_and_says_so(void **state) {
    UNUSED(state);
    char big[5000];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = 0;
    for (int n = 900; n < 1100; n++) log_info("big", "x=%.*s", n, big);
    log_info("big", "x=%s", big);
    char *text = contents(path);
    assert_int_equal(count_lines(text), 201);
    size_t longest = 0;
    for (char *line = text; *line; line = strchr(line, '\n') + 1) {
        size_t n = strcspn(line, "\n"), pairs = (size_t)(strstr(line, "x=") - line) + 2;
        longest = MAX(longest, n);
        bool cut = n > 6 && !memcmp(line + n - 6, " cut=1", 6);
        size_t told = cut ? n - pairs - 6 : n - pairs;
        assert_true(told >= 900);
    }
    assert_true(longest < 1024);
    assert_memory_equal(text + strlen(text) - 7, " cut=1\n", 7);
}

static void *log_many(void *id) {
    for (int i = 0; i < 500; i++) log_info("line", "thread=%d i=%d end=1", *(int *)id, i);
    return NULL;
}

static void lines_of_many_threads_stay_whole(void **state) {
    UNUSED(state);
    pthread_t threads[4];
    int ids[4];
    for (int i = 0; i < 4; i++) {
        ids[i] = i;
        assert_int_equal(pthread_create(&threads[i], NULL, log_many, &ids[i]), 0);
    }
    for (int i = 0; i < 50; i++) log_reopen(); /* the same file: nothing may be lost */
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    char *text = contents(path);
    assert_int_equal(count_lines(text), 2000);
    int next[4] = {0};
    for (char *line = text; *line; line = strchr(line, '\n') + 1) {
        int thread, i, n = 0;
        char *pairs = strstr(line, " thread=");
        assert_non_null(pairs);
        assert_int_equal(sscanf(pairs, " thread=%d i=%d end=1%n", &thread, &i, &n), 2);
        assert_true(n > 0 && pairs[n] == '\n');
        assert_int_equal(i, next[thread]++);
    }
}

static void reopening_follows_a_file_that_was_moved(void **state) {
    UNUSED(state);
    char moved[160];
    snprintf(moved, sizeof moved, "%s.1", path);
    log_info("before", "x=%d", 1);
    assert_int_equal(rename(path, moved), 0);
    log_info("between", "x=%d", 1);
    log_reopen();
    log_info("after", "x=%d", 1);
    char *text = contents(moved);
    assert_non_null(strstr(text, "before"));
    assert_non_null(strstr(text, "between"));
    text = contents(path);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, "after"));
    unlink(moved);
}

static void a_line_that_cannot_be_written_is_counted(void **state) {
    UNUSED(state);
    uint64_t before = log_lost();
    assert_int_equal(log_init("worker/3", LOG_INFO, "/dev/full"), OK);
    log_info("lost", "x=%d", 1);
    assert_int_equal(log_lost(), before + 1);
    assert_int_equal(log_init("worker/3", LOG_INFO, path), OK);
    assert_int_equal(log_init("worker/3", LOG_INFO, "/nowhere/at/all"), ERR_SYS);
}

static void errno_survives_a_line(void **state) {
    UNUSED(state);
    errno = ENOSPC;
    log_info("x", "why=\"%m\"%s", "");
    assert_int_equal(errno, ENOSPC);
    assert_non_null(strstr(contents(path), "why=\"No space left on device\""));
}

static void the_last_lines_are_kept_in_order(void **state) {
    UNUSED(state);
    char dumped[160];
    snprintf(dumped, sizeof dumped, "%s.dump", path);
    for (int i = 0; i < 200; i++) log_info("line", "i=%d.", i);
    int fd = open(dumped, O_RDWR | O_CREAT | O_TRUNC, 0600);
    log_dump_recent(fd);
    close(fd);
    char *text = contents(dumped);
    assert_int_equal(count_lines(text), 64);
    char *at = text;
    for (int i = 136; i < 200; i++) {
        char want[16];
        snprintf(want, sizeof want, "i=%d.\n", i);
        at = strstr(at, want);
        assert_non_null(at);
    }
    unlink(dumped);
}

enum crash { CRASH_ABORT, CRASH_SEGV, CRASH_KILLED, CRASH_STACK };

static int overflow(volatile int depth) {
    volatile char room[4096];
    room[0] = (char)depth;
    return depth < 0 ? 0 : overflow(depth + 1) + room[0];
}

static int *volatile nowhere = (int *)16;

static void crash(enum crash how) {
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    log_install_crash_report();
    log_info("last-words", "x=%d", 42);
    switch (how) {
    case CRASH_ABORT: abort();
    case CRASH_SEGV: *nowhere = 1; break;
    case CRASH_KILLED: kill(getpid(), SIGBUS); break;
    case CRASH_STACK: overflow(0); break;
    }
    _exit(99);
}

static void a_crash_reports_and_dies_of_its_own_signal(void **state) {
    UNUSED(state);
    static const struct {
        enum crash how;
        int signal;
    } rows[] = {{CRASH_ABORT, SIGABRT}, {CRASH_SEGV, SIGSEGV}, {CRASH_KILLED, SIGBUS},
                {CRASH_STACK, SIGSEGV}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        int status;
        char head[64];
        assert_int_equal(truncate(path, 0), 0);
        pid_t pid = fork();
        if (pid == 0) crash(rows[i].how);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (!WIFSIGNALED(status) || WTERMSIG(status) != rows[i].signal)
            fail_msg("row %zu: expected death by signal %d, found status 0x%x", i, rows[i].signal,
                     status);
        char *text = contents(path);
        snprintf(head, sizeof head, "who=worker/3 pid=%d signal=%d", (int)pid, rows[i].signal);
        assert_non_null(strstr(text, log_build()));
        assert_non_null(strstr(text, head));
        char *report = strstr(text, "last log lines:\n");
        assert_non_null(report);
        assert_non_null(strstr(report, "last-words x=42\n"));
        assert_non_null(strstr(report, "crash report ends\n"));
    }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_line_is_time_level_who_event_and_pairs),
        TEST(a_level_hides_what_is_below_it),
        TEST(what_a_stranger_sends_cannot_start_a_line),
        TEST(a_line_too_long_is_cut_and_says_so),
        TEST(lines_of_many_threads_stay_whole),
        TEST(reopening_follows_a_file_that_was_moved),
        TEST(a_line_that_cannot_be_written_is_counted),
        TEST(errno_survives_a_line),
        TEST(the_last_lines_are_kept_in_order),
        TEST(a_crash_reports_and_dies_of_its_own_signal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
