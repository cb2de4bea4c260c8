"""However it ends, nothing of it is left: no process, no file, no port that a successor would want."""
import mmap
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from octavo import BUILD, PHOTOSYNTHESIS, Stream, eventually, join_all, question


def sockets():
    """Names of sockets of any Octavo on this host."""
    return {l.split()[-1] for l in Path("/proc/net/unix").read_text().splitlines() if "@octavo" in l}


def test_ten_crashes_leave_nothing_behind(launch, tmp_path):
    port, temporary = 0, tmp_path / "tmp"
    temporary.mkdir()
    for _ in range(10):
        server = launch(tp=2, port=port, env=dict(TMPDIR=str(temporary))).wait_ready()
        port = server.port
        mine = {s for s in sockets() if f"-{server.pid}-" in s}
        assert mine
        os.kill(server.workers()[1]["pid"], signal.SIGKILL)
        eventually(lambda: "recovered" in server.log(), 60, "a recovery", server)
        server.signal(signal.SIGKILL)
        server.wait_end()
        server.check_clean()
        eventually(lambda: not mine & sockets(), 10, "no socket of the dead")
        assert not list(temporary.iterdir())


@pytest.fixture
def segments():
    """Makes files as NCCL leaves them in /dev/shm; none outlives the test."""
    made = []

    def make(name, age_s):
        path = Path("/dev/shm") / f"nccl-octavo-test-{os.getpid()}-{name}"
        path.write_bytes(bytes(4096))
        os.utime(path, (time.time() - age_s,) * 2)
        made.append(path)
        return path
    yield make
    for p in made:
        p.unlink(missing_ok=True)


def test_segments_of_dead_processes_are_removed_at_start_and_others_stay(launch, segments):
    dead, young, used = segments("dead", 1000), segments("young", 0), segments("used", 1000)
    with open(used, "r+b") as f:
        mapping = mmap.mmap(f.fileno(), 4096)
    os.utime(used, (time.time() - 1000,) * 2)
    server = launch(tp=1).wait_ready()
    assert not dead.exists() and young.exists() and used.exists(), server.log_end()
    assert f'debris_removed file="{dead}" bytes=4096' in server.log()
    mapping.close()
    young.unlink(), used.unlink()
    server.shm_before -= {dead.name, young.name, used.name}
    server.stop()


def test_half_written_shards_of_dead_workers_are_removed_at_start(launch, tmp_path):
    cache = tmp_path / "shards"
    launch("--shard-cache", cache, tp=1).wait_ready().stop()
    whole, = cache.iterdir()
    half = cache / f"{whole.name}.4194304"
    half.write_bytes(b"half")
    os.utime(half, (time.time() - 1000,) * 2)
    launch("--shard-cache", cache, tp=1).wait_ready().stop()
    assert list(cache.iterdir()) == [whole]


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL], ids=lambda n: n.name)
def test_whatever_kills_the_coordinator_takes_its_workers_along(launch, number):
    server = launch(tp=4).wait_ready()
    server.signal(number)
    assert server.wait_end() == -number
    eventually(lambda: not server.processes(), 10, "no process of the server left", server)


def test_the_pid_in_the_first_line_of_the_log_is_the_one_to_stop(launch):
    server = launch(tp=2).wait_ready()
    pid = int(re.search(r"\bpid=(\d+)", server.log().splitlines()[0])[1])
    os.kill(pid, signal.SIGTERM)
    assert server.wait_end() == 0
    server.check_clean()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_launching_shell_whose_group_is_killed_takes_everything_along(launch, tmp_path, busy):
    """As batch systems end a job: TERM to the group, then KILL. The workers are not of that group."""
    shell = tmp_path / "job"
    shell.write_text(f'#!/bin/bash\n{BUILD}/octavo "$@" &\nwait\n')
    shell.chmod(0o755)
    server = launch(tp=4, program=shell).wait_ready()
    coordinator, = psutil.Process(server.pid).children()
    assert all(os.getpgid(w.pid) != server.pid for w in coordinator.children()) and os.getpgid(coordinator.pid) == server.pid
    stream = Stream(server, question(PHOTOSYNTHESIS, max_tokens=3000, extra_body=dict(ignore_eos=True)))
    if busy:
        stream.start()
        eventually(lambda: stream.deltas >= 3, 60, "three pieces", server)
    os.killpg(server.pid, signal.SIGTERM)
    os.killpg(server.pid, signal.SIGKILL)
    server.wait_end()
    server.check_clean()
    if busy:
        join_all([stream], 30)
    again = launch(tp=2, port=server.port).wait_ready()
    again.check_healthy()
    again.stop()


def test_the_http_port_is_the_only_one_that_is_taken(launch):
    """So no other can be picked twice or be taken by somebody in between."""
    server = launch(tp=4).wait_ready()
    listening = [c.laddr.port for pid in server.processes() for c in psutil.Process(pid).net_connections("inet")]
    assert set(listening) == {server.port}, listening
    server.stop()


def test_pairs_that_start_at_the_same_moment_all_start(launch):
    for _ in range(20):
        pair = [launch(tp=1), launch(tp=1)]
        for server in pair:
            server.wait_ready()
        assert pair[0].port != pair[1].port
        for server in pair:
            server.signal()
        for server in pair:
            server.stop()


def test_a_taken_port_is_named_with_its_role():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        p = subprocess.run([BUILD / "octavo", "serve", "--tp", "1", "--port", str(port)], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert p.returncode == 2 and f"HTTP on 127.0.0.1 port {port}: expected to listen, found: address already in use" in p.stderr


def test_asked_again_and_again_the_exit_code_is_still_0(launch):
    server = launch(tp=2).wait_ready()
    while server.process.poll() is None:
        server.signal()
    assert server.wait_end() == 0, server.log_end()
    server.check_clean()
