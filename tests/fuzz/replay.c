/* tests/fuzz/replay.c: feeds files, or whole folders, to a fuzz target built without a fuzzer.
 *
 * Owns: one input at a time, in a buffer of its exact size so that a sanitizer sees an overrun.
 * Fails how: exit 1 when there is nothing to replay: an empty corpus must not look like success.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static int replay_file(const char *path, size_t size) {
    FILE *f = fopen(path, "rb");
    uint8_t *p = malloc(size ? size : 1);
    if (!f || !p || fread(p, 1, size, f) != size) {
        fprintf(stderr, "%s: expected %zu bytes, found fewer\n", path, size);
        exit(1);
    }
    fclose(f);
    LLVMFuzzerTestOneInput(p, size);
    free(p);
    return 1;
}

static int replay(const char *path) {
    struct stat st;
    if (stat(path, &st)) return 0;
    if (!S_ISDIR(st.st_mode)) return replay_file(path, (size_t)st.st_size);
    DIR *dir = opendir(path);
    int n = 0;
    for (struct dirent *e; dir && (e = readdir(dir));) {
        char inner[4096];
        snprintf(inner, sizeof inner, "%s/%s", path, e->d_name);
        if (e->d_name[0] != '.') n += replay(inner);
    }
    if (dir) closedir(dir);
    return n;
}

int main(int argc, char **argv) {
    int n = 0;
    for (int i = 1; i < argc; i++) n += replay(argv[i]);
    printf("replayed %d inputs\n", n);
    return n ? 0 : 1;
}
