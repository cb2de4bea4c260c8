/* proto/log.h: one line per event on stderr.
 *
 *   2026-12-01T15:04:05.123Z info worker/3 loaded bytes=5812345 seconds=0.21
 *
 * time, level, who, a fixed event word, then key=value pairs. Information level is life-cycle
 * only, never per token. The last lines are kept in memory for crash reports.
 *
 * Owns: the sink (stderr, or a file reopened on SIGHUP) and a ring of the last lines.
 * Called by: everyone but kernels; any thread.  Fails how: never; a line that cannot be written
 * is counted.  Tested by: tests/unit/test_log.c
 */
#ifndef OCTAVO_PROTO_LOG_H
#define OCTAVO_PROTO_LOG_H

#include "proto/base.h"

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

/* Before any other thread logs. who: "coordinator", "worker/3"; copied. path NULL: stderr.
 * OK, ERR_SYS (the file cannot be opened, errno says why) or ERR_LIMIT (path too long). */
int log_init(const char *who, enum log_level level, const char *path);
void log_reopen(void); /* SIGHUP */
bool log_parse_level(const char *name, enum log_level *out);

/* fmt holds the key=value pairs, "" for none; a value with spaces is written as '"%s"'. Control
 * bytes come out as '?', a line too long is cut and ends in cut=1. errno is kept. */
void log_event(enum log_level level, const char *event, const char *fmt, ...) PRINTF_LIKE(3, 4);

#define log_debug(event, ...) log_event(LOG_DEBUG, event, __VA_ARGS__)
#define log_info(event, ...)  log_event(LOG_INFO, event, __VA_ARGS__)
#define log_warn(event, ...)  log_event(LOG_WARN, event, __VA_ARGS__)
#define log_error(event, ...) log_event(LOG_ERROR, event, __VA_ARGS__)

uint64_t log_lost(void);      /* lines that could not be written whole */
const char *log_build(void);  /* "0.1.0-89abcdef0123": version and commit, one for all programs */

/* Writes the last lines to fd; async-signal-safe. Used by the crash report. */
void log_dump_recent(int fd);

/* Installs handlers for SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT that print build, role and the
 * last log lines, then die of the same signal. After log_init. */
void log_install_crash_report(void);

#endif
