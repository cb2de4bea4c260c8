"""The unit under a real systemd, a manager of its own in a mount name space of its own: does it start, restart, wait and end it as we want?

Needs root and control groups that can be written; skipped elsewhere. What needs a whole machine is left out of the
unit (users, file system), what it says about processes, signals, codes and times is not.
"""
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from octavo import BUILD, PATIENCE, PHOTOSYNTHESIS, SOURCE, Stream, eventually, join_all, question
from faults.test_restart import Restarted, run

LEFT_OUT = r"^(User|DynamicUser|Documentation|CacheDirectory|RemoveIPC|After|Wants|OOMScoreAdjust|LimitMEMLOCK|Protect\w+|Private\w+|Restrict[A-Z]\w+(?<!Status)|LockPersonality|\w*Capabilit\w+|SystemCall\w+|NoNewPrivileges)=.*\n"
TARGETS = ("default", "basic", "shutdown", "exit", "sockets", "timers", "paths")


class Manager:
    def __init__(self, folder):
        self.folder, self.units, self.run = folder, folder / "units", folder / "run"
        self.units.mkdir(), self.run.mkdir(mode=0o700)
        for t in TARGETS:
            (self.units / f"{t}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        self.log = folder / "manager.log"
        self.groups = [p / f"octavo-test-{os.getpid()}" for p in map(Path, ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified", "/sys/fs/cgroup")) if (p / "cgroup.procs").exists()]
        join = ""
        for g in self.groups:
            g.mkdir(exist_ok=True)
            join += f"echo $$ >{g}/cgroup.procs\n"
        # systemd wants to see that the machine was started by one.
        script = f"{join}mkdir -p /run/systemd && mount -t tmpfs none /run/systemd && mkdir /run/systemd/system && exec /lib/systemd/systemd --user"
        self.process = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sh", "-c", script], env=self.env() | {"SYSTEMD_LOG_TARGET": "console"},
                                        stdin=subprocess.DEVNULL, stdout=open(self.log, "wb"), stderr=subprocess.STDOUT, start_new_session=True)

    def env(self):
        return {"XDG_RUNTIME_DIR": str(self.run), "SYSTEMD_UNIT_PATH": str(self.units), "PATH": os.environ["PATH"], "HOME": str(self.folder)}

    def ctl(self, *words, timeout=60):
        return subprocess.run(["systemctl", "--user", "--no-pager", *words], capture_output=True, text=True, env=self.env(), timeout=timeout * PATIENCE)

    def is_up(self):
        deadline = time.monotonic() + 10 * PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.ctl("is-active", "default.target").stdout == "active\n":
                return True
            time.sleep(0.05)
        return False

    def end(self):
        self.process.kill()  # its units are stopped
        self.process.wait()
        for g in self.groups:
            for folder, _, _ in os.walk(g, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    pass


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    if os.geteuid() != 0 or not Path("/lib/systemd/systemd").exists() or not shutil.which("unshare"):
        pytest.skip("a systemd of one's own needs root, systemd and unshare")
    try:
        m = Manager(tmp_path_factory.mktemp("manager"))
    except OSError as e:
        pytest.skip(f"no control groups for a systemd of one's own: {e}")
    try:
        if not m.is_up():
            pytest.skip(f"no systemd of one's own here: {m.log.read_text(errors='replace')[-300:]}")
        yield m
    finally:
        m.end()


class Unit(Restarted):
    """octavo.service as it is in the tree, in that manager, with the programs of this build."""

    def __init__(self, manager, folder, changes=(), **options):
        super().__init__(folder)
        self.manager, self.name, self.process = manager, f"octavo-{self.mark[:8]}.service", None
        text = re.sub(LEFT_OUT, "", (SOURCE / "deploy/systemd/octavo.service").read_text(), flags=re.M)
        text = text.replace("/opt/octavo/octavo ", f"{BUILD}/octavo ").replace("/etc/octavo/octavo.env", str(folder / "env"))
        for key, value in changes:
            text, n = re.subn(rf"^{key}=.*$", f"{key}={value}", text, flags=re.M)
            assert n == 1, key
        (manager.units / self.name).write_text(text)
        self.set(**options)
        assert manager.ctl("daemon-reload").returncode == 0

    def set(self, **options):
        env = dict(TEST_MARK=self.mark, OCTAVO_TP=self.tp, OCTAVO_PORT=self.port, OCTAVO_LOG_FILE=self.log_path) | options
        (self.log_path.parent / "env").write_text("".join(f"{k}={v}\n" for k, v in env.items()))

    def ctl(self, verb, **more):
        return self.manager.ctl(verb, self.name, **more)

    def show(self, key):
        return self.manager.ctl("show", self.name, "-p", key, "--value").stdout.strip()

    def started(self):
        p = self.ctl("start")
        assert p.returncode == 0, p.stderr + self.manager.ctl("status", self.name).stdout
        return self

    @property
    def pid(self):
        return int(self.show("MainPID"))

    def restarted(self, old):
        """Another process is up, by the manager's doing."""
        eventually(lambda: self.show("SubState") == "running" and self.pid not in (0, old), 60, "a server that was started again", self)

    def log(self):
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def stop(self):
        assert self.ctl("stop").returncode == 0
        assert self.show("Result") == "success" and self.show("ActiveState") == "inactive"
        self.check_clean()


@pytest.fixture
def unit(manager, tmp_path):
    units = []

    def make(*changes, **options):
        units.append(Unit(manager, tmp_path, changes, **options))
        return units[-1]
    yield make
    for u in units:
        u.ctl("stop")
        u.destroy()


def test_started_means_that_a_token_has_come(unit):
    u = unit().started()
    assert u.status("/health/ready") == 200 and " canary generation=1 " in u.log()
    assert u.show("StatusText") == "ready: 2 ranks, 0 running, 0 waiting"
    u.check_healthy()
    u.stop()


def test_a_killed_coordinator_is_started_again_and_no_worker_is_left(unit):
    u = unit().started()
    old, workers = u.pid, {w["pid"] for w in u.workers()}
    os.kill(old, signal.SIGKILL)
    u.restarted(old)
    assert not workers & u.processes()
    u.check_healthy()
    u.stop()


def test_a_loop_that_does_not_turn_is_killed_by_the_watchdog_and_started_again(unit):
    u = unit(("WatchdogSec", "1")).started()
    old = u.pid
    os.kill(old, signal.SIGSTOP)
    u.restarted(old)
    u.check_healthy()
    u.stop()


def test_a_drain_that_takes_longer_than_the_managers_bound_is_not_cut(unit):
    u = unit(("TimeoutStopSec", "1")).started()
    stream = Stream(u, question(PHOTOSYNTHESIS, max_tokens=1500, extra_body=dict(ignore_eos=True)))
    stream.start()
    eventually(lambda: stream.deltas >= 3, 60, "three pieces", u)
    start = time.monotonic()
    u.stop()
    join_all([stream])
    assert stream.error is None and stream.reason == "length", stream.error
    assert time.monotonic() - start > 1, "expected a drain that outlives the bound"


def test_a_start_that_takes_longer_than_the_managers_bound_is_not_cut(unit, tmp_path):
    """Held up at the server's own gate; the guard before it is past."""
    devices = tmp_path / "devices"
    devices.write_text("devices 1\ndevice 0 unreadable Timeout\nat 3\ndevice 0 used 0 of 80000000000\n")
    u = unit(("TimeoutStartSec", "1"), ("ExecStart", f"{BUILD}/octavo serve --device-memory script:{devices}")).started()
    assert float(re.search(r" ready url=.* seconds=([\d.]+)", u.log())[1]) > 2
    u.stop()


@pytest.mark.parametrize("code,options", [(2, dict(OCTAVO_TP=3)), (3, dict(OCTAVO_DEVICE_MEMORY="script:{lost}"))], ids=["setup", "device"])
def test_what_a_restart_cannot_mend_is_not_restarted(unit, tmp_path, code, options):
    devices = tmp_path / "devices"
    devices.write_text("devices 1\ndevice 0 used 0 of 80000000000\n")
    u = unit(**{k: str(v).format(lost=devices) for k, v in options.items()})
    if code == 3:
        u.started()
        devices.write_text("devices 1\ndevice 0 lost Xid 79\n")
        os.kill(u.workers()[0]["pid"], signal.SIGKILL)
    else:
        assert u.ctl("start").returncode != 0
    eventually(lambda: u.show("SubState") == "failed", 30, "a unit that has failed", u)
    assert (u.show("Result"), u.show("ExecMainStatus"), u.show("NRestarts")) == ("exit-code", str(code), "0")
    if code == 3:
        assert "Xid 79" in u.show("StatusText")
    u.check_clean()


def test_deploy_restart_restarts_the_unit(unit, tmp_path, manager):
    u = unit().started()
    old = u.pid
    wrapper = tmp_path / "bin/systemctl"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("systemctl")} --user "$@"\n')
    wrapper.chmod(0o755)
    code, said = run("--unit", u.name, "--url", u.url, "--octavo", BUILD / "octavo", env=manager.env() | {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"})
    assert code == 0 and "canary: yes" in said, said
    assert u.pid not in (0, old)
    u.check_healthy()
    u.stop()
