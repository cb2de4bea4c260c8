"""octavo guard: the reclaim gate for scripts: what lets a start pass, what does not, and what it says."""
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from octavo import BUILD, PATIENCE, eventually

MB = 1 << 20
TOTAL = 80000 * MB
PASS, WRONG, HELD = 0, 2, 3


@pytest.fixture
def guard(tmp_path):
    """Runs it against a script of devices: (exit code, what it said, what it logged)."""
    path = tmp_path / "devices"

    def say(text):
        new = tmp_path / "new"
        new.write_text(text)
        os.replace(new, path)

    def go(text, *options):
        say(text)
        p = subprocess.run([BUILD / "octavo", "guard", "--device-memory", f"script:{path}", *map(str, options)], capture_output=True, text=True,
                           timeout=60 * PATIENCE, stdin=subprocess.DEVNULL)
        return p.returncode, p.stdout, p.stderr
    go.say = say
    return go


def test_without_a_gpu_there_is_nothing_to_wait_for():
    p = subprocess.run([BUILD / "octavo", "guard", "--device", "cpu"], capture_output=True, text=True, timeout=60)
    assert (p.returncode, p.stdout) == (PASS, "free: no device memory to wait for\n")


def test_it_waits_for_memory_that_is_still_being_taken_back(guard):
    code, said, _ = guard(f"devices 1\ndevice 0 used {30000 * MB} of {TOTAL}\nat 0.3\ndevice 0 used {20000 * MB} of {TOTAL}\nat 0.6\ndevice 0 used 0 of {TOTAL}\n")
    assert code == PASS and said.startswith("free: device memory returned in "), said
    assert float(said.split()[5]) >= 0.5, said


def test_a_lost_device_does_not_let_a_start_pass(guard):
    code, said, _ = guard(f"devices 2\ndevice 0 used 0 of {TOTAL}\ndevice 1 lost Xid 79, it fell off the bus\n")
    assert code == HELD and said.startswith("device_lost: device 1 (") and "Xid 79" in said, said


def test_only_the_devices_asked_for_are_looked_at(guard):
    devices = f"devices 2\ndevice 0 used 0 of {TOTAL}\ndevice 1 lost Xid 79\n"
    assert guard(devices, "--devices", "0")[0] == PASS
    assert guard(devices, "--devices", "1")[0] == HELD
    assert guard(devices, "--devices", "2")[0] == WRONG


def test_a_stranger_is_named_and_kept_waiting_for_only_on_request(guard):
    stranger = subprocess.Popen(["sleep", "1000"])
    try:
        devices = f"devices 1\ndevice 0 used {4096 * MB} of {TOTAL} pid {stranger.pid} {4096 * MB}\n"
        code, _, logged = guard(devices)
        assert code == PASS and f'foreign_process device=0 pid={stranger.pid} name="sleep" bytes={4096 * MB}' in logged, logged
        code, said, logged = guard(devices, "--alone", "--reclaim-timeout", 1)
        assert code == HELD and said.startswith("held: 1 processes"), said
        assert f'held device=0 pid={stranger.pid} name="sleep" bytes={4096 * MB}' in logged, logged
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert guard(f"devices 1\ndevice 0 used 0 of {TOTAL}\n", "--alone")[0] == PASS


@pytest.mark.skipif(os.readlink("/proc/self/ns/pid") != "pid:[4026531836]", reason="in a container a pid that cannot be seen may be anybody's")
def test_memory_booked_to_a_process_that_has_ended_is_waited_for(guard):
    booked = f"devices 1\ndevice 0 used {9000 * MB} of {TOTAL} pid 4194305 {9000 * MB}\n"
    code, said, _ = guard(booked, "--reclaim-timeout", 1)
    assert code == HELD and said.startswith("held_by_nobody: device 0: memory is still booked to process 4194305"), said
    code, said, _ = guard(booked + f"at 0.5\ndevice 0 used 0 of {TOTAL}\n")
    assert code == PASS, said


@pytest.mark.smoke
def test_a_worker_whose_coordinator_is_gone_is_killed_and_waited_for(guard):
    argv = ["octavo-worker", "-c", "import time; time.sleep(1000)", "--parent-pid", "4194304", "--parent-start", "5"]
    left = subprocess.Popen(argv, executable=sys.executable, stdin=subprocess.DEVNULL)
    eventually(lambda: psutil.Process(left.pid).cmdline()[:1] == ["octavo-worker"], 20, "the process has become what it should be")
    ended = threading.Thread(target=lambda: (left.wait(), guard.say(f"devices 1\ndevice 0 used 0 of {TOTAL}\n")))
    ended.start()
    try:
        code, said, logged = guard(f"devices 1\ndevice 0 used {9000 * MB} of {TOTAL} pid {left.pid} {9000 * MB}\n")
    finally:
        left.kill()
        ended.join()
    assert code == PASS and f"orphan_killed device=0 pid={left.pid}" in logged, said + logged
    assert left.returncode == -signal.SIGKILL


@pytest.mark.parametrize("options", [["stray"], ["--reclaim-timeout", "x"], ["--nonsense"], ["--device-memory", "script:/nowhere"]], ids=" ".join)
def test_asked_wrongly_it_is_2_and_a_sentence(options):
    p = subprocess.run([BUILD / "octavo", "guard", *options], capture_output=True, text=True, timeout=60)
    assert p.returncode == WRONG and p.stderr.splitlines()[-1].startswith("octavo guard: "), p.stderr
