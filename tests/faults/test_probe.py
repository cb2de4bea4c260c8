"""Probes that must not depend on the coordinator: what each worker answers by itself, and `octavo probe`."""
import http.client
import json
import os
import re
import signal
import socket
import subprocess

import pytest
from octavo import BUILD, PHOTOSYNTHESIS, Stream, eventually, join_all, question

YES, NO, WRONG, SILENT = 0, 1, 2, 3


def ask(address, path, timeout=20):
    """(status, body) of one GET to a worker's probe: a rank's abstract socket (server pid, rank) or a port."""
    if isinstance(address, tuple):
        s = socket.socket(socket.AF_UNIX)
        address = "\0octavo-probe-%d-%d" % address
    else:
        s = socket.socket()
        address = ("127.0.0.1", address)
    with s:
        s.connect(address)
        s.settimeout(timeout)
        s.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = http.client.HTTPResponse(s)
        answer.begin()
        return answer.status, answer.read().decode()


def state(address):
    return json.loads(ask(address, "/status")[1])


def probe(*options):
    """(exit code, lines) of octavo probe."""
    r = subprocess.run([BUILD / "octavo", "probe", *map(str, options)], capture_output=True, text=True, timeout=120)
    return r.returncode, r.stdout.splitlines(), r.stderr


def free_ports(n):
    """The first of n consecutive ports that nobody has now."""
    for base in range(21000 + os.getpid() % 20000, 60000, n):
        try:
            for port in range(base, base + n):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
            return base
        except OSError:
            continue
    raise AssertionError("no free ports")


@pytest.mark.smoke
def test_each_worker_answers_for_itself(launch):
    base = free_ports(2)
    server = launch("--probe-port", base, tp=2).wait_ready()
    rows = server.workers()
    server.check_healthy()
    for rank, row in enumerate(rows):
        for address in ((server.pid, rank), base + rank):
            for path in ("/live", "/ready", "/progress"):
                assert ask(address, path)[0] == 200, path
            # an answer is told before steps sent ahead for it, which nobody reads, have ended
            eventually(lambda: ask(address, "/ready")[1] == "ready\n", 5, "the last step has ended", server)
            s = eventually(lambda: (s := state(address))["state"] == "ready" and s, 5, "the same in its status", server)
            assert (s["rank"], s["world"], s["pid"], s["start_time"]) == (rank, 2, row["pid"], row["start_time"])
            assert s["ready"] and not s["stuck"] and s["last_step"] > 0 and s["age_ms"] >= 0
            assert s["load_bytes"] == s["load_total"] > 0 and s["memory_used_bytes"] > 0 and s["generation"] == 1
            assert ask(address, "/nowhere")[0] == 404
    server.stop()


def test_a_worker_answers_when_the_coordinator_is_stopped(launch):
    server = launch(tp=2).wait_ready()
    server.signal(signal.SIGSTOP)
    try:
        assert ask((server.pid, 1), "/ready") == (200, "ready\n")
        assert probe("--pid", server.pid, "--all", "live")[0] == YES
        assert probe("--url", server.url, "--timeout", 1, "live")[0] == SILENT
    finally:
        server.signal(signal.SIGCONT)
    server.check_healthy()
    server.stop()


def test_a_stuck_step_is_no_progress_but_alive(launch):
    """Rank 1 stops inside a step; rank 0 waits for it in a collective and says so."""
    server = launch("--step-timeout", 1, tp=2, env={"OCTAVO_RESTARTS_MAX": "10"}).wait_ready()
    pids = [w["pid"] for w in server.workers()]
    stream = Stream(server, question(PHOTOSYNTHESIS))
    stream.start()
    eventually(lambda: stream.deltas >= 3, 60, "three pieces", server)
    server.signal(signal.SIGSTOP)  # or it would notice first
    try:
        os.kill(pids[1], signal.SIGSTOP)
        address = (server.pid, 0)
        if state(address)["state"] == "stepping":
            eventually(lambda: ask(address, "/progress") == (503, "stuck\n"), 30, "503 from /progress", server)
            assert ask(address, "/live") == (200, "stuck\n")
            assert state(address)["stuck"]
            assert probe("--pid", server.pid, "--rank", 0, "progress")[0] == NO
    finally:
        server.signal(signal.SIGCONT)
    join_all([stream], 120)
    assert stream.error is None, server.log_end()
    server.stop()


def test_clients_that_hang_or_send_garbage_do_no_harm(launch):
    server = launch(tp=1).wait_ready()
    name = "\0octavo-probe-%d-0" % server.pid
    hanging = []
    for i in range(100):
        s = socket.socket(socket.AF_UNIX)
        s.connect(name)  # waits for a place
        s.sendall(b"GET /li" if i % 2 else os.urandom(200))
        hanging.append(s)
    assert ask((server.pid, 0), "/live")[0] == 200
    server.check_healthy()
    for s in hanging:
        s.close()
    assert server.workers()[0]["restarts"] == 0
    server.stop()


def test_a_taken_probe_port_is_a_wrong_set_up_that_says_which(launch):
    base = free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 1))
        taken.listen()
        server = launch("--probe-port", base, tp=2)
        assert server.wait_end() == 2, server.log_end()
        assert f"rank 1: probe port 127.0.0.1:{base + 1}: expected to listen there" in server.log(), server.log_end()
    server.check_clean()


def test_a_restarted_rank_answers_at_the_same_place(launch):
    base = free_ports(2)
    server = launch("--probe-port", base, tp=2).wait_ready()
    old = state(base + 1)["pid"]
    os.kill(old, signal.SIGKILL)

    def again():
        try:
            s = state(base + 1)
        except OSError:
            return False
        return s["pid"] != old and s["state"] == "ready"
    eventually(again, 60, "a new pid at the old port", server)
    eventually(lambda: server.status("/health/ready") == 200, 30, "ready", server)
    assert state((server.pid, 1))["pid"] == state(base + 1)["pid"]
    server.stop()


def test_the_command_says_one_line_each_and_exits_for_scripts(launch):
    base = free_ports(3)
    server = launch("--probe-port", base, tp=2).wait_ready()
    for what in ("live", "ready", "canary"):
        code, lines, _ = probe("--url", server.url, what)
        assert code == YES and len(lines) == 1 and re.match(rf"coordinator {what}: yes \(200\)", lines[0]), lines
    for what in ("live", "ready", "progress"):
        for how in (["--pid", server.pid], ["--port-base", base, "--tp", 2]):
            code, lines, _ = probe("--all", *how, what)
            assert code == YES and lines == [f"rank {r} {what}: yes (200) ready" for r in (0, 1)]
    code, lines, _ = probe("--port-base", base, "--rank", 2, "live")
    assert code == SILENT and lines == ["rank 2 live: no answer: Connection refused"]
    code, lines, _ = probe("--port-base", base, "--tp", 3, "--all", "ready")
    assert code == SILENT and len(lines) == 3
    server.stop()
    assert probe("--url", server.url, "ready")[0] == SILENT
    assert probe("--url", server.url, "canary")[0] == SILENT
    assert probe("--pid", server.pid, "--all", "live")[0] == SILENT


def test_a_canary_of_every_rank_is_a_step_that_it_took_part_in(launch):
    server = launch(tp=2).wait_ready()
    for how, ranks in ((["--all"], (0, 1)), (["--rank", 1], (1,))):
        code, lines, _ = probe("--url", server.url, "--pid", server.pid, *how, "canary")
        assert code == YES and len(lines) == len(ranks), lines
        for rank, line in zip(ranks, lines):
            found = re.fullmatch(r"rank (\d) canary: yes, step (\d+) after (\d+)", line)
            assert found and int(found[1]) == rank and int(found[2]) > int(found[3]), line
    server.signal(signal.SIGSTOP)
    try:
        code, lines, _ = probe("--url", server.url, "--pid", server.pid, "--timeout", 1, "--all", "canary")
        assert code == SILENT and len(lines) == 3 and all("no" in l for l in lines), lines
    finally:
        server.signal(signal.SIGCONT)
    server.stop()


def test_the_command_says_no_while_loading_waits(launch, tmp_path):
    """A start that waits for device memory: the coordinator lives, is not ready, and has no workers."""
    devices = tmp_path / "devices"
    devices.write_text("devices 1\ndevice 0 unreadable Timeout\n")
    server = launch("--device-memory", f"script:{devices}", tp=1).wait_port()
    assert probe("--url", server.url, "live")[0] == YES
    code, lines, _ = probe("--url", server.url, "ready")
    assert code == NO and lines[0].startswith("coordinator ready: no (503)"), lines
    assert probe("--pid", server.pid, "--all", "ready")[0] == SILENT
    server.stop()


def test_the_canary_needs_the_key(launch, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    server = launch("--api-key-file", keys, tp=1)
    server.wait_port()
    eventually(lambda: server.status("/health/ready") == 200, 60, "ready", server)
    assert probe("--url", server.url, "canary")[0] == NO
    assert probe("--url", server.url, "--api-key-file", keys, "canary")[0] == YES
    server.stop()


@pytest.mark.parametrize("options", [
    [], ["alive"], ["live", "ready"], ["--rank", 1, "--all", "live"], ["--rank", 99, "live"],
    ["--all", "--port-base", 9000, "live"], ["--url", "ftp://x", "live"], ["--timeout", 0, "live"],
    ["--api-key-file", "/nowhere", "canary"]], ids=str)
def test_a_question_put_wrongly_is_2_and_a_sentence(options):
    code, lines, complaint = probe(*options)
    assert code == WRONG and not lines and complaint.startswith("octavo probe: ")
