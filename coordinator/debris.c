/* coordinator/debris.c: files that dead processes left behind. See debris.h.
 *
 * Owns, called by, fails how, limits, tested by: see debris.h.
 *
 * Our own shared memory and sockets have no names in a file system and end with their processes.
 * Two things do not: segments of NCCL, which a killed process leaves in /dev/shm until that is full
 * and no start succeeds any more, and a shard cache's file that was being written. NCCL's names do
 * not say whose they are. But a segment in use is mapped by its maker from the beginning to the
 * end; so one that nobody maps, or has open, serves nobody. Whoever shares the folder from another
 * container cannot be seen from here: what he has mapped stays his when the name goes, and a
 * segment is younger than `age_s` while its peers may still look for it by name.
 */
#include "coordinator/debris.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "proto/log.h"

#define NAME_BYTES 256

struct piece {
    char name[NAME_BYTES];
    dev_t dev;
    ino_t ino;
    off_t bytes;
    bool used;
};

struct pieces {
    struct piece all[DEBRIS_MAX];
    int n;
};

static bool is_nccl(const char *name) {
    return !strncmp(name, "nccl-", 5);
}

static bool is_half_shard(const char *name) {
    const char *at = strstr(name, ".shard.");
    if (!at) return false;
    at += strlen(".shard.");
    return *at && at[strspn(at, "0123456789")] == 0;
}

/* Plain files of this user that are old enough. */
static void find(struct pieces *p, int dir, bool (*wanted)(const char *), int64_t before_s) {
    struct dirent *e;
    DIR *d = fdopendir(dup(dir));
    p->n = 0;
    while (d && p->n < DEBRIS_MAX && (e = readdir(d))) {
        struct stat st;
        struct piece *f = &p->all[p->n];
        if (!wanted(e->d_name) || strlen(e->d_name) >= NAME_BYTES) continue;
        if (fstatat(dir, e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode)) continue;
        if (st.st_uid != geteuid() || st.st_mtime > before_s) continue;
        *f = (struct piece){.dev = st.st_dev, .ino = st.st_ino, .bytes = st.st_size};
        strcpy(f->name, e->d_name);
        p->n++;
    }
    if (d) closedir(d);
}

static void mark(struct pieces *p, dev_t dev, ino_t ino) {
    for (int i = 0; i < p->n; i++)
        if (p->all[i].ino == ino && p->all[i].dev == dev) p->all[i].used = true;
}

static void mark_mapped(struct pieces *p, int proc) {
    char line[8192];
    int fd = openat(proc, "maps", O_RDONLY | O_CLOEXEC);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
    if (!f) return;
    while (fgets(line, sizeof line, f)) {
        unsigned major_n, minor_n;
        uint64_t ino;
        if (sscanf(line, "%*s %*s %*s %x:%x %" SCNu64, &major_n, &minor_n, &ino) == 3 && ino)
            mark(p, makedev(major_n, minor_n), (ino_t)ino);
    }
    fclose(f);
}

static void mark_open(struct pieces *p, int proc) {
    struct dirent *e;
    int fd = openat(proc, "fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) return;
    while ((e = readdir(d))) {
        struct stat st;
        if (fstatat(fd, e->d_name, &st, 0) == 0) mark(p, st.st_dev, st.st_ino);
    }
    closedir(d);
}

/* Whom we may not look at is another user, who cannot have opened what only this one may open, or a
 * process with more privileges than ours, which is none that uses NCCL. */
static bool mark_used(struct pieces *p) {
    struct dirent *e;
    DIR *d = opendir("/proc");
    if (!d) return false;
    while ((e = readdir(d))) {
        if (e->d_name[strspn(e->d_name, "0123456789")]) continue;
        int proc = openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (proc < 0) continue; /* ended meanwhile */
        mark_mapped(p, proc);
        mark_open(p, proc);
        close(proc);
    }
    closedir(d);
    return true;
}

static int clear(const char *folder, bool (*wanted)(const char *), int64_t before_s) {
    static struct pieces p; /* of the one thread that starts a server */
    int removed = 0, dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) return 0;
    find(&p, dir, wanted, before_s);
    bool looked = p.n > 0 && mark_used(&p);
    for (int i = 0; looked && i < p.n; i++) {
        if (p.all[i].used || unlinkat(dir, p.all[i].name, 0) < 0) continue;
        log_info("debris_removed", "file=\"%s/%s\" bytes=%" PRId64, folder, p.all[i].name,
                 (int64_t)p.all[i].bytes);
        removed++;
    }
    close(dir);
    return removed;
}

int debris_clear_nccl(const char *shm, int64_t now_s, int64_t age_s) {
    return clear(shm, is_nccl, now_s - age_s);
}

int debris_clear_shards(const char *dir, int64_t now_s, int64_t age_s) {
    return clear(dir, is_half_shard, now_s - age_s);
}
