"""The coordinator as the first process of a container: whoever kills it ends all; orphans of others are buried."""
import os
import re
import signal
import subprocess

import psutil
import pytest
from octavo import BUILD, PHOTOSYNTHESIS, Stream, eventually, join_all, question

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]
_refused = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
pytestmark = pytest.mark.skipif(_refused.returncode != 0, reason=f"no pid name space here: {_refused.stderr.strip()}")


@pytest.fixture
def contained(launch, tmp_path):
    """A server whose coordinator is process 1 of a pid name space, and that process as it is called outside."""
    program = tmp_path / "contained"
    program.write_text(f'#!/bin/sh\nexec {" ".join(UNSHARE)} {BUILD}/octavo "$@"\n')
    program.chmod(0o755)

    def start(*options, **more):
        server = launch(*options, program=program, **more).wait_ready()
        first = psutil.Process(server.pid).children()[0]
        assert first.name() == "octavo" and len(first.children()) == server.tp
        return server, first
    return start


def test_killed_from_outside_nothing_of_it_is_left(contained):
    server, first = contained(tp=4)
    stream = Stream(server, question(PHOTOSYNTHESIS, max_tokens=2000, extra_body=dict(ignore_eos=True)))
    stream.start()
    eventually(lambda: stream.deltas >= 3, 60, "three pieces", server)
    first.send_signal(signal.SIGKILL)
    server.wait_end()
    server.check_clean()
    join_all([stream], 30)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV], ids=lambda n: n.name)
def test_a_crash_of_the_first_process_ends_it(contained, number):
    """The kernel spares a first process that raises a signal against itself, as a crash report does in the end."""
    server, first = contained(tp=2)
    first.send_signal(number)
    assert server.wait_end(10) != 0
    assert "crash report ends" in server.log()
    eventually(lambda: not server.processes(), 10, "no process of the server left", server)


def test_asked_to_stop_the_first_process_drains_and_stops(contained):
    server, first = contained(tp=2)
    first.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    server.check_clean()


def test_a_rank_that_dies_in_a_container_is_replaced(contained):
    server, first = contained(tp=2)
    victim = first.children()[1]
    victim.kill()
    eventually(lambda: "recovered" in server.log(), 60, "a recovery", server)
    server.wait_ready()
    assert victim.pid not in {c.pid for c in first.children()}
    server.check_healthy()
    first.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0


def test_orphans_of_others_are_buried_and_workers_are_left_to_their_own(contained):
    """Put in from outside, as `kubectl exec` does, and left by their parent; one of them beside a dying worker."""
    server, first = contained(tp=2)
    for round in range(3):
        subprocess.run(["nsenter", "-t", str(first.pid), "-p", "-m", "sh", "-c", "sleep 0.01 & sleep 0.02 &"], check=True)
        if round == 1:
            first.children()[0].kill()
    buried = lambda: sum(map(int, re.findall(r" reaped orphans=(\d+)", server.log())))
    eventually(lambda: buried() == 6, 30, "six orphans buried", server)
    eventually(lambda: len(first.children()) == 2 and all(c.name().startswith("octavo-worker") for c in first.children()), 30, "two workers and nobody else", server)
    assert not [c for c in first.children() if c.status() == psutil.STATUS_ZOMBIE]
    server.wait_ready()
    first.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
