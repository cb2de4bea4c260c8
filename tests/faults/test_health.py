"""The README's table of states and codes: a server is brought into each row, and every route must say what the row says.

Rows that a real worker passes through too fast to be asked are held by a worker without a model
(tests/unit/fake_worker.c), which obeys FAKE_FAULT.
"""
import json
import os
import re
import signal
import time

import pytest
from devices import HELD, Devices, serving
from octavo import BUILD, PATIENCE, PHOTOSYNTHESIS, SOURCE, Stream, eventually, join_all, question

LONG = "lamp zebra " * 450
ROUTES = ("/health/live", "/health/ready", "/health/progress")


def table():
    """{what happens: (state, (live, ready, progress))} of the README."""
    readme = (SOURCE / "README.md").read_text()
    section = readme[readme.index("## Health"):readme.index("## Exit codes")]
    rows = re.findall(r"^\| ([^|`]+) \| (\w+) \| (\d+) \| (\d+) \| (\d+) \|", section, re.M)
    return {name: (state, (int(l), int(r), int(p))) for name, state, l, r, p in rows}


TABLE = table()


class Told(dict):
    """What all routes say at one time: codes, and the one state, or None where they were asked across a change."""


def ask(server):
    codes, states, bodies = [], set(), {}
    for route in ROUTES:
        code, _, text = server.http(route, timeout=5)
        bodies[route] = json.loads(text)
        codes.append(code)
        states.add(bodies[route]["state"])
    workers = json.loads(server.http("/v1/workers", timeout=5)[2])
    states.add(workers["state"])
    return Told(codes=tuple(codes), state=states.pop() if len(states) == 1 else None, bodies=bodies, workers=workers["data"])


def expect(server, row, seconds=30, holds=3, extra=lambda told: True):
    """Every route comes to say what the row says, and says it again."""
    state, codes = TABLE[row]

    def found():
        told = ask(server)
        ok = told["state"] == state and told["codes"] == codes and extra(told)
        return ok and told
    eventually(found, seconds, f"{row!r}: state {state}, codes {codes}, found {ask(server)}", server)
    for _ in range(holds):
        told = found()
        assert told, f"{row!r}: expected {state} {codes} to last, found {ask(server)}" + server.log_end()
    return told


def phase(name):
    return lambda told: told["bodies"]["/health/ready"]["phase"] == name


def fake(launch, fault, *options, **more):
    return launch("--worker", BUILD / "tests_unit_fake_worker", *options, tp=2, env=dict(FAKE_FAULT=fault), **more).wait_port()


def kill(server, ranks, number=signal.SIGKILL):
    pids = {w["rank"]: w["pid"] for w in server.workers()}
    for r in ranks:
        os.kill(pids[r], number)


def memory_of_others_is_waited_for(launch, tmp_path):
    devices = Devices(tmp_path)
    devices.say("unreadable Timeout")
    server = launch(*devices.option(), tp=1).wait_port()
    expect(server, "memory of others is waited for", extra=phase("reclaiming"))
    devices.hold({})
    server.wait_ready()
    server.stop()


def loading(launch, tmp_path):
    server = fake(launch, "noload 1 1 0")
    told = expect(server, "loading", extra=phase("loading"))
    assert told["bodies"]["/health/progress"]["status"] == "ok"
    assert [w["state"] for w in told["workers"]] == ["loaded", "loading"]
    server.stop()


def loading_nothing_moves(launch, tmp_path):
    server = fake(launch, "noload 1 1 0", "--load-stall", 200)
    told = expect(server, "loading, nothing moves for 30 s", extra=phase("loading"))
    assert told["bodies"]["/health/progress"]["status"] == "stalled"
    assert told["bodies"]["/health/progress"]["load"]["quiet_ms"] > 200
    server.stop()


def capturing(launch, tmp_path):
    server = fake(launch, "capture 1 1 0")
    told = expect(server, "capturing graphs", extra=phase("capturing"))
    assert "capturing" in [w["state"] for w in told["workers"]]
    server.stop()


def the_first_token_is_awaited(launch, tmp_path):
    server = fake(launch, "hush 0 1 0")
    told = expect(server, "the first token of all is awaited", extra=phase("canary"))
    assert told["bodies"]["/health/ready"]["canary"] == "asked"
    server.stop()


def idle(launch, tmp_path):
    server = launch(tp=2).wait_ready()
    told = expect(server, "idle")
    assert told["bodies"]["/health/ready"]["canary"] == "ok" and told["bodies"]["/health/ready"]["ready_ms"] >= 0
    first = told["bodies"]["/health/progress"]["last_step_age_ms"]
    again = ask(server)["bodies"]["/health/progress"]["last_step_age_ms"]
    assert 0 <= first <= again  # no new step
    steps = [w["last_step"] for w in server.workers()]
    server.check_healthy()
    assert all(w["last_step"] > s and w["age_ms"] < 20000 for w, s in zip(server.workers(), steps))
    server.stop()


def answering(launch, tmp_path):
    server = launch(tp=2).wait_ready()
    stream = Stream(server, question(PHOTOSYNTHESIS, max_tokens=3000, extra_body=dict(ignore_eos=True)))
    stream.start()
    eventually(lambda: stream.deltas >= 3, 60, "three pieces", server)
    told = expect(server, "answering")
    assert told["bodies"]["/health/progress"]["running"] == 1 and stream.is_alive()
    server.signal()
    server.signal()
    server.wait_end()


def a_long_prompt_alone(launch, tmp_path):
    """Green all the way, and what is being computed is told."""
    server = launch("--max-seqs", 4, "--max-step-tokens", 8, tp=2).wait_ready()
    stream = Stream(server, question(LONG, max_tokens=2))
    stream.start()
    seen = []
    while stream.is_alive() and not stream.deltas:
        told = ask(server)
        assert told["codes"] == TABLE["a long prompt alone"][1] and told["state"] == "ready", told
        prefill = told["bodies"]["/health/progress"]["prefill"]
        if prefill:
            seen.append(prefill["tokens_done"])
            assert prefill["tokens"] > 1500 and prefill["prompts"] == 1, prefill
            if len(seen) == 3:  # a canary goes beside it, not behind it
                assert server.status("/health/canary", timeout=60) == 200
    join_all([stream], 60)
    assert stream.error is None
    assert len(set(seen)) >= 3 and seen == sorted(seen), f"expected prefill to advance, found {seen}"
    server.stop()


def a_dead_ranks_memory_is_waited_for(launch, tmp_path):
    devices = Devices(tmp_path)
    server, pids = serving(launch, devices)
    os.kill(pids[1], signal.SIGKILL)
    told = expect(server, "a dead rank's memory is waited for", extra=phase("reclaiming"))
    assert [w["state"] for w in told["workers"]] == ["loaded", "reclaiming"]
    devices.hold({pids[0]: HELD})
    eventually(lambda: ask(server)["codes"] == (200, 200, 200), 60, "green again", server)
    server.stop()


def frozen(launch, tmp_path, row, ranks):
    """Noticed within five seconds; held by memory that does not return, so that it can be asked in peace."""
    devices = Devices(tmp_path)
    server, pids = serving(launch, devices)
    start = time.monotonic()
    kill(server, ranks, signal.SIGSTOP)
    named = lambda told: all((told["workers"][r]["last_error"] or "").startswith("no heartbeat") for r in ranks)
    expect(server, row, holds=1, extra=named)
    assert time.monotonic() - start < 5.5 * PATIENCE, "expected it to be noticed within five seconds"
    devices.hold({pid: HELD for r, pid in enumerate(pids) if r not in ranks})
    eventually(lambda: ask(server)["codes"] == (200, 200, 200), 60, "green again", server)
    server.check_healthy()
    server.stop()


def a_rank_is_frozen(launch, tmp_path):
    frozen(launch, tmp_path, "a rank is frozen", [1])


def all_ranks_are_frozen(launch, tmp_path):
    frozen(launch, tmp_path, "all ranks are frozen", [0, 1])


def a_restart_is_put_off(launch, tmp_path):
    server = fake(launch, "unsing 1 0 0", "--restarts-max", 1000)
    expect(server, "a restart is put off", 60, holds=1, extra=phase("back_off"))
    server.stop()


def asked_to_stop(launch, tmp_path):
    server = launch(tp=2).wait_ready()
    stream = Stream(server, question(PHOTOSYNTHESIS, max_tokens=3500, extra_body=dict(ignore_eos=True)))
    stream.start()
    eventually(lambda: stream.deltas >= 3, 60, "three pieces", server)
    server.signal()
    expect(server, "asked to stop (SIGTERM, SIGINT)", holds=1)
    server.signal()
    assert server.wait_end() == 0


def recovery_is_exhausted(launch, tmp_path):
    """No route says anything else than the row after the first that says failed, and the exit code follows."""
    server = fake(launch, "unsing 1 0 0", "--restarts-max", 2)
    state, codes = TABLE["recovery is exhausted"]
    told = []
    while server.process.poll() is None:
        for route, code in zip(ROUTES, codes):
            try:
                found, _, text = server.http(route, timeout=5)
            except OSError:
                continue
            if json.loads(text)["state"] == state:
                assert found == code, (route, found, text)
                told.append(route)
            else:
                assert not told, f"after failed: {route} {text}"
    assert server.wait_end() == 1, server.log_end()
    assert re.search(r"fleet_failed exit=1 why=\"3 restarts within 600 s", server.log()), server.log_end()
    server.check_clean()


DRIVERS = {
    "memory of others is waited for": memory_of_others_is_waited_for,
    "loading": loading,
    "loading, nothing moves for 30 s": loading_nothing_moves,
    "capturing graphs": capturing,
    "the first token of all is awaited": the_first_token_is_awaited,
    "idle": idle,
    "answering": answering,
    "a long prompt alone": a_long_prompt_alone,
    "a dead rank's memory is waited for": a_dead_ranks_memory_is_waited_for,
    "a rank is frozen": a_rank_is_frozen,
    "all ranks are frozen": all_ranks_are_frozen,
    "a restart is put off": a_restart_is_put_off,
    "asked to stop (SIGTERM, SIGINT)": asked_to_stop,
    "recovery is exhausted": recovery_is_exhausted,
}


def test_every_row_of_the_table_is_driven():
    assert set(TABLE) == set(DRIVERS)


@pytest.mark.parametrize("row", TABLE)
def test_every_route_says_what_the_table_says(launch, tmp_path, row):
    DRIVERS[row](launch, tmp_path)
