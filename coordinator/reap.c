/* coordinator/reap.c: see reap.h.
 *
 * Owns, called by, fails how, tested by: see reap.h.
 *
 * libuv asks only after the children that it started, so a process that was put into our container
 * from outside and lost its parent would stay a zombie as long as we live. A wait for any child
 * would take the exits of workers away from libuv; so the one that ended is looked at first, and
 * left alone if it is ours. Then others wait for the next look: libuv will not be long.
 */
#include "coordinator/reap.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

bool reap_is_owed(void) {
    int subreaper = 0;
    return getpid() == 1 || (prctl(PR_GET_CHILD_SUBREAPER, &subreaper) == 0 && subreaper);
}

int reap_strangers(const int64_t *ours, int n) {
    int reaped = 0;
    for (;;) {
        siginfo_t who = {0};
        if (waitid(P_ALL, 0, &who, WEXITED | WNOHANG | WNOWAIT) < 0 || who.si_pid == 0)
            return reaped;
        for (int i = 0; i < n; i++)
            if (ours[i] == who.si_pid) return reaped;
        if (waitpid(who.si_pid, NULL, WNOHANG) == who.si_pid) reaped++;
    }
}
