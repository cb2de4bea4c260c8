"""deploy/restart against live servers: nothing is lost, it can be run again, and its exit codes say what went wrong."""
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
import uuid
from pathlib import Path

import octavo
import pytest
from octavo import BUILD, CAPITAL, CAPITAL_ANSWER, PATIENCE, PHOTOSYNTHESIS, SOURCE, Stream, body_of, eventually, join_all, question, stream_all

RESTART = SOURCE / "deploy/restart"


def run(*options, env=None, timeout=120):
    """(exit code, all it said) of deploy/restart."""
    p = subprocess.run([RESTART, *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                       timeout=timeout * PATIENCE, stdin=subprocess.DEVNULL, env=os.environ | (env or {}))
    return p.returncode, p.stdout


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def stub(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Restarted(octavo.Server):
    """A server that deploy/restart starts and stops, known by its pid file."""

    def __init__(self, folder, tp=2):
        self.tp, self.port, self.seen = tp, free_port(), set()
        self.mark = uuid.uuid4().hex
        self.pid_file, self.log_path = folder / "octavo.pid", folder / "octavo.log"
        self.shm_before = set(os.listdir("/dev/shm"))
        self.options = ["--pid-file", self.pid_file, "--log", self.log_path, "--octavo", BUILD / "octavo", "--url", self.url]
        self.command = [BUILD / "octavo", "serve", "--tp", tp, "--port", self.port]

    def restart(self, *more, env=None, command=None):
        return run(*self.options, *more, "--", *(command or self.command), env={"TEST_MARK": self.mark} | (env or {}))

    @property
    def pid(self):
        return int(self.pid_file.read_text().split()[0])

    def stop(self):
        os.kill(self.pid, signal.SIGTERM)
        self.check_clean(30)

    def destroy(self):
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@pytest.fixture
def restarted(tmp_path):
    servers = []

    def make(**more):
        servers.append(Restarted(tmp_path, **more))
        return servers[-1]
    yield make
    for s in servers:
        s.destroy()


class Asker(threading.Thread):
    """Asks one question after the other until told to stop. A refusal (503) or a closed door is tried again, as any
    good client does by itself; every question must get its answer."""

    def __init__(self, server, patient):
        super().__init__(daemon=True)
        self.server, self.patient = server, patient
        self.answers, self.retries, self.wrong, self.enough = 0, 0, [], False

    def once(self):
        try:
            status, headers, text = self.server.http("/v1/chat/completions", body_of(question(CAPITAL, max_tokens=16)), timeout=60)
        except OSError as e:  # refused, or closed before it was read: a reset comes from the kernel when the door falls shut
            reason = getattr(e, "reason", e)
            return None if isinstance(reason, ConnectionError) else repr(e)
        if status == 503 and headers["Retry-After"]:
            return None
        return json.loads(text)["choices"][0]["message"]["content"] if status == 200 else f"{status} {text}"

    def run(self):
        while not self.enough:
            found = self.once()
            while found is None and self.patient and not self.enough:
                self.retries += 1
                time.sleep(0.02)
                found = self.once()
            if found == CAPITAL_ANSWER:
                self.answers += 1
            elif not (self.enough and found is None):
                self.wrong.append(found)
                return


def ask_during(server, n, patient, act):
    """What act() returns, and n askers that got answers before, during and after it."""
    askers = [Asker(server, patient) for _ in range(n)]
    for a in askers:
        a.start()
    busy = lambda floor: eventually(lambda: all(a.answers > f or a.wrong for a, f in zip(askers, floor)), 60, "an answer for each client")
    busy([0] * n)
    value = act()
    busy([a.answers for a in askers])
    for a in askers:
        a.enough = True
    join_all(askers, 60)
    assert not any(a.wrong for a in askers), [a.wrong for a in askers] + [server.log_end()]
    return value, askers


def test_one_rank_is_replaced_under_load_and_no_request_fails(launch):
    server = launch(tp=4).wait_ready()
    request = question(PHOTOSYNTHESIS, max_tokens=150, extra_body=dict(ignore_eos=True))
    alone = Stream(server, request)
    stream_all([alone])
    before = {w["rank"]: w["pid"] for w in server.workers()}
    streams = [Stream(server, request) for _ in range(4)]
    for s in streams:
        s.start()
    eventually(lambda: all(s.deltas >= 3 for s in streams), 60, "three pieces on every stream", server)
    (code, said), _ = ask_during(server, 2, False, lambda: run("--rank", 2, "--url", server.url, "--octavo", BUILD / "octavo"))
    assert code == 0, said
    assert re.search(rf"rank 2: replaced, process {before[2]} by \d+, in ", said) and "canary: yes" in said
    join_all(streams)
    assert [(s.error, s.text) for s in streams] == [(None, alone.text)] * 4, server.log_end()
    after = {w["rank"]: w["pid"] for w in server.workers()}
    assert [r for r in after if after[r] != before[r]] == [2]
    server.stop()


@pytest.mark.smoke
def test_restarts_that_were_asked_for_do_not_count_towards_giving_up(launch):
    server = launch("--restarts-max", 1, tp=2).wait_ready()
    ask = lambda: run("--rank", 1, "--url", server.url, "--octavo", BUILD / "octavo")
    for _ in range(3):
        code, said = ask()
        assert code == 0, said
    row = server.workers()[1]
    assert row["restarts"] == row["restarts_by_cause"]["asked"] == 3, row
    os.kill(row["pid"], signal.SIGKILL)  # and neither do they make deaths be forgotten
    eventually(lambda: "cause=exit" in server.log(), 60, "a death that was noticed", server)
    for _ in range(2):
        assert ask()[0] == 0
    os.kill(server.workers()[0]["pid"], signal.SIGKILL)
    assert server.wait_end() == 1 and "2 restarts within" in server.log(), server.log_end()
    server.check_clean()


def test_with_keys_a_rank_is_replaced_for_nobody_without_one(launch, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    server = launch("--api-key-file", keys, tp=2).wait_port()
    eventually(lambda: server.status("/health/ready") == 200, 60, "ready", server)
    to = ["--rank", 1, "--url", server.url, "--octavo", BUILD / "octavo"]
    code, said = run(*to)
    assert code == 1 and "401" in said, said
    assert "died" not in server.log()
    code, said = run(*to, "--api-key-file", keys)
    assert code == 0 and "canary: yes" in said, said
    server.stop()


def test_a_rank_that_is_none_and_a_server_that_is_not_there(launch):
    server = launch(tp=1).wait_ready()
    assert run("--rank", 1, "--url", server.url, "--octavo", BUILD / "octavo")[0] == 2
    server.stop()
    code, said = run("--rank", 0, "--url", server.url, "--octavo", BUILD / "octavo")
    assert code == 1 and "no answer" in said


def test_a_restart_under_load_loses_no_request(restarted):
    """Running streams end before the stop; clients that try again when refused get every answer."""
    server = restarted()
    code, said = server.restart()
    assert code == 0, said
    first = server.pid
    request = question(PHOTOSYNTHESIS, max_tokens=200, extra_body=dict(ignore_eos=True))
    alone = Stream(server, request)
    stream_all([alone])
    streams = [Stream(server, request) for _ in range(4)]
    for s in streams:
        s.start()
    eventually(lambda: all(s.deltas >= 3 for s in streams), 60, "three pieces on every stream", server)
    (code, said), askers = ask_during(server, 3, True, server.restart)
    assert code == 0, said
    join_all(streams)
    assert [(s.error, s.text) for s in streams] == [(None, alone.text)] * 4, server.log_end()
    assert server.pid != first and first not in server.processes()
    assert sum(a.retries for a in askers) > 0, "expected somebody to be refused meanwhile"
    server.stop()


def test_it_can_be_run_again_from_any_state(restarted):
    server = restarted()
    for state in ("never started", "running", "killed"):
        if state == "killed":
            old = server.pid
            os.kill(old, signal.SIGKILL)
            eventually(lambda: not server.processes(), 20, "workers that go with their coordinator", server)
        code, said = server.restart()
        assert code == 0, said
        assert ("not running" in said) == (state != "running"), said
        server.check_healthy()
    server.stop()


def test_two_at_once_are_one_after_the_other(restarted):
    server = restarted()
    said = []
    both = [threading.Thread(target=lambda: said.append(server.restart())) for _ in range(2)]
    for t in both:
        t.start()
    for t in both:
        t.join(120)
    assert [code for code, _ in said] == [0, 0], said
    assert sorted("not running" in text for _, text in said) == [False, True], said
    serving = [p for p in server.processes() if Path(f"/proc/{p}/comm").read_text() == "octavo\n"]
    assert serving == [server.pid]
    server.stop()


def test_a_new_version_put_beside_a_running_one_does_not_reach_it(restarted, tmp_path):
    """As README says: another folder, the link, a restart. A rank that dies in between comes from the old folder."""
    server, link = restarted(), tmp_path / "current"
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        for program in ("octavo", "octavo-worker"):
            shutil.copy(BUILD / program, tmp_path / version)
    link.symlink_to("1")
    server.command = [link / "octavo", "serve", "--tp", 2, "--port", server.port, "--model", SOURCE / "tests/models/tiny.gguf"]
    folders = lambda: {Path(os.readlink(f"/proc/{p}/exe")).parent.name for p in server.processes()}
    assert server.restart()[0] == 0
    (tmp_path / "next").symlink_to("2")
    os.replace(tmp_path / "next", link)
    os.kill(server.workers()[1]["pid"], signal.SIGKILL)
    eventually(lambda: "recovered" in server.log(), 60, "a recovery", server)
    assert folders() == {"1"}
    code, said = server.restart()
    assert code == 0 and folders() == {"2"}, said
    server.stop()


def test_a_pid_that_belongs_to_another_by_now_is_left_alone(restarted):
    server = restarted()
    other = subprocess.Popen(["sleep", "1000"])
    try:
        for text in (f"{other.pid}\n", f"{other.pid} 12345\n"):
            server.pid_file.write_text(text)
            code, said = server.restart("--dry-run")
            assert code == 0 and "not running" in said, said
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_server_that_does_not_hear_is_killed_in_the_end(restarted):
    server = restarted()
    assert server.restart()[0] == 0
    old = server.pid
    os.kill(old, signal.SIGSTOP)
    code, said = server.restart("--stop-timeout", 1)
    assert code == 0 and "asking again" in said, said
    assert server.pid != old and old not in server.processes()
    server.stop()


def test_a_dry_run_does_nothing(restarted):
    server = restarted()
    assert server.restart()[0] == 0
    before = server.processes()
    code, said = server.restart("--dry-run")
    assert code == 0 and f"'kill' '-TERM' '{server.pid}'" in said and "'guard'" in said and "'serve'" in said, said
    assert server.processes() == before
    server.stop()


def test_memory_that_does_not_come_back_is_3_and_nothing_is_started(restarted, tmp_path):
    server = restarted()
    devices = tmp_path / "devices"
    devices.write_text("devices 1\ndevice 0 lost Xid 79, it fell off the bus\n")
    code, said = server.restart(env={"OCTAVO_DEVICE_MEMORY": f"script:{devices}"})
    assert code == 3 and "Xid 79" in said, said
    assert not server.processes() and not server.pid_file.exists()


def test_a_server_that_does_not_start_is_1_and_its_log_is_named(restarted):
    server = restarted()
    code, said = server.restart(command=[BUILD / "octavo", "serve", "--port", server.port, "--tp", 3])
    assert code == 1 and str(server.log_path) in said, said
    assert "--tp" in server.log()


def test_no_token_is_4(restarted, tmp_path):
    server = restarted()
    mute = stub(tmp_path / "bin/octavo", f'#!/bin/sh\nfor last; do :; done\n[ "$1 $last" = "probe canary" ] && exit 1\nexec {BUILD}/octavo "$@"\n')
    code, said = server.restart("--octavo", mute)
    assert code == 4 and "no token" in said, said
    server.stop()


@pytest.mark.parametrize("options", [["--pid-file", "/nowhere/x", "--"], ["--rank", "x"], ["--unit"], ["--", "true"], ["--hosts", "/nowhere"], ["--octavo", "/nowhere"]], ids=" ".join)
def test_asked_wrongly_is_2_and_a_sentence(options):
    code, said = run(*options)
    assert code == 2 and said.startswith("restart: "), said


# ---- units and hosts, by stand-ins for systemctl and ssh -------------------------------------------------


@pytest.fixture
def stand_ins(tmp_path):
    """systemctl, ssh and octavo that write down how they were called; a file `fail-WORD` makes WORD fail."""
    calls = tmp_path / "calls"
    bin = tmp_path / "bin"
    note = f'echo "${{0##*/}} $*" >>{calls}\n'
    stub(bin / "systemctl", f'#!/bin/sh\n{note}[ ! -e {tmp_path}/fail-"$1" ]\n')
    stub(bin / "octavo", f'#!/bin/sh\n{note}for last; do :; done\n[ "${{HOST:-none}}" != "$(cat {tmp_path}/ill-host 2>/dev/null)" ] || [ "$last" != canary ] || exit 1\n[ ! -e {tmp_path}/fail-"$1" ]\n')
    # The words after the options and the host go to a shell, as ssh's do.
    stub(bin / "ssh", f'#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done\necho "ssh $1" >>{calls}\n'
                      f'[[ ! -e {tmp_path}/unreachable-$1 ]] || exit 255\nHOST=$1 exec bash -c "$2"\n')

    def go(*options):
        calls.write_text("")
        code, said = run(*options, env={"PATH": f"{bin}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(tmp_path)})
        return code, said, calls.read_text().splitlines()
    go.folder, go.octavo = tmp_path, bin / "octavo"
    return go


def test_a_unit_is_stopped_waited_for_started_and_asked_in_that_order(stand_ins):
    code, said, calls = stand_ins("--unit", "other.service", "--octavo", stand_ins.octavo, "--url", "http://x:1")
    assert code == 0, said
    assert calls == ["systemctl stop other.service", "octavo guard --reclaim-timeout 60", "systemctl reset-failed other.service",
                     "systemctl start other.service", "octavo probe --url http://x:1 ready", "systemctl is-active --quiet other.service",
                     "octavo probe --url http://x:1 canary"]


@pytest.mark.parametrize("word,code,last", [("stop", 1, "systemctl stop"), ("guard", 3, "octavo guard"), ("start", 1, "systemctl start"), ("is-active", 1, "systemctl is-active")])
def test_a_unit_that_fails_on_the_way_is_not_taken_further(stand_ins, word, code, last):
    (stand_ins.folder / f"fail-{word}").touch()
    found, said, calls = stand_ins("--octavo", stand_ins.octavo)
    assert found == code and calls[-1].startswith(last), (said, calls)


def hosts_file(folder):
    path = folder / "hosts"
    path.write_text("# boxes\nalpha\n\nbeta  the slow one\ngamma")
    return path


def test_boxes_are_taken_one_by_one(stand_ins):
    code, said, calls = stand_ins("--hosts", hosts_file(stand_ins.folder), "--octavo", stand_ins.octavo, "--url", "http://127.0.0.1:8 x")
    assert code == 0, said
    assert [c for c in calls if c.startswith("ssh")] == ["ssh alpha", "ssh beta", "ssh gamma"]
    assert calls[-1] == "octavo probe --url http://127.0.0.1:8 x canary" and len(calls) == 3 * 8
    assert "done: alpha beta gamma" in said


def test_the_first_box_without_a_token_is_the_last_one_touched(stand_ins):
    (stand_ins.folder / "ill-host").write_text("beta")
    code, said, calls = stand_ins("--hosts", hosts_file(stand_ins.folder), "--octavo", stand_ins.octavo)
    assert code == 4 and "beta: failed with code 4; not touched: gamma" in said, said
    assert [c for c in calls if c.startswith("ssh")] == ["ssh alpha", "ssh beta"]


def test_a_box_that_cannot_be_reached_ends_the_row(stand_ins):
    (stand_ins.folder / "unreachable-alpha").touch()
    code, said, calls = stand_ins("--hosts", hosts_file(stand_ins.folder), "--octavo", stand_ins.octavo)
    assert code == 255 and calls == ["ssh alpha"] and "not touched: beta gamma" in said, said


def test_one_rank_of_every_box(stand_ins):
    code, said, calls = stand_ins("--hosts", hosts_file(stand_ins.folder), "--octavo", stand_ins.octavo, "--rank", 3)
    assert code == 0, said
    assert sum(c.startswith("octavo restart ") and "--rank 3" in c for c in calls) == 3 and not any(c.startswith("systemctl") for c in calls)


def test_a_dry_run_of_a_row_asks_every_box_and_does_nothing(stand_ins):
    code, said, calls = stand_ins("--hosts", hosts_file(stand_ins.folder), "--octavo", stand_ins.octavo, "--dry-run")
    assert code == 0 and said.count("would run: 'timeout' '120' 'systemctl' 'stop'") == 3, said
    assert calls == ["ssh alpha", "ssh beta", "ssh gamma"]
