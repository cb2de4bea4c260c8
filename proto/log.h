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

/* who: "coordinator", "worker/3"; copied. path NULL: stderr. */
int log_init(const char *who, enum log_level level, const char *path);
void log_reopen(void); /* SIGHUP */
bool log_parse_level(const char *name, enum log_level *out);

/* fmt holds the key=value pairs; a value with spaces is written with log_quote or '"%s"'. */
void log_event(enum log_level level, const char *event, const char *fmt, ...) PRINTF_LIKE(3, 4);

#define log_debug(event, ...) log_event(LOG_DEBUG, event, __VA_ARGS__)
#define log_info(event, ...)  log_event(LOG_INFO, event, __VA_ARGS__)
#define log_warn(event, ...)  log_event(LOG_WARN, event, __VA_ARGS__)
#define log_error(event, ...) log_event(LOG_ERROR, event, __VA_ARGS__)

/* Writes the last lines to fd; async-signal-safe. Used by the crash report. */
void log_dump_recent(int fd);

/* Installs handlers for SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT that print build, role and the
 * last log lines, then die of the same signal. */
void log_install_crash_report(void);

#endif
