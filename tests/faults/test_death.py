"""Processes killed at the worst moments: the service goes on, the answers are the undisturbed ones, nothing stays behind.

A disturbed stream owes exactly the text that the same request has alone: sampling is counted by
(seed, position), and a row's result does not depend on what shares its batch.
"""
import os
import random
import signal

import psutil
import pytest
from octavo import PHOTOSYNTHESIS, UNSURE, Stream, eventually, join_all, question, stream_all

READY = ("ready", "stepping")


def requests(n):
    """n requests with long answers, greedy and sampled."""
    sampled = lambda i: question(UNSURE, temperature=1.0, seed=i, max_tokens=100, extra_body=dict(ignore_eos=True))
    return [sampled(i) if i % 2 else question(PHOTOSYNTHESIS, thinking=i % 4 == 0) for i in range(n)]


def alone(server, rs):
    """What each request says undisturbed."""
    streams = [Stream(server, r) for r in rs]
    stream_all(streams)
    assert not any(s.error for s in streams), [s.error for s in streams]
    return [s.text for s in streams]


def pid_of(server, rank):
    return next(w["pid"] for w in server.workers() if w["rank"] == rank)


def recovered(server, old):
    """Polls until every worker is there again, ready, and none of the old pids is among them."""
    def found():
        rows = server.workers()
        return len(rows) == server.tp and all(w["state"] in READY for w in rows) and not old & {w["pid"] for w in rows}
    eventually(found, 60, f"all workers ready again, without {sorted(old)}", server)
    eventually(lambda: server.status("/health/ready") == 200, 10, "200 from /health/ready", server)


def kill_under_streams(server, rank, n, number=signal.SIGKILL):
    rs = requests(n)
    want = alone(server, rs)
    streams = [Stream(server, r) for r in rs]
    for s in streams:
        s.start()
    eventually(lambda: all(s.deltas >= 3 for s in streams), 60, "three pieces on every stream", server)
    pid = pid_of(server, rank)
    os.kill(pid, number)
    join_all(streams, 120)
    for s, text in zip(streams, want):
        assert s.error is None, f"{s.error!r}" + server.log_end()
        assert s.text == text, f"expected {text!r}, found {s.text!r}" + server.log_end()
    recovered(server, {pid})


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_a_rank_killed_while_idle_is_noticed_and_replaced(launch, rank):
    server = launch(tp=8).wait_ready()
    pid = pid_of(server, rank)
    os.kill(pid, signal.SIGKILL)
    recovered(server, {pid})
    assert sum(w["restarts"] for w in server.workers()) >= 1
    server.check_healthy()
    server.stop()


def test_health_tells_of_a_dead_rank_without_any_traffic(launch):
    server = launch(tp=2).wait_ready()
    os.kill(pid_of(server, 1), signal.SIGKILL)
    eventually(lambda: server.status("/health/ready") == 503, 10, "503 from /health/ready", server)
    assert server.status("/health/live") == 200
    eventually(lambda: server.status("/health/ready") == 200, 60, "200 from /health/ready", server)
    server.stop()


@pytest.mark.parametrize("rank", [0, 5])
def test_streams_go_on_when_a_rank_is_killed(launch, rank):
    server = launch(tp=8).wait_ready()
    kill_under_streams(server, rank, 8)
    server.check_healthy()
    server.stop()


@pytest.mark.smoke
def test_streams_go_on_when_one_of_two_ranks_is_killed(launch):
    server = launch(tp=2).wait_ready()
    kill_under_streams(server, 1, 3)
    server.stop()


def test_streams_go_on_when_all_ranks_are_killed(launch):
    server = launch(tp=4).wait_ready()
    rs = requests(4)
    want = alone(server, rs)
    streams = [Stream(server, r) for r in rs]
    for s in streams:
        s.start()
    eventually(lambda: all(s.deltas >= 3 for s in streams), 60, "three pieces on every stream", server)
    old = {w["pid"] for w in server.workers()}
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    join_all(streams)
    assert [(s.error, s.text) for s in streams] == [(None, t) for t in want], server.log_end()
    recovered(server, old)
    server.stop()


def test_a_stopped_rank_is_noticed_and_its_streams_go_on(launch):
    server = launch(tp=4).wait_ready()
    kill_under_streams(server, 2, 4, signal.SIGSTOP)
    server.check_healthy()
    server.stop()


def test_a_rank_stopped_while_idle_is_noticed(launch):
    server = launch(tp=4).wait_ready()
    pid = pid_of(server, 1)
    os.kill(pid, signal.SIGSTOP)
    recovered(server, {pid})
    server.check_healthy()
    server.stop()


def test_a_rank_killed_while_loading_is_replaced(launch):
    server = launch(tp=4)
    children = lambda: psutil.Process(server.pid).children()
    victim = eventually(lambda: len(children()) >= 3 and children()[2].pid, 30, "three workers spawned", server)
    os.kill(victim, signal.SIGKILL)
    server.wait_ready()
    assert victim not in {w["pid"] for w in server.workers()}
    server.check_healthy()
    server.stop()


def test_a_request_sent_while_a_rank_is_away_is_answered(launch):
    server = launch(tp=2).wait_ready()
    os.kill(pid_of(server, 0), signal.SIGKILL)
    server.check_healthy()
    server.stop()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_nothing_survives_the_coordinator(launch, busy):
    server = launch(tp=8).wait_ready()
    streams = [Stream(server, r) for r in requests(4)] if busy else []
    for s in streams:
        s.start()
    eventually(lambda: all(s.deltas >= 2 for s in streams), 60, "two pieces on every stream", server)
    server.signal(signal.SIGKILL)
    assert server.wait_end() == -signal.SIGKILL
    server.check_clean()
    join_all(streams, 30)
    again = launch(port=server.port, tp=8).wait_ready()
    assert again.port == server.port
    again.check_healthy()
    again.stop()


def test_nothing_survives_a_coordinator_killed_while_loading(launch):
    server = launch(tp=8)
    eventually(lambda: psutil.Process(server.pid).children(), 30, "a worker spawned", server)
    server.signal(signal.SIGKILL)
    server.wait_end()
    server.check_clean()


def test_deaths_leave_no_files_and_no_descriptors(launch):
    server = launch(tp=2).wait_ready()
    server.check_healthy()
    files = lambda: psutil.Process(server.pid).num_fds()
    before = files()
    for i in range(3):
        pid = pid_of(server, i % 2)
        os.kill(pid, signal.SIGKILL)
        recovered(server, {pid})
        server.check_healthy()
    assert files() <= before + 2, f"expected about {before} open files, found {files()}"
    server.stop()


@pytest.mark.soak
def test_kills_for_a_long_time(launch):
    """Random ranks at random moments, again and again; restarts are let to count down between them."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(10):
        server = launch(tp=8).wait_ready()
        for _ in range(3):
            kill_under_streams(server, rng.randrange(8), rng.randrange(1, 12))
        server.stop()
