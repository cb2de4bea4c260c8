"""Starting as the operator sees it: the shard cache, devices that are not there, ranks that freeze or stall while they load.

tests/faults/slow_read.c, preloaded into the workers, stops a rank when it has read so much.
"""
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from octavo import BUILD, PATIENCE, PHOTOSYNTHESIS, Stream, eventually, join_all, question

GPUS = Path("/proc/driver/nvidia/gpus")
no_gpu = pytest.mark.skipif(GPUS.exists() or Path("/dev/nvidia0").exists(), reason="this host has a GPU")


def refusal(*options):
    p = subprocess.run([BUILD / "octavo", "serve", "--port", "0", *options], capture_output=True, text=True,
                       timeout=60 * PATIENCE, stdin=subprocess.DEVNULL)
    assert p.returncode == 2, p.stderr
    return p.stderr


def sources(server):
    return re.findall(r"loaded .*source=(\w+)", server.log())


def test_a_second_start_takes_the_shards_and_answers_alike(launch, tmp_path):
    cache = tmp_path / "shards"
    for expected in ("file", "shard"):
        server = launch("--shard-cache", cache, tp=2).wait_ready()
        server.check_healthy()
        assert sources(server) == [expected] * 2
        server.stop()
        assert len(list(cache.iterdir())) == 2


def test_a_shard_with_one_wrong_byte_is_made_again(launch, tmp_path):
    cache = tmp_path / "shards"
    launch("--shard-cache", cache, tp=2).wait_ready().stop()
    victim = sorted(cache.iterdir())[0]
    with open(victim, "r+b") as f:
        f.seek(os.path.getsize(victim) // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))
    server = launch("--shard-cache", cache, tp=2).wait_ready()
    server.check_healthy()
    assert sorted(sources(server)) == ["file", "shard"]
    assert server.log().count("shard_refused") == 1
    server.stop()


def test_a_shard_cache_that_cannot_be_written_does_not_keep_the_service_down(launch):
    server = launch("--shard-cache", "/proc/none", tp=2).wait_ready()
    server.check_healthy()
    assert server.log().count("shard_not_written") == 2
    server.stop()


@no_gpu
def test_cuda_without_a_gpu_is_refused_and_cpu_is_the_default():
    assert "--device cuda: expected a GPU with its driver, found none" in refusal("--device", "cuda")
    assert "--devices: expected --device cuda with it, found cpu" in refusal("--devices", "0")


def load_total(launch, _known=[]):
    """Bytes that rank 1 of 2 reads."""
    if not _known:
        server = launch(tp=2).wait_ready()
        _known.append(server.workers()[1]["load_total"])
        server.stop()
    return _known[0]


def launch_stopping(launch, stops, *options, hang=""):
    """stops: what READ_STOP says."""
    return launch(*options, tp=2, env=dict(LD_PRELOAD=str(BUILD / "libslow-read.so"), READ_STOP=stops, READ_HANG=str(hang))).wait_port()


def is_stopped(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("percent,ranks", [(10, [1]), (50, [0, 1]), (95, [1])], ids=["10", "50-both", "95"])
def test_a_rank_frozen_while_it_loads_is_named_in_seconds_and_replaced(launch, percent, ranks):
    at = load_total(launch) * percent // 100
    server = launch_stopping(launch, ",".join(f"{r} {at}" for r in ranks))
    frozen = lambda: [w for w in server.workers() if w["rank"] in ranks and is_stopped(w["pid"])]
    rows = eventually(lambda: len(frozen()) == len(ranks) and frozen(), 30, "the ranks have stopped", server)
    start = time.monotonic()
    # a process stopped this early may not have got its first words out
    assert all(w["state"] in ("spawned", "loading") and w["load_bytes"] < load_total(launch) for w in rows), rows
    assert server.status("/health/live") == 200 and server.status("/health/ready") == 503
    server.wait_ready()
    assert time.monotonic() - start < 6 * PATIENCE, "expected it to be noticed within five seconds"
    died = re.findall(r" died rank=(\d+) .*cause=silent .*why=\"no heartbeat", server.log())
    assert sorted(map(int, died)) == ranks, server.log_end()
    assert [w["restarts_by_cause"]["silent"] for w in server.workers()] == [int(r in ranks) for r in range(2)]
    server.check_healthy()
    server.stop()


def test_a_rank_frozen_before_it_has_said_anything_is_replaced_in_seconds(launch):
    """Stopped by whoever starts it, as soon as it is there."""
    server = launch(tp=2)
    children = lambda: psutil.Process(server.pid).children()
    victim = eventually(lambda: len(children()) >= 2 and children()[1].pid, 30, "two workers", server)
    os.kill(victim, signal.SIGSTOP)
    server.wait_ready(12)
    server.check_healthy()
    server.stop()


def test_a_load_that_stalls_is_told_and_goes_on_when_it_can(launch, tmp_path):
    """The rank beats, so it is not dead; nothing moves, so it is no progress."""
    hang = tmp_path / "hang"
    hang.touch()
    server = launch_stopping(launch, f"1 {load_total(launch) // 2} hang", "--load-stall", 500, hang=hang)
    told = eventually(lambda: server.status("/health/progress") == 503 and json.loads(server.http("/health/progress")[2]), 30, "no progress", server)
    assert (told["status"], told["state"]) == ("stalled", "loading") and told["load"]["bytes"] < told["load"]["total"], told
    assert server.status("/health/live") == 200 and server.status("/health/ready") == 503
    hang.unlink()
    server.wait_ready()
    assert sum(w["restarts"] for w in server.workers()) == 0
    server.check_healthy()
    server.stop()


@pytest.mark.parametrize("ranks", [[1], [0, 2]], ids=["one", "two"])
def test_ranks_frozen_while_draining_cost_no_answer(launch, ranks):
    server = launch(tp=4).wait_ready()
    want = server.chat(PHOTOSYNTHESIS)
    streams = [Stream(server, question(PHOTOSYNTHESIS)) for _ in range(3)]
    for s in streams:
        s.start()
    eventually(lambda: all(s.deltas >= 3 for s in streams), 60, "three pieces", server)
    pids = [w["pid"] for w in server.workers()]
    server.signal()
    eventually(lambda: " draining" in server.log(), 10, "a drain", server)
    for r in ranks:
        os.kill(pids[r], signal.SIGSTOP)
    join_all(streams, 60)
    assert [(s.error, s.text) for s in streams] == [(None, want)] * 3, server.log_end()
    assert server.wait_end() == 0
    server.check_clean()


def test_a_program_that_is_away_for_a_moment_is_looked_for_again(launch, tmp_path):
    """What has worked is no wrong set-up: the start of a successor is tried again, with pauses."""
    worker = tmp_path / "octavo-worker"
    worker.symlink_to(BUILD / "octavo-worker")
    server = launch("--worker", worker, "--restarts-max", 100, tp=2).wait_ready()
    worker.rename(tmp_path / "away")
    os.kill(server.workers()[1]["pid"], signal.SIGKILL)
    eventually(lambda: server.log().count("expected to start it") >= 2, 30, "two tries", server)
    assert server.status("/health/live") == 200 and server.status("/health/ready") == 503
    (tmp_path / "away").rename(worker)
    eventually(lambda: server.status("/health/ready") == 200, 60, "ready", server)
    server.check_healthy()
    server.stop()


def wait_until_it_hears(server, number):
    def hears():
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{server.pid}/status").read_text(), re.M)
        return int(caught[1], 16) >> (number - 1) & 1
    eventually(hears, 10, "a handler", server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_asked_to_stop_as_soon_as_it_can_hear_it_ends_with_0(launch, number):
    server = launch(tp=2)
    wait_until_it_hears(server, number)
    server.signal(number)
    assert server.wait_end() == 0, server.log_end()
    server.check_clean()


def test_told_to_open_its_log_again_at_any_moment_of_its_start_it_starts(launch):
    server = launch(tp=2)
    wait_until_it_hears(server, signal.SIGTERM)

    def listening():
        server.signal(signal.SIGHUP)
        assert server.process.poll() is None, f"the server ended with {server.process.returncode}" + server.log_end()
        return "listening" in server.log()
    eventually(listening, 30, "a server that listens", server)
    server.wait_ready()
    server.stop()
