/* proto/base.h: the handful of words every file uses.
 *
 * Owns: nothing.  Called by: proto, worker, coordinator (kernels include nothing of ours).
 *
 * Three kinds of error, three endings: a bug is an assert (kept in every build); a fault of the
 * world is a negative code of the table below, logged once where it is found; a wrong set-up is
 * one sentence in a struct err_text saying what, expected, found, and then exit EXIT_SETUP.
 */
#ifndef OCTAVO_PROTO_BASE_H
#define OCTAVO_PROTO_BASE_H

#include <assert.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/param.h> /* MIN, MAX */

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define UNUSED(x)    ((void)(x))
#define PRINTF_LIKE(fmt, first) __attribute__((format(printf, fmt, first)))

/* Return codes: 0 is success, a negative value is one of these. */
enum err {
    OK = 0,
    ERR_SYS = -1,       /* a system call failed, errno says why */
    ERR_AGAIN = -2,     /* nothing there now, not an error */
    ERR_CLOSED = -3,    /* the other side is gone */
    ERR_FORMAT = -4,    /* bytes that do not parse */
    ERR_LIMIT = -5,     /* larger than a limit of limits.h */
    ERR_NOT_FOUND = -6, /* no such thing */
    ERR_ABORTED = -7,   /* the communicator generation was aborted */
    ERR_TIMEOUT = -8,   /* a bounded wait ran out */
    ERR_NOMEM = -9,     /* an allocation of stated size was refused */
    ERR_RANGE = -10,    /* a number outside its range */
    ERR_VERSION = -11,  /* the other side speaks another protocol, build or limits */
    ERR_SETUP = -12,    /* the set-up is wrong; restarting will not help */
    ERR_FULL = -13,     /* a bounded queue or pool is full */
    ERR_STATE = -14,    /* not now: loading, draining, stopping */
};

/* The process exit codes are a contract with whatever supervises us. */
enum exit_code {
    EXIT_ASKED = 0,  /* asked to stop */
    EXIT_FAILED = 1, /* failed, restart me */
    EXIT_SETUP = 2,  /* the set-up is wrong, restarting will not help */
    EXIT_DEVICE = 3, /* device memory not returned, or device lost */
};

/* Evaluates x; returns its value from the calling function if it is negative. */
#define TRY(x)                                                                                     \
    do {                                                                                           \
        int try_rc_ = (x);                                                                         \
        if (try_rc_ < 0) return try_rc_;                                                           \
    } while (0)

/* A sentence for the person outside: what, expected, found. Empty when nothing went wrong. */
struct err_text {
    char text[512];
};

/* Writes the sentence (truncating) and returns code, so that `return err_set(err, ERR_FORMAT, …)`
 * reads well. err may be NULL. */
static inline PRINTF_LIKE(3, 4) int err_set(struct err_text *err, int code, const char *fmt, ...) {
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(err->text, sizeof err->text, fmt, ap);
        va_end(ap);
    }
    return code;
}

static inline const char *err_name(int code) {
    static const char *const names[] = {"ok",      "sys",     "again",   "closed",  "format",
                                        "limit",   "missing", "aborted", "timeout", "nomem",
                                        "range",   "version", "setup",   "full",    "state"};
    return code <= 0 && -code < (int)ARRAY_LEN(names) ? names[-code] : "unknown";
}

#endif
