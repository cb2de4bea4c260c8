"""`octavo doctor` for real, on the CPU: ranks that add up, one that is stopped, one that dies, and the bundle."""
import json
import os
import re
import subprocess
import tarfile
import time

import pytest
from octavo import BUILD

FINE, STOPS, WRONG = 0, 1, 2


def doctor(*options, env=None):
    """(exit code, stdout, stderr) of octavo doctor; a machine without GPUs is meant."""
    r = subprocess.run([BUILD / "octavo", "doctor", *map(str, options)], capture_output=True, text=True, timeout=120,
                       env=os.environ | {"OCTAVO_NVML": "/nowhere"} | (env or {}))
    return r.returncode, r.stdout, r.stderr


def report(*options, **more):
    code, out, err = doctor("--json", "--device", "cpu", *options, **more)
    assert out, err
    return code, json.loads(out)


def stops(r):
    return [f for f in r["findings"] if f["level"] == "stops"]


@pytest.fixture
def worker(tmp_path):
    """A worker of whose ranks one does something first."""
    def make(rank, command):
        path = tmp_path / "worker"
        path.write_text(f'#!/bin/sh\ncase " $* " in *" --rank {rank} "*) {command} ;; esac\nexec "{BUILD}/octavo-worker" "$@"\n')
        path.chmod(0o755)
        return path
    return make


@pytest.mark.smoke
def test_two_four_and_all_ranks_add_up():
    code, r = report("--tp", 6, "--time-limit", 60)
    assert [c["ranks"] for c in r["collectives"]] == [2, 4, 6]
    assert all(c["right"] and c["used"] == "shm" for c in r["collectives"])
    for c in r["collectives"]:
        assert [s["bytes"] for s in c["sums"]] == [24576, 1048576]
        assert all(s["microseconds"] > 0 for s in c["sums"])
    assert (code, stops(r)) in [(FINE, []), (STOPS, stops(r))]  # this machine's own limits may be small
    assert r["gpus"] == [] and r["host"]["memory_bytes"] > 0 and r["shm"]["total_bytes"] > 0


def test_a_stuck_rank_is_named_within_the_time_limit(worker):
    start = time.monotonic()
    code, r = report("--tp", 2, "--time-limit", 2, "--worker", worker(1, "kill -STOP $$"))
    (c,) = r["collectives"]
    assert code == STOPS and not c["right"] and c["late"]
    pid = int(re.fullmatch(r"rank 1 is stuck in: start, process (\d+) in state T \(stopped\); the others wait in: [a-z0-9 ]+", c["failure"])[1])
    assert not os.path.exists(f"/proc/{pid}")
    assert time.monotonic() - start < 30
    found = stops(r)[-1]
    assert found["what"] == "all-reduce of 2 ranks over shm" and c["failure"] == found["found"] and found["fix"]


def test_a_rank_that_dies_ends_the_test_before_the_time_limit(worker):
    start = time.monotonic()
    code, r = report("--tp", 2, "--time-limit", 60, "--worker", worker(0, "kill -SEGV $$"))
    assert code == STOPS and r["collectives"][0]["failure"] == "rank 0 died of signal 11 in: start"
    assert time.monotonic() - start < 30


def test_a_collective_that_the_device_has_not_is_refused_with_its_sentence():
    code, r = report("--tp", 2, "--collective", "ipc")
    assert code == STOPS
    assert re.fullmatch(r"rank [01]: --collective: expected auto or shm on the CPU, found ipc", r["collectives"][0]["failure"])


def test_a_worker_that_is_missing_is_a_finding():
    code, r = report("--worker", "/nowhere/octavo-worker")
    assert code == STOPS and "collectives" not in r
    assert "/nowhere/octavo-worker" in stops(r)[-1]["found"]


@pytest.mark.parametrize("options", [["--tp", "0"], ["--colour"], ["a.log"], ["--device", "tpu"], ["--api-key-file", "/nowhere"]])
def test_asked_wrongly_is_a_sentence_and_exit_code_2(options):
    code, out, err = doctor(*options)
    assert code == WRONG and out == "" and re.match(r"octavo doctor: .*expected", err)


def test_the_text_ends_with_what_to_fix():
    code, out, _ = doctor("--look-only")
    assert re.search(r"^What to fix", out, re.M) and "all-reduce" not in out
    for word in ["host", "memory", "/dev/shm", "limits", "huge pages", "driver", "IOMMU", "NCCL"]:
        assert re.search(rf"^{word} ", out, re.M), word


def test_a_bundle_holds_report_logs_and_service_without_keys(launch, tmp_path):
    keys, log, bundle = tmp_path / "keys", tmp_path / "run.log", tmp_path / "bug.tar"
    keys.write_text("very-secret-key\n")
    log.write_text("started\nAuthorization: Bearer abc\nkey very-secret-key\nended\n")
    server = launch("--api-key-file", keys, tp=2).wait_ready()
    code, _, err = doctor("--look-only", "--bundle", bundle, "--url", server.url, "--api-key-file", keys, log, "/nowhere/x.log")
    assert code in (FINE, STOPS) and str(bundle) in err
    with tarfile.open(bundle) as tar:
        parts = {n.split("/", 1)[1]: tar.extractfile(n).read().decode() for n in tar.getnames()}
    assert parts["logs/00-run.log"] == "started\nAuthorization: Bearer [removed]\nkey [removed]\nended\n"
    assert "No such file" in parts["logs/01-x.log"]
    assert json.loads(parts["report.json"])["host"]["build"] in parts["report.txt"]
    assert len(json.loads(parts["service/workers.json"])["data"]) == 2
    assert json.loads(parts["service/worker-1.json"])["rank"] == 1
    assert [json.loads(parts[f"workers/{server.pid}-{rank}.json"])["rank"] for rank in (0, 1)] == [0, 1]
    assert parts["service/ready.status"] == "200\n" and "octavo_" in parts["service/metrics"]
    assert not any("very-secret-key" in text for text in parts.values())


def test_a_bundle_without_a_service_says_why(tmp_path):
    bundle = tmp_path / "bug.tar"
    doctor("--look-only", "--bundle", bundle, "--url", "http://127.0.0.1:1")
    with tarfile.open(bundle) as tar:
        (name,) = [n for n in tar.getnames() if n.endswith("service/workers.json")]
        assert "refused" in tar.extractfile(name).read().decode()


def test_links_are_checked_before_weights_are_read(launch):
    server = launch("--link-check", "on", tp=2).wait_ready()
    log = server.log()
    assert 0 < log.find("links_checked ranks=2 asked=auto used=shm") < log.find("loaded weight_bytes")


def test_a_rank_that_cannot_add_up_keeps_a_service_from_starting(launch, worker):
    server = launch("--link-check", "on", "--worker", worker(1, "kill -SEGV $$"), tp=2)
    assert server.process.wait(60) == 2
    assert "link check: expected 2 ranks to add up over auto within 45 s, found: rank 1 died of signal 11" in server.log()
    assert "joined" not in server.log()
