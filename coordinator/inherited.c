/* coordinator/inherited.c: see inherited.h.
 *
 * Owns, called by, fails how, tested by: see inherited.h.
 * Limits: LIMIT_CONNECTIONS, LIMIT_DESCRIPTORS_KEPT.
 *
 * The usual soft limit of 1024 open files is there for programs that call select, which none of us
 * does; a thousand idle clients would take every descriptor, and then no worker could be started
 * again. Running out inside libzmq is worse than a refusal here: it ends the process by an
 * assertion. A mask on SIGTERM is inherited through exec from some launchers, and would leave a
 * server that can only be killed.
 */
#include "coordinator/inherited.h"

#include <signal.h>
#include <sys/resource.h>

#include "proto/limits.h"

#define DESCRIPTORS_MIN      64
#define DESCRIPTORS_PER_RANK 4

static int raise_descriptors(int ranks, struct err_text *err) {
    const rlim_t wanted = LIMIT_CONNECTIONS + LIMIT_CONNECTIONS / 8 + LIMIT_DESCRIPTORS_KEPT;
    const rlim_t least = DESCRIPTORS_MIN + (rlim_t)ranks * DESCRIPTORS_PER_RANK;
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l) < 0) return OK;
    if (l.rlim_cur < wanted) {
        l.rlim_cur = MIN(l.rlim_max, wanted);
        if (setrlimit(RLIMIT_NOFILE, &l) < 0) getrlimit(RLIMIT_NOFILE, &l);
    }
    if (l.rlim_cur >= least) return OK;
    return err_set(err, ERR_SETUP,
                   "open files: expected a limit (ulimit -n) of at least %llu for %d ranks, found "
                   "%llu",
                   (unsigned long long)least, ranks, (unsigned long long)l.rlim_cur);
}

int inherited_make_fit(int ranks, struct err_text *err) {
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP, SIGCHLD};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < ARRAY_LEN(signals); i++) sigaddset(&set, signals[i]);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    return raise_descriptors(ranks, err);
}
