"""What a service manager hears (NOTIFY_SOCKET): ready only when it is, alive only while it is, and why it ends."""
import os
import select
import signal
import socket
from pathlib import Path

import psutil
import pytest
from octavo import PHOTOSYNTHESIS, Stream, eventually, join_all, question

WATCHDOG_US = 400000


class Manager:
    """The receiving end: one datagram after the other, as {key: value}."""

    def __init__(self, folder):
        self.path = str(folder / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.heard = []

    def env(self):
        return {"NOTIFY_SOCKET": self.path, "WATCHDOG_USEC": str(WATCHDOG_US)}

    def listen(self, seconds=0.0):
        """Everything that has come, after waiting at most so long for something to come."""
        new = []
        while select.select([self.socket], [], [], 0 if new else seconds)[0]:
            new.append(dict(line.split("=", 1) for line in self.socket.recv(4096).decode().splitlines()))
        self.heard += new
        return new

    def wait(self, key, value, server, seconds=60):
        """The first datagram with key=value, whatever else comes with it."""
        return eventually(lambda: next((d for d in self.listen(0.1) if d.get(key, "").startswith(value)), None), seconds, f"{key}={value}", server)

    def close(self):
        self.socket.close()


@pytest.fixture
def manager(tmp_path):
    m = Manager(tmp_path)
    yield m
    m.close()


@pytest.mark.smoke
def test_ready_is_said_when_a_token_has_come_and_not_before(launch, manager, tmp_path):
    """Held up at the reclaim gate: more time is asked for, and nobody is told ready."""
    devices = tmp_path / "devices"
    devices.write_text("devices 1\ndevice 0 unreadable Timeout\n")
    server = launch("--device-memory", f"script:{devices}", tp=2, env=manager.env()).wait_port()
    for _ in range(3):
        assert "EXTEND_TIMEOUT_USEC" in manager.wait("EXTEND_TIMEOUT_USEC", "", server)
    assert not any("READY" in d for d in manager.heard) and server.status("/health/ready") == 503
    eventually(lambda: manager.listen(0.1) is not None and any("cannot be read" in d.get("STATUS", "") for d in manager.heard), 20, "a line that says what is waited for", server)
    free = tmp_path / "free"
    free.write_text("devices 1\ndevice 0 used 0 of 80000000000\n")
    os.replace(free, devices)
    ready = manager.wait("READY", "1", server)
    log = server.log()
    assert server.status("/health/ready") == 200
    assert 0 <= log.find(" canary generation=1 ") < log.find(" ready url="), log
    assert ready["STATUS"].startswith("ready: 2 ranks") and "EXTEND_TIMEOUT_USEC" not in ready
    server.stop()
    assert sum("READY" in d for d in manager.heard) == 1


def test_the_sign_of_life_ends_with_a_loop_that_does_not_turn(launch, manager):
    server = launch(tp=2, env=manager.env()).wait_ready()
    for _ in range(5):
        manager.wait("WATCHDOG", "1", server)
    server.signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED, 10, "a stopped coordinator")
    manager.listen()
    assert manager.listen(2 * WATCHDOG_US / 1e6) == []
    server.signal(signal.SIGCONT)
    manager.wait("WATCHDOG", "1", server)
    server.check_healthy()
    server.stop()


def test_a_rank_that_is_replaced_is_no_reason_to_be_silent(launch, manager):
    server = launch(tp=2, env=manager.env()).wait_ready()
    victim = server.workers()[1]["pid"]
    os.kill(victim, signal.SIGSTOP)
    told = manager.wait("STATUS", "recovering: rank 1 was lost", server)
    assert "WATCHDOG" in told or manager.wait("WATCHDOG", "1", server)
    manager.wait("STATUS", "ready: 2 ranks", server)
    assert sum("READY" in d for d in manager.heard) == 1
    server.stop()


def test_a_drain_asks_for_more_time_until_the_answers_are_out(launch, manager):
    server = launch(tp=2, env=manager.env()).wait_ready()
    stream = Stream(server, question(PHOTOSYNTHESIS, max_tokens=300, extra_body=dict(ignore_eos=True)))
    stream.start()
    eventually(lambda: stream.deltas >= 3, 60, "three pieces", server)
    server.signal()
    stopping = manager.wait("STOPPING", "1", server)
    assert "EXTEND_TIMEOUT_USEC" in stopping and stopping["STATUS"].startswith("stopping: 1 running")
    join_all([stream])
    assert stream.error is None and stream.reason == "length", server.log_end()
    assert server.wait_end() == 0
    server.check_clean()


def test_a_failure_says_why_and_keeps_its_exit_code(launch, manager, tmp_path):
    devices = tmp_path / "devices"
    devices.write_text("devices 1\ndevice 0 lost Xid 79, it fell off the bus\n")
    server = launch("--device-memory", f"script:{devices}", tp=1, env=manager.env())
    assert server.wait_end() == 3, server.log_end()
    manager.listen()
    assert any("Xid 79" in d.get("STATUS", "") for d in manager.heard) and any("STOPPING" in d for d in manager.heard), manager.heard
    assert not any("READY" in d for d in manager.heard)


def test_workers_do_not_speak_to_the_manager(launch, manager):
    server = launch(tp=2, env=manager.env()).wait_ready()
    for w in server.workers():
        names = {e.split(b"=")[0] for e in Path(f"/proc/{w['pid']}/environ").read_bytes().split(b"\0")}
        assert not names & {b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"WATCHDOG_PID"}
    server.stop()
