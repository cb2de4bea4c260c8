"""Processes as the operator sees them: pinning, threads, exit codes, options, ports."""
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from octavo import BUILD, SOURCE, PATIENCE, eventually


def run(*arguments, env=None):
    """A program that ends by itself: (exit code, output, complaints)."""
    p = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, timeout=60 * PATIENCE, env=os.environ | (env or {}), stdin=subprocess.DEVNULL)
    return p.returncode, p.stdout, p.stderr


def allowed(pid):
    return os.sched_getaffinity(pid)


def test_workers_stay_within_the_coordinators_cores(launch):
    server = launch(tp=8).wait_ready()
    mine = allowed(server.pid)
    for w in server.workers():
        text = Path(f"/proc/{w['pid']}/status").read_text()
        assert re.search(r"^Cpus_allowed:", text, re.M)
        assert allowed(w["pid"]) and allowed(w["pid"]) <= mine
    server.stop()


def test_workers_of_a_coordinator_on_one_core_stay_on_it(launch):
    one = {max(os.sched_getaffinity(0))}
    server = launch(tp=2, cpus=one).wait_ready()
    for w in server.workers():
        for task in os.listdir(f"/proc/{w['pid']}/task"):
            assert allowed(int(task)) == one
    server.check_healthy()
    server.stop()


def test_a_worker_has_a_step_thread_and_a_control_thread(launch):
    server = launch(tp=1).wait_ready()
    assert len(os.listdir(f"/proc/{server.workers()[0]['pid']}/task")) >= 2
    server.stop()


def test_a_worker_started_by_hand_says_so_and_ends():
    code, _, err = run(BUILD / "octavo-worker")
    assert code == 2 and err.strip()


@pytest.mark.smoke
def test_help_names_every_option_and_ends_with_0():
    code, out, err = run(BUILD / "octavo", "serve", "--help")
    assert code == 0
    for option in ("--model", "--served-model-name", "--tp", "--device", "--host", "--port", "--ctx", "--max-seqs", "--api-key-file"):
        assert option in out + err


@pytest.mark.smoke
@pytest.mark.parametrize("options,named", [
    (["--nonsense"], "nonsense"), (["--port", "70000"], "70000"), (["--port", "x"], "port"), (["--tp", "0"], "tp"), (["--tp", "3"], "3"),
    (["--ctx"], "ctx"), (["--model", "/nowhere/no.gguf"], "/nowhere/no.gguf"), (["--model", "/etc/hostname"], "/etc/hostname"),
    (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"), (["--device", "abacus"], "abacus"), (["stray"], "stray"), (["--host", "not an address"], "not an address")], ids=" ".join)
def test_a_wrong_set_up_is_one_sentence_and_exit_code_2(options, named):
    code, out, err = run(BUILD / "octavo", "serve", *([] if "--port" in options else ["--port", "0"]), *options)
    assert code == 2, f"expected exit code 2, found {code}: {err}"
    assert named in err, f"expected a sentence that names {named!r}, found {err}"


def test_an_unknown_command_is_refused():
    code, _, err = run(BUILD / "octavo", "sing")
    assert code == 2 and "sing" in err


def test_a_taken_port_is_named_and_exit_code_is_2(launch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        code, _, err = run(BUILD / "octavo", "serve", "--port", port, "--tp", 1)
    assert code == 2 and str(port) in err


def test_options_come_from_the_environment_too(launch):
    server = launch(tp=1, env=dict(OCTAVO_SERVED_MODEL_NAME="pocket", OCTAVO_CTX="512")).wait_ready()
    assert '"pocket"' in server.http("/v1/models")[2]
    status, _, text = server.http("/v1/completions", dict(prompt=[321] * 512, max_tokens=1))
    assert status == 400 and "512" in text
    server.stop()


def test_the_command_line_wins_over_the_environment(launch):
    server = launch("--served-model-name", "folio", tp=1, env=dict(OCTAVO_SERVED_MODEL_NAME="pocket")).wait_ready()
    assert '"folio"' in server.http("/v1/models")[2]
    server.stop()


def test_a_model_elsewhere_is_served_under_its_file_name(launch, tmp_path):
    model = tmp_path / "other name.gguf"
    os.link(SOURCE / "tests/models/tiny.gguf", model) if os.stat(tmp_path).st_dev == os.stat(SOURCE).st_dev else os.symlink(SOURCE / "tests/models/tiny.gguf", model)
    server = launch("--model", model, tp=1).wait_ready()
    assert '"other name.gguf"' in server.http("/v1/models")[2]
    server.stop()


def test_two_servers_start_at_the_same_moment(launch):
    servers = [launch(tp=2), launch(tp=2)]
    for s in servers:
        s.wait_ready()
    assert servers[0].port != servers[1].port
    for s in servers:
        s.check_healthy()
        s.stop()


def test_loading_writes_progress_as_key_and_value(launch):
    server = launch(tp=1).wait_ready()
    assert re.search(r"bytes=\d+", server.log())
    assert "\r" not in server.log() and "\x1b" not in server.log()
    server.stop()


def test_the_log_file_has_one_event_a_line(launch):
    server = launch(tp=2).wait_ready()
    server.check_healthy()
    server.stop()
    lines = server.log().splitlines()
    odd = [l for l in lines if not re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (debug|info|warn|error) \S+ \S+", l)]
    assert lines and len(odd) <= 40, f"expected lines of time, level, who and event, found {odd[:5]}"
    assert len(lines) < 200, "information is for events of a life, not for tokens"


def test_hang_up_goes_on_serving(launch):
    server = launch(tp=1).wait_ready()
    server.signal(signal.SIGHUP)
    server.check_healthy()
    server.stop()
