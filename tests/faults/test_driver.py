"""A driver that does not return from a call: the service goes on, says so, and does not wait for ever."""
import os
import signal
import subprocess
import time

import pytest
from octavo import BUILD, PATIENCE, PHOTOSYNTHESIS, Stream, eventually, join_all, question


@pytest.fixture
def stuck(tmp_path):
    """The file that keeps looks from returning while it is there."""
    return tmp_path / "stuck"


def driver(stuck):
    return dict(OCTAVO_NVML=str(BUILD / "libfake-nvml.so"), FAKE_NVML_DEVICES="1", FAKE_NVML_HANG=str(stuck))


def start(launch, stuck, *options):
    return launch("--device-memory", "nvml", *options, tp=2, env=driver(stuck)).wait_ready()


def waits(server):
    return "the driver has not answered" in server.http("/health/ready", timeout=5)[2]


def test_a_stuck_driver_stops_no_stream_and_no_health_and_a_death_waits_for_it(launch, stuck):
    server = start(launch, stuck)
    want = server.chat(PHOTOSYNTHESIS)
    stuck.touch()
    streams = [Stream(server, question(PHOTOSYNTHESIS)) for _ in range(2)]
    for s in streams:
        s.start()
    eventually(lambda: all(s.deltas >= 3 for s in streams), 60, "three pieces", server)
    os.kill(server.workers()[1]["pid"], signal.SIGKILL)
    eventually(lambda: waits(server), 20, "health that names the driver", server)
    begun = time.monotonic()
    for _ in range(20):
        assert server.status("/health/live", timeout=5) == 200
    assert time.monotonic() - begun < 5 * PATIENCE, "expected the loop to turn"
    stuck.unlink()
    join_all(streams, 60)
    assert [(s.error, s.text) for s in streams] == [(None, want)] * 2, server.log_end()
    server.stop()


def test_a_driver_that_stays_stuck_ends_the_service_with_3(launch, stuck):
    server = start(launch, stuck, "--reclaim-timeout", 1)
    stuck.touch()
    os.kill(server.workers()[0]["pid"], signal.SIGKILL)
    assert server.wait_end(20) == 3, server.log_end()
    assert "verdict=held_by_nobody" in server.log() and "the driver has not answered" in server.log(), server.log_end()
    server.check_clean()


def test_a_start_into_a_stuck_driver_is_3(launch, stuck):
    """Who does not know what is held cannot say that nothing is."""
    stuck.touch()
    server = launch("--device-memory", "nvml", "--reclaim-timeout", 1, tp=1, env=driver(stuck))
    assert server.wait_end(20) == 3, server.log_end()
    server.check_clean()
    guard = subprocess.run([BUILD / "octavo", "guard", "--device-memory", "nvml", "--reclaim-timeout", "1"], capture_output=True, text=True,
                           timeout=60 * PATIENCE, env=os.environ | driver(stuck))
    assert guard.returncode == 3 and "has not answered" in guard.stdout + guard.stderr, (guard.returncode, guard.stdout, guard.stderr)
