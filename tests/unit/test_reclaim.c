/* tests/unit/test_reclaim.c: the reclaim gate against devices and processes of the test's making:
 * every verdict, and what must not be mistaken for another. One megabyte is M here.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/child.h"
#include "coordinator/proc.h"
#include "coordinator/reclaim.h"

#define M      (1ull << 20)
#define SECOND 1000000ull
#define BOUND  (60 * SECOND)

/* ---- a host and its devices ------------------------------------------------------------------ */

struct process {
    int64_t pid;
    uint64_t start;
    bool ours, abandoned, immortal;
};

static struct {
    struct device_sample device[2];
    int n_devices, n_looks;
    struct process process[16];
    int n_processes;
    int64_t killed[8];
    int n_killed;
} world;

static int count(void *ctx) {
    UNUSED(ctx);
    return world.n_devices;
}

static void look(void *ctx, int device, uint64_t now_us, struct device_sample *out) {
    UNUSED(ctx), UNUSED(now_us);
    world.n_looks++;
    *out = world.device[device];
}

static void describe(void *ctx, int device, char *out, size_t n) {
    UNUSED(ctx);
    snprintf(out, n, "GPU-%d", device);
}

static void close_nothing(void *ctx) {
    UNUSED(ctx);
}

static const struct device_memory_ops ops = {"test", count, look, describe, close_nothing};
static const struct device_memory memory = {&ops, NULL};

static struct process *process_of(int64_t pid) {
    for (int i = 0; i < world.n_processes; i++)
        if (world.process[i].pid == pid) return &world.process[i];
    return NULL;
}

static uint64_t host_start(void *ctx, int64_t pid) {
    UNUSED(ctx);
    return process_of(pid) ? process_of(pid)->start : 0;
}

static bool host_ours(void *ctx, int64_t pid) {
    UNUSED(ctx);
    return process_of(pid) && process_of(pid)->ours;
}

static bool host_abandoned(void *ctx, int64_t pid) {
    UNUSED(ctx);
    return process_of(pid) && process_of(pid)->abandoned;
}

static void unlist(int device, int64_t pid);
static void end_process(int64_t pid) {
    struct process *p = process_of(pid);
    if (p) *p = world.process[--world.n_processes];
}

static int host_kill(void *ctx, int64_t pid, uint64_t start) {
    UNUSED(ctx);
    struct process *p = process_of(pid);
    if (!p || p->start != start) return ERR_NOT_FOUND;
    if (world.n_killed < 8) world.killed[world.n_killed++] = pid;
    if (!p->immortal) end_process(pid);
    return OK;
}

static void host_name(void *ctx, int64_t pid, char *out, size_t n) {
    UNUSED(ctx);
    snprintf(out, n, process_of(pid) ? "thief" : "not visible here");
}

static const struct reclaim_host host = {host_start, host_ours, host_abandoned, host_kill, host_name,
                                         NULL};

static struct process *begin_process(int64_t pid, uint64_t start) {
    struct process *p = &world.process[world.n_processes++];
    *p = (struct process){.pid = pid, .start = start};
    return p;
}

static void list(int device, int64_t pid, uint64_t bytes) {
    device_sample_add(&world.device[device], pid, bytes);
    world.device[device].used_bytes += bytes;
}

static void unlist(int device, int64_t pid) { /* off the list; its memory is not back yet */
    struct device_sample *s = &world.device[device];
    for (int i = 0; i < s->n_holders; i++)
        if (s->holders[i].pid == pid) s->holders[i--] = s->holders[--s->n_holders];
}

static void give_back(int device, uint64_t bytes) {
    world.device[device].used_bytes -= bytes;
}

/* ---- the gate under test --------------------------------------------------------------------- */

static struct reclaim gate;
static const struct reclaim_rank rank0 = {0, 100, 7, 0, 9000 * M}, rank1 = {1, 101, 8, 0, 5000 * M},
                                 other = {1, 101, 8, 1, 5000 * M};

static int reset(void **state) {
    UNUSED(state);
    memset(&world, 0, sizeof world);
    world.n_devices = 2;
    for (int d = 0; d < 2; d++)
        world.device[d] = (struct device_sample){.total_bytes = 80000 * M, .used_bytes = 600 * M};
    reclaim_init(&gate, &memory, &host, BOUND);
    return 0;
}

/* These ranks live, hold what they say, and have been looked at. */
static void live(const struct reclaim_rank *ranks, int n) {
    for (int i = 0; i < n; i++) {
        begin_process(ranks[i].pid, ranks[i].start_time)->ours = true;
        list(ranks[i].device, ranks[i].pid, ranks[i].said_bytes);
    }
    for (int d = 0; d < 2 * world.n_devices; d++) reclaim_watch(&gate, ranks, n, 0, 0);
}

static void expect(enum reclaim_verdict want, uint64_t at_us) {
    enum reclaim_verdict got = reclaim_poll(&gate, at_us);
    if (got != want)
        fail_msg("at %.1f s expected %s, found %s: %s", (double)at_us / 1e6,
                 reclaim_verdict_name(want), reclaim_verdict_name(got), reclaim_sentence(&gate));
}

static void expect_sentence(const char *want) {
    if (!strstr(reclaim_sentence(&gate), want))
        fail_msg("expected \"%s\", found \"%s\"", want, reclaim_sentence(&gate));
}

static void memory_that_is_back_returns_at_once(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    unlist(0, 100);
    give_back(0, 9000 * M);
    reclaim_begin(&gate, &rank0, 1, SECOND);
    expect(RECLAIM_RETURNED, SECOND);
    assert_true(reclaim_seconds(&gate) == 0);
}

static void memory_is_waited_for_and_the_seconds_are_counted(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    reclaim_begin(&gate, &rank0, 1, SECOND);
    expect(RECLAIM_WAITING, SECOND);
    expect_sentence("9000 MiB are still booked to process 100 (rank 0), which has ended");
    unlist(0, 100);
    expect(RECLAIM_WAITING, 3 * SECOND);
    expect_sentence("9000 MiB of the dead ranks' memory have not come back");
    give_back(0, 4000 * M);
    expect(RECLAIM_WAITING, 4 * SECOND);
    expect_sentence("5000 MiB");
    give_back(0, 5000 * M);
    expect(RECLAIM_RETURNED, 6 * SECOND);
    assert_true(reclaim_seconds(&gate) == 5);
    world.device[0].health = DEVICE_LOST;
    expect(RECLAIM_RETURNED, 7 * SECOND); /* a verdict stays */
}

static void memory_back_while_the_pid_is_listed_is_not_enough(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    give_back(0, 9000 * M);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_WAITING, SECOND);
    expect(RECLAIM_HELD_BY_NOBODY, BOUND);
}

static void devices_are_looked_at_no_more_often_than_agreed(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    reclaim_begin(&gate, &rank0, 1, 0);
    world.n_looks = 0;
    for (uint64_t t = 0; t < SECOND; t += 1000) reclaim_poll(&gate, t);
    assert_int_equal(world.n_looks, 10);
    world.n_looks = 0;
    reclaim_init(&gate, &memory, &host, BOUND);
    for (uint64_t t = 1; t < SECOND; t += 1000) reclaim_watch(&gate, &rank0, 1, SECOND / 4, t);
    assert_int_equal(world.n_looks, 4);
}

static void memory_held_by_nobody_is_a_wedge_of_the_driver(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    unlist(0, 100);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_WAITING, BOUND - 1);
    gate.due_us = 0;
    expect(RECLAIM_HELD_BY_NOBODY, BOUND);
    expect_sentence("no process holds them: the driver does, after 60.0 s");
}

static void a_rank_that_does_not_die_is_killed_and_named(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    process_of(100)->immortal = true;
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_WAITING, 0);
    assert_int_equal(world.killed[0], 100);
    expect(RECLAIM_HELD_BY_OURS, BOUND);
    expect_sentence("process 100, rank 0, which was killed and does not end");
}

static void an_orphan_of_ours_is_killed_and_then_the_memory_returns(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    unlist(0, 100);
    begin_process(555, 70)->ours = true; /* a child of the dead rank that still maps its memory */
    device_sample_add(&world.device[0], 555, 9000 * M);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_WAITING, 0);
    assert_int_equal(world.n_killed, 1);
    assert_int_equal(world.killed[0], 555);
    unlist(0, 555);
    give_back(0, 9000 * M);
    expect(RECLAIM_RETURNED, SECOND);
}

static void a_stranger_with_our_memory_is_named_and_left_alone(void **state) {
    UNUSED(state);
    begin_process(700, 3);
    list(0, 700, 1000 * M);
    live(&rank0, 1);
    end_process(100);
    unlist(0, 100);
    give_back(0, 9000 * M);
    unlist(0, 700);
    give_back(0, 1000 * M);
    list(0, 700, 7000 * M);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_WAITING, 0);
    expect(RECLAIM_HELD_BY_STRANGER, BOUND);
    expect_sentence("6000 MiB of the dead ranks' memory are missing; process 700 (thief), which is not "
                    "ours, holds 7340032000 bytes");
    assert_int_equal(world.n_killed, 0);
}

static void a_stranger_who_was_there_before_is_not_in_the_way(void **state) {
    UNUSED(state);
    begin_process(700, 3);
    list(0, 700, 30000 * M);
    live(&rank0, 1);
    end_process(100);
    unlist(0, 100);
    give_back(0, 9000 * M);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_RETURNED, 0);
}

static void a_lost_device_ends_the_waiting(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_WAITING, 0);
    device_sample_fail(&world.device[0], DEVICE_LOST, "GPU is lost, last Xid 79");
    expect(RECLAIM_LOST, SECOND);
    expect_sentence("device 0 (GPU-0) is lost: GPU is lost, last Xid 79");
}

static void a_device_that_cannot_be_read_is_asked_again(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    unlist(0, 100);
    give_back(0, 9000 * M);
    reclaim_begin(&gate, &rank0, 1, 0);
    device_sample_fail(&world.device[0], DEVICE_UNREADABLE, "Timeout");
    expect(RECLAIM_WAITING, 0);
    expect_sentence("device 0 cannot be read: Timeout");
    world.device[0].health = DEVICE_FINE;
    expect(RECLAIM_RETURNED, SECOND);
}

static void a_device_that_is_never_read_ends_as_held_by_nobody(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    reclaim_begin(&gate, &rank0, 1, 0);
    device_sample_fail(&world.device[0], DEVICE_UNREADABLE, "Timeout");
    expect(RECLAIM_HELD_BY_NOBODY, BOUND);
}

/* At a start too: who does not know what is held cannot say that nothing is. */
static void a_driver_that_is_silent_ends_as_held_by_nobody(void **state) {
    UNUSED(state);
    for (int starting = 0; starting <= 1; starting++) {
        if (starting) reclaim_begin_start(&gate, 1, 0);
        else {
            live(&rank0, 1);
            reclaim_begin(&gate, &rank0, 1, 0);
        }
        device_sample_fail(&world.device[0], DEVICE_SILENT, "the driver has not answered for 1.0 s");
        expect(RECLAIM_WAITING, SECOND);
        expect_sentence("device 0: the driver has not answered for 1.0 s");
        expect(RECLAIM_HELD_BY_NOBODY, BOUND);
    }
}

/* What was asked before a death says nothing of what came after it. */
static void an_answer_of_before_the_death_does_not_count(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    unlist(0, 100);
    give_back(0, 9000 * M);
    world.device[0].asked_us = 4 * SECOND;
    reclaim_begin(&gate, &rank0, 1, 5 * SECOND);
    expect(RECLAIM_WAITING, 5 * SECOND);
    world.device[0].asked_us = 5 * SECOND;
    expect(RECLAIM_RETURNED, 6 * SECOND);
}

static void the_pid_of_the_dead_given_to_another_is_not_the_dead(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    unlist(0, 100);
    give_back(0, 9000 * M);
    begin_process(100, 999); /* the same pid, started later, on the same device */
    list(0, 100, 10 * M);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_RETURNED, 0);
    assert_int_equal(world.n_killed, 0);
}

static void the_pid_of_the_dead_with_our_memory_is_a_stranger(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    begin_process(100, 999);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_HELD_BY_STRANGER, BOUND);
    expect_sentence("process 100 (thief)");
    assert_int_equal(world.n_killed, 0);
}

static void of_two_ranks_on_a_device_one_dies_and_the_other_stays(void **state) {
    UNUSED(state);
    const struct reclaim_rank both[] = {rank0, rank1};
    live(both, 2);
    end_process(101);
    reclaim_begin(&gate, &rank1, 1, 0);
    expect(RECLAIM_WAITING, 0);
    unlist(0, 101);
    expect(RECLAIM_WAITING, SECOND);
    give_back(0, 5000 * M);
    expect(RECLAIM_RETURNED, 2 * SECOND);
    assert_int_equal(world.n_killed, 0); /* rank 0 is ours and lives */
}

static void a_survivor_on_the_same_device_may_grow(void **state) {
    UNUSED(state);
    const struct reclaim_rank both[] = {rank0, rank1};
    live(both, 2);
    end_process(101);
    unlist(0, 101);
    give_back(0, 5000 * M);
    unlist(0, 100);
    give_back(0, 9000 * M);
    list(0, 100, 11000 * M);
    reclaim_begin(&gate, &rank1, 1, 0);
    expect(RECLAIM_RETURNED, 0);
}

static void two_ranks_on_a_device_die_together(void **state) {
    UNUSED(state);
    const struct reclaim_rank both[] = {rank0, rank1};
    live(both, 2);
    end_process(100);
    end_process(101);
    unlist(0, 100);
    unlist(0, 101);
    give_back(0, 9000 * M);
    reclaim_begin(&gate, both, 2, 0);
    expect(RECLAIM_WAITING, 0);
    give_back(0, 5000 * M);
    expect(RECLAIM_RETURNED, SECOND);
}

static void each_device_of_the_dead_must_give_back(void **state) {
    UNUSED(state);
    const struct reclaim_rank both[] = {rank0, other};
    live(both, 2);
    for (int i = 0; i < 2; i++) {
        end_process(both[i].pid);
        unlist(i, both[i].pid);
    }
    give_back(0, 9000 * M);
    reclaim_begin(&gate, both, 2, 0);
    expect(RECLAIM_WAITING, 0);
    expect_sentence("device 1: 5000 MiB");
    give_back(1, 5000 * M);
    expect(RECLAIM_RETURNED, SECOND);
}

static void what_was_taken_after_the_last_look_must_come_back_too(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    world.device[0].used_bytes += 20000 * M; /* it went on loading */
    end_process(100);
    unlist(0, 100);
    give_back(0, 9000 * M);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_WAITING, 0);
    give_back(0, 20000 * M);
    expect(RECLAIM_RETURNED, SECOND);
}

/* It has died and we have not heard of it; its memory is on the way back, or back. */
static void a_look_at_a_rank_that_is_dying_does_not_count(void **state) {
    UNUSED(state);
    const struct reclaim_rank both[] = {rank0, rank1};
    for (int listed = 0; listed < 2; listed++) {
        reset(NULL);
        live(both, 2);
        if (!listed) unlist(0, 101);
        give_back(0, 5000 * M);
        reclaim_watch(&gate, both, 2, 0, 0);
        end_process(101);
        unlist(0, 101);
        reclaim_watch(&gate, both, 1, 0, 0); /* the survivor's device goes on being looked at */
        reclaim_watch(&gate, both, 1, 0, 0);
        reclaim_begin(&gate, &rank1, 1, 0);
        expect(RECLAIM_RETURNED, 0);
        for (int i = 0; i < 2; i++) reclaim_watch(&gate, both, 1, 0, 0);
        end_process(100);
        unlist(0, 100);
        reclaim_begin(&gate, &rank0, 1, 0);
        expect(RECLAIM_WAITING, 0);
        give_back(0, 9000 * M);
        expect(RECLAIM_RETURNED, SECOND);
    }
}

static void accounts_need_not_fit_to_the_byte(void **state) {
    UNUSED(state);
    live(&rank0, 1);
    end_process(100);
    unlist(0, 100);
    give_back(0, 8900 * M);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_RETURNED, 0);
}

static void a_rank_that_died_before_any_look_is_waited_for_by_its_pid(void **state) {
    UNUSED(state);
    struct reclaim_rank early = rank0;
    early.device = -1;
    early.said_bytes = 0;
    list(1, 100, 400 * M);
    reclaim_begin(&gate, &early, 1, 0);
    expect(RECLAIM_WAITING, 0);
    unlist(1, 100);
    expect(RECLAIM_RETURNED, SECOND);
}

/* In a container: the driver lists 9100, 9101, … which do not exist here. */
static void live_hidden(const struct reclaim_rank *ranks, int n) {
    for (int i = 0; i < n; i++) {
        begin_process(ranks[i].pid, ranks[i].start_time)->ours = true;
        list(ranks[i].device, 9000 + ranks[i].pid, ranks[i].said_bytes + 500 * M);
    }
    for (int d = 0; d < 2 * world.n_devices; d++) reclaim_watch(&gate, ranks, n, 0, 0);
}

static void pids_of_the_host_are_matched_by_bytes(void **state) {
    UNUSED(state);
    const struct reclaim_rank both[] = {rank0, rank1};
    list(0, 8000, 30000 * M); /* somebody of another container */
    live_hidden(both, 2);
    assert_int_equal(gate.held[0].bytes, 9500 * M);
    assert_int_equal(gate.held[1].bytes, 5500 * M);
    end_process(101);
    reclaim_begin(&gate, &rank1, 1, 0);
    expect(RECLAIM_WAITING, 0);
    expect_sentence("3 processes that cannot be seen from here hold memory, expected 2");
    unlist(0, 9101);
    expect(RECLAIM_WAITING, SECOND);
    give_back(0, 5500 * M);
    expect(RECLAIM_RETURNED, 2 * SECOND);
}

static void a_pid_of_the_host_that_is_anothers_here_is_not_ours(void **state) {
    UNUSED(state);
    live_hidden(&rank0, 1);
    end_process(100);
    unlist(0, 9100);
    give_back(0, 9500 * M);
    list(0, 100, 10 * M); /* on the host, 100 is somebody else; here nobody has it */
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_RETURNED, 0);
    assert_int_equal(world.n_killed, 0);
}

static void without_a_list_of_processes_the_bytes_decide(void **state) {
    UNUSED(state);
    begin_process(100, 7);
    world.device[0].used_bytes += 9400 * M;
    for (int i = 0; i < 2; i++) reclaim_watch(&gate, &rank0, 1, 0, 0);
    end_process(100);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_WAITING, 0);
    give_back(0, 9400 * M);
    expect(RECLAIM_RETURNED, SECOND);
}

static void no_devices_return_at_once(void **state) {
    UNUSED(state);
    world.n_devices = 0;
    live(NULL, 0);
    reclaim_begin(&gate, &rank0, 1, 0);
    expect(RECLAIM_RETURNED, 0);
    reclaim_begin_start(&gate, 8, 0);
    expect(RECLAIM_RETURNED, 0);
    assert_int_equal(world.n_looks, 0);
}

static void at_start_strangers_are_named_and_do_not_hold_up(void **state) {
    UNUSED(state);
    begin_process(700, 3);
    list(0, 700, 1000 * M);
    reclaim_begin_start(&gate, 2, 0);
    expect(RECLAIM_RETURNED, 0);
    assert_int_equal(world.n_killed, 0);
}

static void at_start_abandoned_workers_are_killed_and_waited_for(void **state) {
    UNUSED(state);
    begin_process(700, 3)->abandoned = true;
    list(1, 700, 20000 * M);
    reclaim_begin_start(&gate, 2, 0);
    expect(RECLAIM_WAITING, 0);
    assert_int_equal(world.killed[0], 700);
    unlist(1, 700); /* 20000 MiB, a quarter of the device, are nobody's for a while */
    expect(RECLAIM_WAITING, SECOND / 2);
    give_back(1, 19000 * M);
    expect(RECLAIM_RETURNED, SECOND);
}

static void at_start_a_worker_that_does_not_end_keeps_us_from_starting(void **state) {
    UNUSED(state);
    struct process *p = begin_process(700, 3);
    p->abandoned = p->immortal = true;
    list(0, 700, 20000 * M);
    reclaim_begin_start(&gate, 1, 0);
    expect(RECLAIM_WAITING, 0);
    expect(RECLAIM_HELD_BY_OURS, BOUND);
}

static void at_start_memory_of_nobody_that_stays_does_not_hold_up_for_ever(void **state) {
    UNUSED(state);
    world.device[0].used_bytes = 40000 * M;
    reclaim_begin_start(&gate, 1, 10 * SECOND);
    expect(RECLAIM_WAITING, 10 * SECOND);
    give_back(0, 10000 * M);
    expect(RECLAIM_WAITING, 10 * SECOND + SECOND * 9 / 10);
    expect(RECLAIM_WAITING, 11 * SECOND + SECOND / 2); /* it fell less than a second ago */
    expect(RECLAIM_RETURNED, 13 * SECOND);
}

static void at_start_a_lost_device_is_said(void **state) {
    UNUSED(state);
    device_sample_fail(&world.device[1], DEVICE_LOST, "GPU is lost");
    reclaim_begin_start(&gate, 1, 0);
    expect(RECLAIM_RETURNED, 0); /* it is not one of those that we start on */
    reclaim_begin_start(&gate, 2, 0);
    expect(RECLAIM_LOST, 0);
}

/* ---- scripts --------------------------------------------------------------------------------- */

static char script_path[64];

static void write_script(const char *text) {
    snprintf(script_path, sizeof script_path, "/tmp/octavo-test-reclaim-%d", (int)getpid());
    FILE *f = fopen(script_path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void open_script(struct device_memory *m, const char *text) {
    char source[100];
    struct err_text err = {0};
    write_script(text);
    snprintf(source, sizeof source, "script:%s", script_path);
    if (device_memory_open(m, source, &err) < 0) fail_msg("%s", err.text);
}

static void a_script_tells_states_by_time(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct device_sample s;
    open_script(&m, "# a device that is lost in the end\ndevices 2\n"
                    "device 1 used 0 of 100\n"
                    "device 0 used 50 of 100 pid 7 20 pid 8 unknown\n"
                    "at 2.5\ndevice 0 used 10 of 100\n"
                    "at 4\ndevice 0 lost fell off the bus\n");
    assert_int_equal(device_memory_count(&m), 2);
    device_memory_look(&m, 0, 10 * SECOND, &s);
    assert_int_equal(s.used_bytes, 50);
    assert_int_equal(s.total_bytes, 100);
    assert_int_equal(s.n_holders, 2);
    assert_int_equal(s.holders[0].bytes, 20);
    assert_true(s.holders[1].bytes == DEVICE_BYTES_UNKNOWN);
    device_memory_look(&m, 0, 12 * SECOND + SECOND / 2, &s);
    assert_int_equal(s.used_bytes, 10);
    assert_int_equal(s.n_holders, 0);
    device_memory_look(&m, 0, 14 * SECOND, &s);
    assert_int_equal(s.health, DEVICE_LOST);
    assert_string_equal(s.error, "fell off the bus");
    device_memory_look(&m, 1, 14 * SECOND, &s);
    assert_int_equal(s.health, DEVICE_FINE);
    device_memory_close(&m);
    unlink(script_path);
}

static void a_script_that_changes_or_goes_is_read_as_it_is(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct device_sample s;
    open_script(&m, "devices 1\ndevice 0 used 50 of 100\n");
    write_script("devices 1\ndevice 0 used 60 of 100\n");
    device_memory_look(&m, 0, 1, &s);
    assert_int_equal(s.used_bytes, 60);
    write_script("devices 1\ndevice 0 used lots\n");
    device_memory_look(&m, 0, 1, &s);
    assert_int_equal(s.health, DEVICE_UNREADABLE);
    assert_non_null(strstr(s.error, ":2: expected a device's state"));
    unlink(script_path);
    device_memory_look(&m, 0, 1, &s);
    assert_int_equal(s.health, DEVICE_UNREADABLE);
    device_memory_close(&m);
}

static void a_source_that_is_none_is_refused(void **state) {
    UNUSED(state);
    struct device_memory m;
    struct err_text err = {0};
    assert_int_equal(device_memory_open(&m, "entrails", &err), ERR_SETUP);
    assert_int_equal(device_memory_open(&m, "script:/nowhere", &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "/nowhere"));
    assert_int_equal(device_memory_open(&m, "none", &err), OK);
    assert_int_equal(device_memory_count(&m), 0);
    device_memory_close(&m);
}

/* ---- real processes -------------------------------------------------------------------------- */

static bool proc_file_holds(pid_t pid, const char *file, const char *text) {
    char path[64], bytes[65536];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
    FILE *f = fopen(path, "r");
    if (!f) return false;
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    return memmem(bytes, n, text, strlen(text)) != NULL;
}

/* Dies with this process, so that a failed check leaves nobody behind who holds our output open. The
 * name is there before the arguments and the environment are: all three are waited for. */
static pid_t start_sleeper(const char *cookie, char *const argv[]) {
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        setenv("OCTAVO_COOKIE", cookie, 1);
        execv("/bin/sh", argv);
        _exit(127);
    }
    char name[64];
    do proc_name(pid, name, sizeof name); /* until it has become the shell */
    while ((strcmp(name, "sh") && strcmp(name, "dash") && strcmp(name, "bash")) ||
           !proc_file_holds(pid, "cmdline", "read x") ||
           !proc_file_holds(pid, "environ", "OCTAVO_COOKIE="));
    return pid;
}

static void a_process_is_known_by_its_cookie_and_killed_only_by_its_start_time(void **state) {
    UNUSED(state);
    char *argv[] = {"sh", "-c", "read x", NULL};
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    int old = dup(0);
    dup2(ends[0], 0);
    pid_t pid = start_sleeper("biscuit", argv);
    dup2(old, 0);
    uint64_t start = child_start_time(pid);
    assert_true(proc_has_cookie(pid, "biscuit"));
    assert_false(proc_has_cookie(pid, "bis"));
    assert_false(proc_is_abandoned(pid));
    assert_int_equal(proc_kill(pid, start + 1), ERR_NOT_FOUND);
    assert_int_equal(waitpid(pid, &status, WNOHANG), 0);
    assert_int_equal(proc_kill(pid, start), OK);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(WTERMSIG(status), SIGKILL);
    assert_int_equal(proc_kill(pid, start), ERR_NOT_FOUND);
    assert_false(proc_has_cookie(pid, "biscuit"));
    close(old), close(ends[0]), close(ends[1]);
}

static void a_worker_is_abandoned_when_its_coordinator_is_another(void **state) {
    UNUSED(state);
    char mine[32], start[32];
    char *argv[] = {"/x/octavo-worker-cuda", "-c", "read x", "sh", "--parent-pid", mine,
                    "--parent-start", start, NULL};
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    int old = dup(0);
    dup2(ends[0], 0);
    for (int gone = 0; gone < 2; gone++) {
        snprintf(mine, sizeof mine, "%d", (int)getpid());
        snprintf(start, sizeof start, "%llu",
                 (unsigned long long)child_start_time(getpid()) + (unsigned)gone);
        pid_t pid = start_sleeper("c", argv);
        assert_int_equal(proc_is_abandoned(pid), gone);
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
    }
    dup2(old, 0);
    close(old), close(ends[0]), close(ends[1]);
}

int main(void) {
#define GATE(f) cmocka_unit_test_setup(f, reset)
    const struct CMUnitTest tests[] = {
        GATE(memory_that_is_back_returns_at_once),
        GATE(memory_is_waited_for_and_the_seconds_are_counted),
        GATE(memory_back_while_the_pid_is_listed_is_not_enough),
        GATE(devices_are_looked_at_no_more_often_than_agreed),
        GATE(memory_held_by_nobody_is_a_wedge_of_the_driver),
        GATE(a_rank_that_does_not_die_is_killed_and_named),
        GATE(an_orphan_of_ours_is_killed_and_then_the_memory_returns),
        GATE(a_stranger_with_our_memory_is_named_and_left_alone),
        GATE(a_stranger_who_was_there_before_is_not_in_the_way),
        GATE(a_lost_device_ends_the_waiting),
        GATE(a_device_that_cannot_be_read_is_asked_again),
        GATE(a_device_that_is_never_read_ends_as_held_by_nobody),
        GATE(a_driver_that_is_silent_ends_as_held_by_nobody),
        GATE(an_answer_of_before_the_death_does_not_count),
        GATE(the_pid_of_the_dead_given_to_another_is_not_the_dead),
        GATE(the_pid_of_the_dead_with_our_memory_is_a_stranger),
        GATE(of_two_ranks_on_a_device_one_dies_and_the_other_stays),
        GATE(a_survivor_on_the_same_device_may_grow),
        GATE(two_ranks_on_a_device_die_together),
        GATE(each_device_of_the_dead_must_give_back),
        GATE(what_was_taken_after_the_last_look_must_come_back_too),
        GATE(a_look_at_a_rank_that_is_dying_does_not_count),
        GATE(accounts_need_not_fit_to_the_byte),
        GATE(a_rank_that_died_before_any_look_is_waited_for_by_its_pid),
        GATE(pids_of_the_host_are_matched_by_bytes),
        GATE(a_pid_of_the_host_that_is_anothers_here_is_not_ours),
        GATE(without_a_list_of_processes_the_bytes_decide),
        GATE(no_devices_return_at_once),
        GATE(at_start_strangers_are_named_and_do_not_hold_up),
        GATE(at_start_abandoned_workers_are_killed_and_waited_for),
        GATE(at_start_a_worker_that_does_not_end_keeps_us_from_starting),
        GATE(at_start_memory_of_nobody_that_stays_does_not_hold_up_for_ever),
        GATE(at_start_a_lost_device_is_said),
        cmocka_unit_test(a_script_tells_states_by_time),
        cmocka_unit_test(a_script_that_changes_or_goes_is_read_as_it_is),
        cmocka_unit_test(a_source_that_is_none_is_refused),
        cmocka_unit_test(a_process_is_known_by_its_cookie_and_killed_only_by_its_start_time),
        cmocka_unit_test(a_worker_is_abandoned_when_its_coordinator_is_another),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
