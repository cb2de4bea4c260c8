/* coordinator/child.c: one worker process: started, watched, killed. See child.h.
 *
 * Owns: the uv_process_t.  Called by: fleet.c.  Fails how: ERR_SETUP when it cannot be started.
 * Tested by: tests/unit/test_fleet.c
 *
 * The exit callback only takes notes: the tick decides what a death means. The handle is closed at
 * once, and `open` falls when libuv has let go of it; only then may the struct be used again, which
 * is why the fleet waits for `open` and not for `exited` before it starts a successor.
 */
#include "coordinator/child.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* /proc/PID/stat from its third field on, the state; NULL: no such process. */
static const char *read_stat(int64_t pid, char text[1024]) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    FILE *f = fopen(path, "re");
    if (!f) return NULL;
    size_t n = fread(text, 1, 1023, f);
    fclose(f);
    text[n] = 0;
    const char *p = strrchr(text, ')'); /* the name may hold spaces and brackets */
    return p && p[1] == ' ' ? p + 2 : NULL;
}

uint64_t child_start_time(int64_t pid) {
    char text[1024];
    const char *p = read_stat(pid, text);
    for (int field = 3; p && field < 22; field++) {
        p = strchr(p, ' ');
        if (p) p++;
    }
    return p ? strtoull(p, NULL, 10) : 0;
}

bool child_is_stopped(const struct child *c) {
    char text[1024];
    const char *p = c->open && !c->exited ? read_stat(c->pid, text) : NULL;
    return p && (*p == 'T' || *p == 't');
}

static void on_closed(uv_handle_t *h) {
    ((struct child *)h->data)->open = false;
}

static void on_exit_note(uv_process_t *p, int64_t status, int signum) {
    struct child *c = p->data;
    c->exited = true;
    c->exit_status = status;
    c->signal = signum;
    uv_close((uv_handle_t *)p, on_closed);
}

int child_spawn(struct child *c, uv_loop_t *loop, char **argv, char **env, struct err_text *err) {
    assert(!c->open);
    *c = (struct child){0};
    uv_stdio_container_t io[3] = {{.flags = UV_IGNORE},
                                  {.flags = UV_INHERIT_FD, .data.fd = 2},
                                  {.flags = UV_INHERIT_FD, .data.fd = 2}};
    uv_process_options_t o = {.exit_cb = on_exit_note,
                              .file = argv[0],
                              .args = argv,
                              .env = env,
                              .flags = UV_PROCESS_DETACHED, /* Ctrl-C is for the coordinator */
                              .stdio = io,
                              .stdio_count = 3};
    c->process.data = c;
    c->open = true; /* even if it fails: the handle has to be closed */
    int rc = uv_spawn(loop, &c->process, &o);
    if (rc < 0) {
        c->exited = true;
        uv_close((uv_handle_t *)&c->process, on_closed);
        return err_set(err, ERR_SETUP, "%.300s: expected to start it, found: %s", argv[0],
                       uv_strerror(rc));
    }
    c->pid = c->process.pid;
    c->start_time = child_start_time(c->pid);
    return OK;
}

void child_signal(struct child *c, int signum) {
    if (c->open && !c->exited) uv_process_kill(&c->process, signum);
}

void child_kill(struct child *c) {
    if (!c->open || c->exited) return;
    c->killed = true;
    child_signal(c, SIGKILL);
}

const char *child_ending(const struct child *c, char *buf, size_t n) {
    if (c->signal)
        snprintf(buf, n, "signal %d", c->signal);
    else
        snprintf(buf, n, "exit code %lld", (long long)c->exit_status);
    return buf;
}
