/* tests/unit/test_debris.c: what dead processes left is removed, what anybody may still want is
 * not.
 */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/debris.h"
#include "proto/log.h"

#define AGE_S 60

static char folder[64];

static int make_folder(void **state) {
    UNUSED(state);
    strcpy(folder, "/tmp/octavo-debris-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    UNUSED(state);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

static const char *path_of(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void make(const char *name) {
    int fd = open(path_of(name), O_RDWR | O_CREAT, 0600);
    assert_true(fd >= 0 && ftruncate(fd, 4096) == 0);
    close(fd);
}

static bool there(const char *name) {
    return access(path_of(name), F_OK) == 0;
}

static int64_t later(void) {
    return (int64_t)time(NULL) + AGE_S + 10;
}

static void a_segment_that_nobody_maps_is_removed(void **state) {
    UNUSED(state);
    make("nccl-AbCdEf");
    make("other-AbCdEf");
    assert_int_equal(debris_clear_nccl(folder, (int64_t)time(NULL), AGE_S), 0); /* too young */
    assert_true(there("nccl-AbCdEf"));
    assert_int_equal(debris_clear_nccl(folder, later(), AGE_S), 1);
    assert_false(there("nccl-AbCdEf"));
    assert_true(there("other-AbCdEf"));
}

/* In another process, which maps it and then closes it, as NCCL does; or keeps it open. */
static void a_segment_in_use_stays(void **state) {
    UNUSED(state);
    for (int mapped = 0; mapped <= 1; mapped++) {
        int ready[2];
        char c;
        make("nccl-used");
        assert_int_equal(pipe(ready), 0);
        pid_t pid = fork();
        if (pid == 0) {
            int fd = open(path_of("nccl-used"), O_RDWR);
            void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (mapped)
                close(fd);
            else
                munmap(p, 4096);
            if (write(ready[1], "x", 1) == 1) pause();
            _exit(1);
        }
        assert_int_equal(read(ready[0], &c, 1), 1);
        assert_int_equal(debris_clear_nccl(folder, later(), AGE_S), 0);
        assert_true(there("nccl-used"));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        assert_int_equal(debris_clear_nccl(folder, later(), AGE_S), 1);
        close(ready[0]);
        close(ready[1]);
    }
}

static void links_and_folders_are_left_alone(void **state) {
    UNUSED(state);
    char link[128];
    make("target");
    strcpy(link, path_of("nccl-link"));
    assert_int_equal(symlink(path_of("target"), link), 0);
    assert_int_equal(mkdir(path_of("nccl-folder"), 0700), 0);
    assert_int_equal(debris_clear_nccl(folder, later(), AGE_S), 0);
    assert_true(there("nccl-link") && there("nccl-folder") && there("target"));
}

static void a_half_written_shard_is_removed_and_a_whole_one_is_not(void **state) {
    UNUSED(state);
    make("0011223344556677-1-of-8.shard.4242");
    make("0011223344556677-1-of-8.shard");
    make("notes.shard.txt");
    assert_int_equal(debris_clear_shards(folder, later(), AGE_S), 1);
    assert_true(there("0011223344556677-1-of-8.shard") && there("notes.shard.txt"));
}

static void a_folder_that_is_not_there_is_no_trouble(void **state) {
    UNUSED(state);
    assert_int_equal(debris_clear_nccl("/nowhere/at/all", later(), AGE_S), 0);
}

int main(void) {
    log_init("test", LOG_INFO, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_segment_that_nobody_maps_is_removed, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(a_segment_in_use_stays, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(links_and_folders_are_left_alone, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(a_half_written_shard_is_removed_and_a_whole_one_is_not,
                                        make_folder, remove_folder),
        cmocka_unit_test(a_folder_that_is_not_there_is_no_trouble),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
