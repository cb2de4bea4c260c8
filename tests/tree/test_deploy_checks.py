"""Units, batch script, manifests, container file, check for Nagios: as right as can be told without the systems they are for."""
import os
import re
import signal
import subprocess

import pytest
import yaml
from octavo import BUILD, SOURCE, eventually

UNITS = ["octavo.service", "octavo-worker@.service"]
DEFAULT_PORT, DRAIN_S, STOP_S, FLUSH_S = 8000, 60, 5, 2  # of serve --help; STOP_BOUND_US, FLUSH_BOUND_US


def run(*command, **more):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, **more)


def options(program, *command):
    shown = run(BUILD / program, *command, "--help").stdout
    return set(re.findall(r"^  --([a-z-]+)", shown, re.M))


SERVE, WORKER = options("octavo", "serve"), options("octavo-worker")
COMMANDS = set(re.findall(r"^  (\w+) ", run(BUILD / "octavo", "--help").stdout, re.M))


def option_of(variable):
    return variable.removeprefix("OCTAVO_").lower().replace("_", "-")


# ---- systemd ---------------------------------------------------------------------------------------------


def settings(unit):
    """[(key, value)] of a unit, in order."""
    text = (SOURCE / "deploy/systemd" / unit).read_text()
    return [(k, v) for k, v in re.findall(r"^(\w+)=(.*)$", text, re.M)]


def seconds(text):
    return sum(int(n) * {"": 1, "s": 1, "min": 60, "h": 3600}[u] for n, u in re.findall(r"(\d+)(h|min|s|)", text))


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_passes_systemds_own_check(unit, tmp_path):
    text = (SOURCE / "deploy/systemd" / unit).read_text()
    text = text.replace("/opt/octavo/octavo-worker-cuda", str(BUILD / "octavo-worker")).replace("/opt/octavo/octavo ", f"{BUILD}/octavo ")
    copy = tmp_path / unit
    copy.write_text(text)
    named = tmp_path / unit.replace("@", "@3")
    if named != copy:
        named.symlink_to(copy)
    p = run("systemd-analyze", "verify", "--man=no", named)
    assert (p.returncode, p.stdout, p.stderr) == (0, "", ""), p.stderr
    p = run("systemd-analyze", "security", "--offline=true", "--threshold=30", copy)
    assert p.returncode == 0, p.stdout[-2000:]


def test_the_unit_keeps_the_contract():
    s = dict(settings("octavo.service"))
    assert s["Type"] == "notify" and s["NotifyAccess"] == "main" and s["KillMode"] == "mixed"
    assert s["Restart"] == "on-failure" and {"2", "3"} <= set(s["RestartPreventExitStatus"].split())
    assert seconds(s["TimeoutStopSec"]) > DRAIN_S + STOP_S + FLUSH_S
    assert seconds(s["TimeoutStartSec"]) > 60, "the guard may wait for a minute"
    assert 3 < seconds(s["WatchdogSec"]) <= 60
    assert s["OOMPolicy"] == "continue", "a worker killed for want of memory is replaced; the service goes on"
    assert s["ExecStart"] == "/opt/octavo/octavo serve" and ("ExecStartPre", "/opt/octavo/octavo guard") in settings("octavo.service")
    limits = (SOURCE / "proto/limits.h").read_text()
    assert int(s["LimitNOFILE"]) >= int(re.search(r"LIMIT_CONNECTIONS +(\d+)", limits)[1]) * 1.2


@pytest.mark.parametrize("unit", UNITS)
def test_no_hardening_hides_the_gpus(unit):
    keys = {k for k, _ in settings(unit)}
    hiding = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute", "PrivateNetwork", "PrivateIPC", "PrivateUsers", "ProtectProc", "ProcSubset"}
    assert not keys & hiding


def test_the_units_example_options_are_options():
    names = re.findall(r"^#?(OCTAVO_\w+)=", (SOURCE / "deploy/systemd/octavo.env").read_text(), re.M)
    assert len(names) >= 5 and {option_of(n) for n in names} <= SERVE
    names = re.findall(r"(OCTAVO_\w+)=", (SOURCE / "deploy/systemd/octavo-worker@.service").read_text())
    assert {option_of(n) for n in names} - {"cookie"} <= WORKER


# ---- Kubernetes ------------------------------------------------------------------------------------------


def manifests():
    return {d["kind"]: d for d in yaml.safe_load_all((SOURCE / "deploy/kubernetes/octavo.yaml").read_text())}


def pod():
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def test_probes_ask_routes_that_need_no_key():
    routes = dict(re.findall(r'^    \{"(/[\w/+-]+)", .*, (true|false)\},', (SOURCE / "coordinator/api_server.c").read_text(), re.M))
    c = pod()["containers"][0]
    for probe, path in (("startupProbe", "/health/ready"), ("livenessProbe", "/health/live"), ("readinessProbe", "/health/ready")):
        asked = c[probe]["httpGet"]
        assert asked["path"] == path and routes[path] == "true"
        assert asked["port"] == c["ports"][0]["name"]
    assert manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"] in routes


def test_ports_selectors_and_volumes_fit_each_other():
    m, p = manifests(), pod()
    c = p["containers"][0]
    env = {e["name"]: e["value"] for e in c["env"]}
    assert int(env["OCTAVO_PORT"]) == c["ports"][0]["containerPort"] == m["Service"]["spec"]["ports"][0]["port"] == DEFAULT_PORT
    assert m["Service"]["spec"]["ports"][0]["targetPort"] == c["ports"][0]["name"]
    labels = m["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (m["Service"]["spec"]["selector"], m["Deployment"]["spec"]["selector"]["matchLabels"], m["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    volumes = {v["name"]: v for v in p["volumes"]}
    assert {v["name"] for v in c["volumeMounts"]} == set(volumes)
    shm = next(v["name"] for v in c["volumeMounts"] if v["mountPath"] == "/dev/shm")
    assert volumes[shm]["emptyDir"]["medium"] == "Memory"
    assert {option_of(n) for n in env} <= SERVE


def test_the_pod_has_time_to_drain_and_gives_its_gpus_back_first():
    m, p = manifests(), pod()
    c = p["containers"][0]
    env = {e["name"]: e["value"] for e in c["env"]}
    sleep, pause = c["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert p["terminationGracePeriodSeconds"] > int(pause) + int(env["OCTAVO_DRAIN_TIMEOUT"]) + STOP_S + FLUSH_S
    assert m["Deployment"]["spec"]["strategy"]["type"] == "Recreate" and m["Deployment"]["spec"]["replicas"] == 1
    assert p["enableServiceLinks"] is False, "a service named octavo would set OCTAVO_PORT to a URL"
    assert c["resources"]["limits"]["nvidia.com/gpu"] in (1, 2, 4, 8)
    for container in (c, p["initContainers"][0]):
        assert container["args"][0] in COMMANDS
        assert container["securityContext"]["runAsUser"] == user_of_image() and not container["securityContext"]["allowPrivilegeEscalation"]


# ---- the container file -----------------------------------------------------------------------------------


def instructions():
    text = re.sub(r"\\\n\s*", " ", (SOURCE / "deploy/container/Containerfile").read_text())
    return [l.split(None, 1) for l in text.splitlines() if l.strip() and not l.startswith("#")]


def user_of_image():
    return int(next(v for k, v in instructions() if k == "USER"))


def test_the_container_file_fits_what_it_copies_and_runs():
    ins = instructions()
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD", "HEALTHCHECK"}
    assert {k for k, _ in ins} <= known
    arguments = {v.split("=")[0] for k, v in ins if k == "ARG"}
    froms = [v for k, v in ins if k == "FROM"]
    assert {a for f in froms for a in re.findall(r"\$\{(\w+)\}", f)} == arguments and len(froms) == 2
    stages = {f.split(" AS ")[1] for f in froms if " AS " in f}
    assert {s for k, v in ins if k == "COPY" for s in re.findall(r"--from=(\w+)", v)} == stages
    bundle = next(v for k, v in ins if k == "RUN" and v.startswith("deploy/bundle")).split()
    assert os.access(SOURCE / bundle[0], os.X_OK)
    said = dict(ins)
    assert said["ENTRYPOINT"] == f'["{bundle[1]}/octavo"]' and int(said["EXPOSE"]) == DEFAULT_PORT
    words = re.findall(r'"(\w+)"', said["CMD"]) + re.findall(r'octavo", "(\w+)"', said["HEALTHCHECK"])
    assert words and set(words) <= COMMANDS and said["STOPSIGNAL"] == "SIGTERM"
    assert f"--uid {said['USER']} " in next(v for k, v in ins if k == "RUN" and "useradd" in v)


# ---- Slurm ---------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(tmp_path):
    """The batch script with stand-ins: octavo ends with the code in `code`, or when it hears TERM."""
    calls = tmp_path / "calls"
    for name, body in (("octavo", f'[ "$1" = guard ] && exit "$(cat {tmp_path}/guard)"\n[ -s {tmp_path}/code ] && exit "$(cat {tmp_path}/code)"\n'
                                  f'trap "echo drained >>{calls}; exit 0" TERM\necho up >>{calls}\nwhile :; do sleep 0.05; done\n'), ("scontrol", "")):
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{calls}\n{body}')
        path.chmod(0o755)
    (tmp_path / "guard").write_text("0")

    def go(code="", **env):
        calls.write_text("")
        (tmp_path / "code").write_text(str(code))
        p = subprocess.Popen([SOURCE / "deploy/slurm/octavo.sbatch", "--tp", "2"], stdin=subprocess.DEVNULL,
                             env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"} | env)
        return p, lambda: calls.read_text().splitlines()
    go.guard = tmp_path / "guard"
    return go


@pytest.mark.parametrize("code,count,again", [(0, 0, False), (1, 0, True), (1, 4, True), (1, 5, False), (2, 0, False), (3, 0, False)])
def test_a_batch_job_is_queued_again_only_when_that_may_help(batch, code, count, again):
    p, calls = batch(code, SLURM_RESTART_COUNT=str(count))
    assert p.wait(20) == code
    assert calls() == ["octavo guard", "octavo serve --host 0.0.0.0 --tp 2"] + ["scontrol requeue 77"] * again


def test_a_batch_job_whose_memory_is_not_back_does_not_start(batch):
    batch.guard.write_text("3")
    p, calls = batch(0)
    assert p.wait(20) == 3 and calls() == ["octavo guard"]


def test_a_batch_job_that_hears_term_lets_the_server_drain(batch):
    p, calls = batch()
    eventually(lambda: "up" in calls(), 20, "a server that runs")
    p.send_signal(signal.SIGTERM)
    assert p.wait(20) == 0
    assert calls()[-1] == "drained"


# ---- Nagios --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said,code,word", [(0, 0, "OK"), (1, 2, "CRITICAL"), (2, 3, "UNKNOWN"), (3, 2, "CRITICAL")])
def test_the_check_speaks_as_nagios_expects(tmp_path, said, code, word):
    program = tmp_path / "octavo"
    program.write_text(f'#!/bin/sh\necho "$*"\necho second\nexit {said}\n')
    program.chmod(0o755)
    p = run(SOURCE / "deploy/probe", "ready", "--all", env=os.environ | {"OCTAVO": str(program)})
    assert (p.returncode, p.stdout) == (code, f"OCTAVO {word} - probe --all ready; second\n"), p.stderr
