"""Device memory that comes back late, partly or not at all, or that others hold: what the service does.

The devices are a text file that the test rewrites (--device-memory script:PATH), so no GPU is needed
and nothing depends on how fast anybody looks.
"""
import os
import signal
import subprocess
import sys

import psutil
import pytest
from devices import HELD, MB, Devices, serving
from octavo import PHOTOSYNTHESIS, Stream, eventually, join_all, question

@pytest.fixture
def devices(tmp_path):
    return Devices(tmp_path)


@pytest.fixture
def strangers():
    """Starts processes; none outlives the test."""
    all = []

    def start(argv, **more):
        all.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, **more))
        return all[-1]
    yield start
    for p in all:
        p.kill()
        p.wait()


def sleeper(strangers, **env):
    return strangers([sys.executable, "-c", "import time; time.sleep(1000)"], env=os.environ | env)


def states(server):
    return [w["state"] for w in server.workers()]


def reclaiming(server, rank=0):
    """The dead rank is waited for; the other one stays loaded."""
    want = ["loaded", "loaded"]
    want[rank] = "reclaiming"
    eventually(lambda: states(server) == want, 20, f"states {want}", server)


def metric(server, name):
    return next(float(l.split()[1]) for l in server.http("/metrics")[2].splitlines() if l.startswith(name + " "))


def ends(server, code, *parts):
    """It ends by itself, with that code, and its log says why."""
    found = server.wait_end()
    assert found == code, f"expected exit code {code}, found {found}" + server.log_end()
    for part in parts:
        assert part in server.log(), f"expected {part!r}" + server.log_end()
    server.check_clean()


def test_ranks_that_die_while_memory_is_waited_for_share_one_restart(launch, devices):
    server, pids = serving(launch, devices, "--restarts-max", 1)
    os.kill(pids[1], signal.SIGKILL)
    reclaiming(server, 1)
    os.kill(pids[0], signal.SIGKILL)
    eventually(lambda: states(server) == ["reclaiming"] * 2, 20, "both ranks waited for", server)
    devices.hold({})
    server.wait_ready()
    assert metric(server, "octavo_restarts_total") == 1, server.log_end()
    server.check_healthy()
    server.stop()


def test_nothing_is_started_before_the_memory_is_back_and_streams_go_on(launch, devices):
    server, pids = serving(launch, devices)
    want = server.chat(PHOTOSYNTHESIS)
    stream = Stream(server, question(PHOTOSYNTHESIS))
    stream.start()
    eventually(lambda: stream.deltas >= 3, 60, "three pieces", server)
    os.kill(pids[1], signal.SIGKILL)
    reclaiming(server, 1)
    assert server.status("/health/ready") == 503
    assert server.status("/health/live") == 200
    waiting = lambda: "waiting for device memory: device 0" in server.http("/health/ready")[2]
    eventually(waiting, 20, "health that says what is waited for", server)
    devices.hold({pids[0]: HELD}, used=2 * HELD)  # off the list, but not back
    eventually(lambda: "have not come back" in server.http("/health/ready")[2], 20, "health that follows", server)
    assert states(server) == ["loaded", "reclaiming"]
    assert [c.pid for c in psutil.Process(server.pid).children()] == pids[:1]
    devices.hold({pids[0]: HELD})
    join_all([stream], 60)
    assert (stream.error, stream.text) == (None, want), server.log_end()
    eventually(lambda: server.status("/health/ready") == 200, 60, "ready again", server)
    assert metric(server, "octavo_reclaims_total") == 1
    assert metric(server, "octavo_reclaim_seconds_total") > 0
    assert "reclaimed verdict=returned" in server.log()
    server.stop()


def test_memory_that_nobody_holds_and_that_does_not_return_ends_the_service_with_3(launch, devices):
    server, pids = serving(launch, devices, "--reclaim-timeout", 1)
    stream = Stream(server, question(PHOTOSYNTHESIS))
    stream.start()
    eventually(lambda: stream.deltas >= 3, 60, "three pieces", server)
    devices.hold({pids[1]: HELD}, used=2 * HELD)
    os.kill(pids[0], signal.SIGKILL)
    join_all([stream], 60)
    assert stream.error is not None and "device 0" in str(stream.error), server.log_end()
    ends(server, 3, "verdict=held_by_nobody", "9000 MiB of the dead ranks' memory have not come back")


def test_a_stranger_with_our_memory_is_named_and_left_alone(launch, devices, strangers):
    server, pids = serving(launch, devices, "--reclaim-timeout", 1)
    thief = sleeper(strangers)
    devices.hold({thief.pid: 12000 * MB})
    os.kill(pids[0], signal.SIGKILL)
    ends(server, 3, "verdict=held_by_stranger", f"process {thief.pid} (", "which is not ours, holds 12582912000 bytes")
    assert thief.poll() is None


def test_an_orphan_of_ours_is_killed_and_the_service_goes_on(launch, devices, strangers):
    server, pids = serving(launch, devices)
    with open(f"/proc/{pids[0]}/environ", "rb") as f:
        cookie = next(e for e in f.read().split(b"\0") if e.startswith(b"OCTAVO_COOKIE=")).decode()
    orphan = sleeper(strangers, OCTAVO_COOKIE=cookie.partition("=")[2])
    devices.hold({orphan.pid: HELD, pids[1]: HELD})
    os.kill(pids[0], signal.SIGKILL)
    assert orphan.wait(30) == -signal.SIGKILL, server.log_end()
    reclaiming(server)
    devices.hold({pids[1]: HELD})
    eventually(lambda: server.status("/health/ready") == 200, 60, "ready again", server)
    assert f"orphan_killed device=0 pid={orphan.pid}" in server.log()
    server.check_healthy()
    server.stop()


def test_a_lost_device_ends_the_service_with_3_without_waiting(launch, devices):
    server, pids = serving(launch, devices, "--reclaim-timeout", 3600)
    devices.say("lost Xid 79, it fell off the bus")
    os.kill(pids[0], signal.SIGKILL)
    ends(server, 3, "verdict=device_lost", "device 0 (scripted device 0) is lost: Xid 79, it fell off the bus")


def test_a_device_that_cannot_be_read_for_a_while_is_asked_again(launch, devices):
    server, pids = serving(launch, devices)
    devices.say("unreadable Timeout")
    os.kill(pids[0], signal.SIGKILL)
    reclaiming(server)
    eventually(lambda: "cannot be read: Timeout" in server.http("/health/ready")[2], 20, "health that says so", server)
    devices.hold({pids[1]: HELD})
    eventually(lambda: server.status("/health/ready") == 200, 60, "ready again", server)
    server.stop()


def test_asked_to_stop_while_waiting_for_memory_it_stops(launch, devices):
    server, pids = serving(launch, devices)
    os.kill(pids[0], signal.SIGKILL)
    reclaiming(server)
    server.stop()


def test_at_start_a_foreign_process_is_named_with_pid_and_bytes(launch, devices, strangers):
    stranger = sleeper(strangers)
    devices.hold({stranger.pid: 4096 * MB})
    server = launch(*devices.option(), tp=1).wait_ready()
    assert f"foreign_process device=0 pid={stranger.pid}" in server.log()
    assert "bytes=4294967296" in server.log()
    server.stop()
    assert stranger.poll() is None


def test_at_start_a_worker_whose_coordinator_is_gone_is_killed_and_waited_for(launch, devices, strangers):
    argv = ["octavo-worker", "-c", "import time; time.sleep(1000)", "--parent-pid", "4194304", "--parent-start", "5"]
    left = strangers(argv, executable=sys.executable)
    eventually(lambda: psutil.Process(left.pid).cmdline()[:1] == ["octavo-worker"], 20, "the process has become what it should be")
    devices.hold({left.pid: HELD})
    server = launch(*devices.option(), tp=1)
    server.wait_port()
    assert left.wait(30) == -signal.SIGKILL, server.log_end()
    assert server.status("/health/ready") == 503
    devices.hold({})
    server.wait_ready()
    server.stop()


def test_at_start_a_lost_device_is_exit_code_3(launch, devices):
    devices.say("lost GPU requires reset")
    ends(launch(*devices.option(), tp=1), 3, "GPU requires reset")


def test_a_script_that_is_none_is_a_wrong_set_up(launch, tmp_path):
    server = launch("--device-memory", f"script:{tmp_path}/nowhere", tp=1)
    ends(server, 2, "nowhere")
