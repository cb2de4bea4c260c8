"""The scripts: clean under shellcheck, helpful, and the quickstart does what it says."""
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from octavo import BUILD, CAPITAL_ANSWER, CASES, SOURCE, TP, visible

def is_shell(path):
    with open(path, "rb") as f:
        first = f.readline()
    return path.suffix == ".sh" or (first.startswith(b"#!") and (b"bash" in first or first.rstrip().endswith(b"/sh")))


SCRIPTS = sorted(str(p.relative_to(SOURCE)) for folder in ("deploy", "tests", ".ci") for p in (SOURCE / folder).rglob("*") if p.is_file() and is_shell(p))


def run(*command, timeout=300, **more):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, **more)


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script):
    p = run("shellcheck", "-x", script, cwd=SOURCE)
    assert p.returncode == 0, p.stdout


@pytest.mark.parametrize("script", [s for s in SCRIPTS if not s.endswith(".sh")])
def test_programs_have_the_run_bit(script):
    assert os.access(SOURCE / script, os.X_OK)


@pytest.mark.parametrize("script", ["deploy/quickstart", "deploy/bundle", "deploy/ask", "deploy/restart", "tests/run"])
def test_help_is_given_and_an_unknown_option_is_refused(script):
    p = run(SOURCE / script, "--help")
    assert p.returncode == 0 and "usage:" in p.stdout
    p = run(SOURCE / script, "--nonsense")
    assert p.returncode == 2 and p.stderr.strip()


def test_the_table_of_packages_reads():
    """Group, name or names, purpose; this machine has one of each name of the groups build and test."""
    rows = [l.split(None, 2) for l in (SOURCE / "deploy/packages").read_text().splitlines() if l.strip() and not l.startswith("#")]
    assert rows and all(len(r) == 3 and r[0] in ("build", "test", "soak", "bundle") for r in rows)
    for group, names, _ in rows:
        if group not in ("build", "test"):
            continue
        states = [run("dpkg-query", "-W", "-f=${db:Status-Abbrev}", n).stdout for n in names.split("|")]
        assert any(s.startswith("ii") for s in states), f"none of {names} is installed"


@pytest.fixture
def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(text):
    return [b for b in re.split(r"^> .*$", text, flags=re.M)[1:]]


def test_quickstart_answers_two_questions_and_leaves_nothing(free_port, tmp_path):
    for _ in range(2):
        p = run(SOURCE / "deploy/quickstart", "--once", "--port", free_port, "--tp", TP, cwd=tmp_path, env=os.environ | dict(TEST_MARK=str(tmp_path)))
        assert p.returncode == 0, p.stdout + p.stderr
        first, second = answers(p.stdout)
        assert first.strip().startswith(CAPITAL_ANSWER)
        assert second.strip().startswith(visible(CASES["photosynthesis"]["greedy_text"]))
        for block in (first, second):
            assert re.search(r"first token after \d+ ms, \d+ tokens in [\d.]+ s, \d+ tokens/s", block)
        assert "steady, median" in second
        left = [e for e in Path("/proc").glob("[0-9]*/environ") if marked(e, str(tmp_path))]
        assert not left, f"expected no process left, found {left}"


def marked(environ, mark):
    try:
        return f"TEST_MARK={mark}".encode() in environ.read_bytes().split(b"\0")
    except OSError:
        return False


def test_a_bundle_runs_where_there_is_only_the_c_library(tmp_path):
    """In a root of its own that holds the bundle and the C library, and nothing else."""
    if os.geteuid() != 0:
        pytest.skip("changing the root needs root")
    root = tmp_path / "root"
    p = run(SOURCE / "deploy/bundle", "--build", BUILD, root / "opt/elsewhere")
    assert p.returncode == 0, p.stdout + p.stderr
    wanted = re.findall(r"(/\S+/(?:ld-linux-\S+|lib(?:c|m|dl|rt|pthread|resolv)\.so\.\d+))", run("ldd", BUILD / "octavo").stdout + run("ldd", BUILD / "octavo-worker").stdout)
    for library in set(wanted):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    carried = [l.name for l in (root / "opt/elsewhere/libs").iterdir()]
    ours = [n for n in carried if re.match(r"(ld-linux|lib(c|m|dl|rt|pthread|resolv|util)\.so)", n)]
    assert not ours, f"expected the machine's own C library to be used, found {ours} in the bundle"
    # /proc tells a program where it stands; the mount goes with its name space.
    (root / "proc").mkdir()
    inside = ["unshare", "--mount", "sh", "-c", 'mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"', root]
    p = run(*inside, "/opt/elsewhere/octavo", "serve", "--help")
    assert p.returncode == 0 and "--model" in p.stdout + p.stderr, p.stderr
    p = run(*inside, "/opt/elsewhere/octavo-worker", "--help")
    assert p.returncode == 0, p.stderr


def test_a_bundle_serves_the_demonstration_model_from_another_folder(tmp_path, launch):
    p = run(SOURCE / "deploy/bundle", "--build", BUILD, tmp_path / "bundle")
    assert p.returncode == 0, p.stdout + p.stderr
    server = launch(tp=2, program=tmp_path / "bundle/octavo").wait_ready()
    server.check_healthy()
    for script in ("probe", "restart"):  # they find the program beside them
        p = run(tmp_path / "bundle/deploy" / script, *(["ready"] if script == "probe" else ["--rank", "1"]), "--url", server.url)
        assert p.returncode == 0 and "yes" in p.stdout, p.stdout + p.stderr
    server.stop()


def test_quickstart_refuses_a_taken_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        p = run(SOURCE / "deploy/quickstart", "--once", "--port", s.getsockname()[1])
    assert p.returncode == 2 and "taken" in p.stderr
