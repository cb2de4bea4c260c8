/* tests/unit/fake_root.h: a host made of folders, for what reads /proc and /sys below a root.
 */
#ifndef OCTAVO_TESTS_UNIT_FAKE_ROOT_H
#define OCTAVO_TESTS_UNIT_FAKE_ROOT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[400];

/* Makes the folders of a path; full[0…] is what is made, all of it if it ends in a slash. */
static void fake_root_folders(char *full) {
    for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        mkdir(full, 0777);
        *p = '/';
    }
}

/* A file of n bytes, or a folder where data is NULL. */
static void put_bytes(const char *path, const void *data, size_t n) {
    char full[900];
    snprintf(full, sizeof full, "%s%s%s", root, path, data ? "" : "/");
    fake_root_folders(full);
    if (!data) return;
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

static void put(const char *path, const char *text) {
    put_bytes(path, text, text ? strlen(text) : 0);
}

static int new_host(void **state) {
    (void)state;
    const char *build = getenv("OCTAVO_BUILD_ROOT");
    snprintf(root, sizeof root, "%.350s/test-host-XXXXXX", build ? build : "/tmp");
    return mkdtemp(root) ? 0 : -1;
}

static int drop_host(void **state) {
    (void)state;
    char command[500];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

#endif
