/* coordinator/reclaim.c: the gate between a death and the next start. See reclaim.h.
 *
 * Owns: nothing beyond struct reclaim.  Called by: fleet_gate.c, cmd_guard.c.
 * Fails how: see reclaim.h.  Limits: see reclaim.h.  Tested by: tests/unit/test_reclaim.c
 *
 * A process that has exited has not yet given its device memory back: the driver does so afterwards,
 * in seconds, and a successor that starts before finds no room and dies of it. Two signs together
 * say that it is over: the pid is off the device's list, and the memory in use has fallen to what it
 * was without the dead. Utilisation says nothing: it can stay stuck for minutes after a process was
 * killed inside a kernel.
 *
 * How far it has to fall comes from one look while the rank lived: memory in use on the device less
 * what the rank held in the same look, however old that is; what it took after the look goes with
 * it. A look counts only once a later one has found the same ranks there: the driver takes memory
 * back before we hear of a death, and a look in between would find a rank that holds what is no
 * longer in use. Ranks that live on on the same device may have grown since, which is allowed for. Strangers
 * are not: what they took is missing for the successor.
 *
 * In a container the driver may list pids of the host, which do not exist here or belong to others
 * here. An entry counts as a rank's own only if the start time fits too; ranks that are not found so
 * are counted instead (as many entries that are nobody's must go as ranks died) and what they held
 * is taken from the entry nearest to what they said themselves.
 *
 * Memory accounts are not exact to the byte: see slack().
 */
#include "coordinator/reclaim.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/child.h"
#include "coordinator/proc.h"
#include "proto/log.h"

#define MIB        ((uint64_t)1 << 20)
#define POLL_US    100000ull
#define CALM_US    1000000ull /* at start: memory is no longer being returned */

const char *reclaim_verdict_name(enum reclaim_verdict v) {
    static const char *const names[] = {"waiting",          "returned",       "held_by_ours",
                                        "held_by_stranger", "held_by_nobody", "device_lost"};
    return names[v];
}

/* ---- this host ------------------------------------------------------------------------------- */

static uint64_t here_start_time(void *ctx, int64_t pid) {
    UNUSED(ctx);
    return child_start_time(pid);
}

static bool here_is_ours(void *ctx, int64_t pid) {
    return proc_has_cookie(pid, ctx);
}

static bool here_is_abandoned(void *ctx, int64_t pid) {
    UNUSED(ctx);
    return proc_is_abandoned(pid);
}

static int here_kill(void *ctx, int64_t pid, uint64_t start_time) {
    UNUSED(ctx);
    return proc_kill(pid, start_time);
}

static void here_name(void *ctx, int64_t pid, char *out, size_t n) {
    UNUSED(ctx);
    proc_name(pid, out, n);
}

struct reclaim_host reclaim_host_here(const char *cookie) {
    return (struct reclaim_host){here_start_time, here_is_ours, here_is_abandoned, here_kill, here_name,
                                 (void *)(uintptr_t)cookie};
}

/* ---- while they live ------------------------------------------------------------------------- */

void reclaim_init(struct reclaim *r, const struct device_memory *memory,
                  const struct reclaim_host *host, uint64_t bound_us) {
    *r = (struct reclaim){.memory = memory, .host = *host, .bound_us = bound_us, .poll_us = POLL_US,
                          .verdict = RECLAIM_RETURNED};
}

static uint64_t known_bytes(uint64_t bytes) {
    return bytes == DEVICE_BYTES_UNKNOWN ? 0 : bytes;
}

static const struct device_holder *holder_of(const struct device_sample *s, int64_t pid) {
    for (int i = 0; i < s->n_holders; i++)
        if (s->holders[i].pid == pid) return &s->holders[i];
    return NULL;
}

/* The pid is listed and is that process, alive or on its way out; not a later one of the same pid. */
static const struct device_holder *listing(const struct reclaim *r, const struct device_sample *s,
                                           const struct reclaim_rank *k) {
    const struct device_holder *h = holder_of(s, k->pid);
    uint64_t start = h ? r->host.start_time(r->host.ctx, k->pid) : 0;
    return h && (start == 0 || start == k->start_time) ? h : NULL;
}

/* start_time 0: it has ended, or cannot be seen. A later process of the same pid is somebody else. */
static bool is_dead_rank(const struct reclaim *r, int64_t pid, uint64_t start_time) {
    for (int i = 0; i < r->n_dead; i++)
        if (r->dead[i].rank.pid == pid &&
            (start_time == 0 || start_time == r->dead[i].rank.start_time))
            return true;
    return false;
}

/* Entries of processes that cannot be seen from here; of those that just died it is known who. */
static int count_hidden(const struct reclaim *r, const struct device_sample *s) {
    int n = s->n_unlisted;
    for (int i = 0; i < s->n_holders; i++)
        n += r->host.start_time(r->host.ctx, s->holders[i].pid) == 0 &&
             !is_dead_rank(r, s->holders[i].pid, 0);
    return n;
}

/* Of the entries of processes that cannot be seen from here, the one nearest to what k says. */
static const struct device_holder *nearest_hidden(const struct reclaim *r,
                                                  const struct device_sample *s, uint64_t taken,
                                                  const struct reclaim_rank *k) {
    const struct device_holder *best = NULL;
    uint64_t best_gap = UINT64_MAX;
    for (int i = 0; i < s->n_holders; i++) {
        const struct device_holder *h = &s->holders[i];
        if (taken & 1ull << i || h->bytes == DEVICE_BYTES_UNKNOWN) continue;
        if (r->host.start_time(r->host.ctx, h->pid)) continue;
        uint64_t gap = h->bytes > k->said_bytes ? h->bytes - k->said_bytes : k->said_bytes - h->bytes;
        if (gap < best_gap) {
            best_gap = gap;
            best = h;
        }
    }
    return best;
}

static bool is_among(const struct reclaim_rank *ranks, int n, const struct reclaim_rank *k) {
    for (int i = 0; i < n; i++)
        if (ranks[i].pid == k->pid && ranks[i].start_time == k->start_time) return true;
    return false;
}

/* Every rank that was noted there lives, and has not left the list since. */
static bool are_all_there(const struct reclaim *r, const struct reclaim_held *noted, int device,
                          const struct device_sample *s, const struct reclaim_rank *ranks, int n) {
    for (int i = 0; i < LIMIT_RANKS; i++) {
        const struct reclaim_held *w = &noted[i];
        if (!w->known || w->rank.device != device) continue;
        if (!is_among(ranks, n, &w->rank) || (w->listed && !listing(r, s, &w->rank))) return false;
    }
    return true;
}

/* The look before this one found nobody dying, as this one proves: it counts from now on. */
static void confirm(struct reclaim *r, int device) {
    r->seen[device] = r->fresh[device];
    r->seen_hidden[device] = r->fresh_hidden[device];
    for (int i = 0; i < LIMIT_RANKS; i++) {
        const struct reclaim_held *w = &r->fresh_held[i];
        if (!w->known || w->rank.device != device) continue;
        if (!r->held[i].known || r->held[i].bytes != w->bytes)
            log_debug("held", "rank=%d pid=%" PRId64 " device=%d bytes=%" PRIu64 " listed=%d", i,
                      w->rank.pid, device, w->bytes, w->listed);
        r->held[i] = *w;
    }
}

static void note_device(struct reclaim *r, int device, const struct reclaim_rank *ranks, int n,
                        uint64_t now_us) {
    struct device_sample s;
    uint64_t taken = 0;
    device_memory_look(r->memory, device, now_us, &s);
    if (s.health != DEVICE_FINE || !are_all_there(r, r->held, device, &s, ranks, n) ||
        !are_all_there(r, r->fresh_held, device, &s, ranks, n))
        return; /* the last good look stays */
    if (r->fresh[device].total_bytes) confirm(r, device);
    r->n_dead = 0; /* of the time before */
    r->fresh[device] = s;
    r->fresh_hidden[device] = count_hidden(r, &s);
    for (int i = 0; i < n; i++) {
        if (ranks[i].device != device) continue;
        struct reclaim_held *w = &r->fresh_held[ranks[i].rank];
        const struct device_holder *h = listing(r, &s, &ranks[i]);
        *w = (struct reclaim_held){.known = true, .rank = ranks[i], .listed = h != NULL};
        if (!h && ranks[i].said_bytes) h = nearest_hidden(r, &s, taken, &ranks[i]);
        if (h) taken |= 1ull << (h - s.holders);
        w->bytes = h && h->bytes != DEVICE_BYTES_UNKNOWN ? h->bytes : ranks[i].said_bytes;
    }
}

void reclaim_watch(struct reclaim *r, const struct reclaim_rank *ranks, int n, uint64_t every_us,
                   uint64_t now_us) {
    int count = device_memory_count(r->memory);
    if (count == 0 || now_us < r->watch_due_us || r->verdict == RECLAIM_WAITING) return;
    r->watch_due_us = now_us + every_us;
    for (int tries = 0; tries < count; tries++) {
        int device = r->next_device++ % count;
        for (int i = 0; i < n; i++)
            if (ranks[i].device == device) {
                note_device(r, device, ranks, n, now_us);
                return;
            }
    }
}

/* ---- the gate opens -------------------------------------------------------------------------- */

static void begin(struct reclaim *r, uint64_t now_us) {
    memset(r->on_device, 0, sizeof r->on_device);
    memset(r->told, 0, sizeof r->told);
    memset(r->fell_us, 0, sizeof r->fell_us);
    memset(r->least_used, 0xff, sizeof r->least_used);
    r->n_dead = 0;
    r->begun_us = r->due_us = now_us;
    r->verdict = RECLAIM_WAITING;
    r->seconds = 0;
    r->sentence[0] = 0;
    r->killed_pid = 0;
}

void reclaim_begin(struct reclaim *r, const struct reclaim_rank *dead, int n, uint64_t now_us) {
    int count = device_memory_count(r->memory);
    assert(n <= LIMIT_RANKS);
    begin(r, now_us);
    r->starting = false;
    for (int i = 0; i < n; i++) {
        struct reclaim_held *w = &r->held[dead[i].rank], *d = &r->dead[r->n_dead++];
        bool same = w->known && w->rank.pid == dead[i].pid &&
                    w->rank.start_time == dead[i].start_time;
        *d = same ? *w : (struct reclaim_held){.rank = dead[i]};
        *w = r->fresh_held[dead[i].rank] = (struct reclaim_held){0};
        for (int k = 0; k < count; k++) { /* on a device unknown: perhaps on any */
            r->on_device[k] |= d->rank.device < 0 || d->rank.device == k;
            if (r->on_device[k]) r->fresh[k].total_bytes = 0;
        }
    }
}

void reclaim_begin_start(struct reclaim *r, int n_devices, uint64_t now_us) {
    begin(r, now_us);
    r->starting = true;
    for (int d = 0; d < MIN(n_devices, device_memory_count(r->memory)); d++) r->on_device[d] = true;
}

void reclaim_look_at(struct reclaim *r, const bool on[DEVICE_MAX]) {
    for (int d = 0; d < DEVICE_MAX; d++)
        r->on_device[d] = on[d] && d < device_memory_count(r->memory);
}

/* ---- judging --------------------------------------------------------------------------------- */

/* What keeps the gate shut, the worst found so far. */
struct blame {
    enum reclaim_verdict verdict; /* RETURNED: nothing */
    bool silent;                  /* a device has not answered, so nothing is known of it */
    char sentence[256];
};

static void blame(struct blame *b, enum reclaim_verdict verdict, const char *fmt, ...)
    PRINTF_LIKE(3, 4);
static void blame(struct blame *b, enum reclaim_verdict verdict, const char *fmt, ...) {
    static const int weight[] = {0, 0, 3, 2, 1, 4}; /* by verdict */
    if (weight[verdict] <= weight[b->verdict]) return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(b->sentence, sizeof b->sentence, fmt, ap);
    va_end(ap);
    b->verdict = verdict;
}

/* How inexact a sum of accounts is: contexts of the driver, rounding to its pages. */
static uint64_t slack(uint64_t held) {
    return MIN(held / 2, 64 * MIB + held / 64);
}

/* SIGKILL, said once for each process. */
static void kill_holder(struct reclaim *r, int device, const struct device_holder *h,
                        uint64_t start_time) {
    int rc = r->host.kill(r->host.ctx, h->pid, start_time);
    if (r->killed_pid == h->pid && r->killed_start == start_time) return;
    r->killed_pid = h->pid;
    r->killed_start = start_time;
    log_warn("orphan_killed", "device=%d pid=%" PRId64 " start_time=%" PRIu64 " bytes=%" PRIu64
             " result=%s", device, h->pid, start_time, known_bytes(h->bytes), err_name(rc));
}

static bool is_alive_rank(const struct reclaim *r, int64_t pid, uint64_t start_time) {
    for (int i = 0; i < LIMIT_RANKS; i++)
        if (r->held[i].known && r->held[i].rank.pid == pid &&
            r->held[i].rank.start_time == start_time)
            return true;
    return false;
}

/* A process of ours that should not be there is killed; it must then leave the list. */
static void judge_orphan(struct reclaim *r, int device, const struct device_holder *h,
                         struct blame *b) {
    uint64_t start = r->host.start_time(r->host.ctx, h->pid);
    if (start == 0 || is_alive_rank(r, h->pid, start) || is_dead_rank(r, h->pid, start)) return;
    if (!r->host.is_abandoned(r->host.ctx, h->pid) &&
        (r->starting || !r->host.is_ours(r->host.ctx, h->pid)))
        return;
    kill_holder(r, device, h, start);
    blame(b, RECLAIM_HELD_BY_OURS,
          "device %d: %" PRIu64 " MiB are held by process %" PRId64
          ", a worker of ours that was killed and does not end",
          device, known_bytes(h->bytes) / MIB, h->pid);
}

static void judge_dead(struct reclaim *r, int device, const struct device_sample *s,
                       const struct reclaim_held *d, struct blame *b) {
    bool hidden = d->known && !d->listed && d->bytes > 0; /* then its pid here means nothing there */
    const struct device_holder *h = hidden ? NULL : listing(r, s, &d->rank);
    if (!h) return;
    if (r->host.start_time(r->host.ctx, h->pid)) {
        kill_holder(r, device, h, d->rank.start_time);
        blame(b, RECLAIM_HELD_BY_OURS,
              "device %d: %" PRIu64 " MiB are held by process %" PRId64
              ", rank %d, which was killed and does not end",
              device, known_bytes(h->bytes) / MIB, h->pid, d->rank.rank);
    } else
        blame(b, RECLAIM_HELD_BY_NOBODY,
              "device %d: %" PRIu64 " MiB are still booked to process %" PRId64
              " (rank %d), which has ended: the driver holds them",
              device, known_bytes(h->bytes) / MIB, h->pid, d->rank.rank);
}

/* How many entries that are nobody's the device may still have: the dead ones' must be gone. */
static void judge_hidden(const struct reclaim *r, int device, const struct device_sample *s,
                         int n_hidden_dead, struct blame *b) {
    int before = r->seen_hidden[device], now = count_hidden(r, s);
    if (n_hidden_dead == 0 || before < n_hidden_dead) return;
    if (now > before - n_hidden_dead)
        blame(b, RECLAIM_HELD_BY_NOBODY,
              "device %d: %d processes that cannot be seen from here hold memory, expected %d: those "
              "of the dead ranks are still there",
              device, now, before - n_hidden_dead);
}

static uint64_t grown(const struct reclaim *r, const struct device_sample *before,
                      const struct device_holder *h) {
    bool reused = is_dead_rank(r, h->pid, 0);
    const struct device_holder *was = reused ? NULL : holder_of(before, h->pid);
    uint64_t old = was ? known_bytes(was->bytes) : 0, now = known_bytes(h->bytes);
    return now > old ? now - old : 0;
}

/* Memory in use must have fallen to what it was without the dead, ranks that live on apart. */
static void judge_bytes(const struct reclaim *r, int device, const struct device_sample *s,
                        uint64_t held, struct blame *b) {
    const struct device_sample *before = &r->seen[device];
    const struct device_holder *thief = NULL;
    uint64_t allowed = before->used_bytes > held ? before->used_bytes - held : 0, most = 0;
    char name[64];
    if (before->total_bytes == 0 || held == 0) return;
    for (int i = 0; i < s->n_holders; i++) {
        const struct device_holder *h = &s->holders[i];
        uint64_t more = grown(r, before, h), start = r->host.start_time(r->host.ctx, h->pid);
        if (start && is_alive_rank(r, h->pid, start)) allowed += more;
        else if (more > most && !is_dead_rank(r, h->pid, start)) {
            most = more;
            thief = h;
        }
    }
    if (s->used_bytes <= allowed + slack(held)) return;
    uint64_t missing = (s->used_bytes - allowed) / MIB;
    if (!thief) {
        blame(b, RECLAIM_HELD_BY_NOBODY,
              "device %d: %" PRIu64 " MiB of the dead ranks' memory have not come back and no process "
              "holds them: the driver does",
              device, missing);
        return;
    }
    r->host.name(r->host.ctx, thief->pid, name, sizeof name);
    blame(b, RECLAIM_HELD_BY_STRANGER,
          "device %d: %" PRIu64 " MiB of the dead ranks' memory are missing; process %" PRId64
          " (%s), which is not ours, holds %" PRIu64 " bytes",
          device, missing, thief->pid, name, known_bytes(thief->bytes));
}

static void judge_after_death(struct reclaim *r, int device, const struct device_sample *s,
                              struct blame *b) {
    uint64_t held = 0;
    int hidden = 0;
    for (int i = 0; i < s->n_holders; i++) judge_orphan(r, device, &s->holders[i], b);
    for (int i = 0; i < r->n_dead; i++) {
        const struct reclaim_held *d = &r->dead[i];
        judge_dead(r, device, s, d, b);
        if (!d->known || d->rank.device != device) continue;
        held += d->bytes;
        hidden += !d->listed && d->bytes > 0;
    }
    judge_hidden(r, device, s, hidden, b);
    judge_bytes(r, device, s, held, b);
}

static void name_strangers(struct reclaim *r, int device, const struct device_sample *s) {
    char name[64];
    if (r->told[device]) return;
    r->told[device] = true;
    for (int i = 0; i < s->n_holders; i++) {
        int64_t pid = s->holders[i].pid;
        if (r->host.start_time(r->host.ctx, pid) && r->host.is_abandoned(r->host.ctx, pid)) continue;
        r->host.name(r->host.ctx, pid, name, sizeof name);
        log_warn("foreign_process", "device=%d pid=%" PRId64 " name=\"%s\" bytes=%" PRIu64
                 " free_bytes=%" PRIu64, device, pid, name, known_bytes(s->holders[i].bytes),
                 s->total_bytes - MIN(s->used_bytes, s->total_bytes));
    }
}

/* The last worker of a service that just ended may be off the list before its memory is back:
 * while memory that nobody is booked for falls, more may come. */
static void judge_at_start(struct reclaim *r, int device, const struct device_sample *s,
                           uint64_t now_us, struct blame *b) {
    uint64_t booked = 0;
    name_strangers(r, device, s);
    for (int i = 0; i < s->n_holders; i++) {
        booked += known_bytes(s->holders[i].bytes);
        judge_orphan(r, device, &s->holders[i], b);
    }
    if (s->used_bytes < r->least_used[device]) {
        r->least_used[device] = s->used_bytes;
        r->fell_us[device] = now_us;
    }
    bool unexplained = s->used_bytes > booked && s->used_bytes - booked > s->total_bytes / 16;
    if (unexplained && now_us - r->fell_us[device] < CALM_US)
        blame(b, RECLAIM_HELD_BY_NOBODY, "device %d: %" PRIu64 " MiB in use that no process holds",
              device, (s->used_bytes - booked) / MIB);
}

static void judge_device(struct reclaim *r, int device, uint64_t now_us, struct blame *b) {
    struct device_sample s;
    char text[200];
    device_memory_look(r->memory, device, now_us, &s);
    if (s.health == DEVICE_FINE && s.asked_us < r->begun_us) /* of before the death */
        device_sample_fail(&s, DEVICE_SILENT, "the driver has not answered yet");
    if (s.health == DEVICE_LOST) {
        device_memory_describe(r->memory, device, text, sizeof text);
        blame(b, RECLAIM_LOST, "device %d (%.120s) is lost: %.100s", device, text, s.error);
    } else if (s.health == DEVICE_SILENT) {
        blame(b, RECLAIM_HELD_BY_NOBODY, "device %d: %.160s", device, s.error);
        b->silent = true;
    } else if (s.health != DEVICE_FINE)
        blame(b, RECLAIM_HELD_BY_NOBODY, "device %d cannot be read: %.160s", device, s.error);
    else if (r->starting) judge_at_start(r, device, &s, now_us, b);
    else judge_after_death(r, device, &s, b);
}

/* ---- the verdict ----------------------------------------------------------------------------- */

static void decide(struct reclaim *r, const struct blame *b, uint64_t now_us) {
    r->verdict = b->verdict;
    r->seconds = (double)(now_us - r->begun_us) / 1e6;
    if (b->verdict == RECLAIM_RETURNED)
        snprintf(r->sentence, sizeof r->sentence, "device memory returned in %.2f s", r->seconds);
    else if (b->verdict == RECLAIM_LOST)
        snprintf(r->sentence, sizeof r->sentence, "%.255s", b->sentence);
    else
        snprintf(r->sentence, sizeof r->sentence, "%.230s, after %.1f s", b->sentence, r->seconds);
    if (device_memory_count(r->memory) == 0) return; /* nothing was waited for */
    log_event(b->verdict == RECLAIM_RETURNED ? LOG_INFO : LOG_ERROR, "reclaimed",
              "verdict=%s seconds=%.3f ranks=%d start=%d why=\"%s\"",
              reclaim_verdict_name(r->verdict), r->seconds, r->n_dead, r->starting, r->sentence);
}

enum reclaim_verdict reclaim_poll(struct reclaim *r, uint64_t now_us) {
    struct blame b = {.verdict = RECLAIM_RETURNED};
    if (r->verdict != RECLAIM_WAITING || now_us < r->due_us) return r->verdict;
    for (int d = 0; d < DEVICE_MAX; d++)
        if (r->on_device[d]) judge_device(r, d, now_us, &b);
    bool late = now_us - r->begun_us >= r->bound_us;
    if (late && r->starting && b.verdict == RECLAIM_HELD_BY_NOBODY && !b.silent) {
        log_warn("reclaim_start", "why=\"%s\"", b.sentence); /* loading will tell whether it matters */
        b.verdict = RECLAIM_RETURNED;
    }
    if (b.verdict == RECLAIM_RETURNED || b.verdict == RECLAIM_LOST || late) decide(r, &b, now_us);
    else {
        snprintf(r->sentence, sizeof r->sentence, "%s", b.sentence);
        r->due_us = now_us + r->poll_us;
    }
    return r->verdict;
}

const char *reclaim_sentence(const struct reclaim *r) {
    return r->sentence;
}

double reclaim_seconds(const struct reclaim *r) {
    return r->seconds;
}

void reclaim_print(FILE *out, const struct reclaim *r) {
    fprintf(out, "reclaim source=%s verdict=%s dead=%d seconds=%.3f why=\"%s\"\n",
            r->memory->ops->name, reclaim_verdict_name(r->verdict), r->n_dead, r->seconds,
            r->sentence);
    for (int i = 0; i < LIMIT_RANKS; i++)
        if (r->held[i].known)
            fprintf(out, "  rank=%d pid=%" PRId64 " device=%d bytes=%" PRIu64 " listed=%d\n", i,
                    r->held[i].rank.pid, r->held[i].rank.device, r->held[i].bytes,
                    r->held[i].listed);
}
