"""One rank is lost and replaced: the others keep their processes, weights and caches, and every stream says what it says undisturbed.

OCTAVO_SEED=N repeats the random kills. With --ring=soak there are ten thousand of them, or OCTAVO_SOAK_KILLS, or as many as come in OCTAVO_SOAK_SECONDS.
"""
import json
import os
import random
import re
import signal
import time

import psutil
import pytest
from octavo import CASES, PHOTOSYNTHESIS, UNSURE, Stream, eventually, join_all, question, request_of, stream_all

READY = ("ready", "stepping")
PATIENT = ("--restarts-max", 1000)
LONG = " ".join(f"Item {i} is a lamp, and item {i + 1} is a zebra." for i in range(150)) + " What is the capital of France?"
_alone = {}  # what a request says undisturbed, by request


class Exact(Stream):
    """A stream that also keeps every token's log-probability: a cache that is a little wrong shows there before it shows in the text."""

    def __init__(self, server, request):
        super().__init__(server, request | dict(logprobs=True))
        self.logprobs = []

    def take(self, choice):
        super().take(choice)
        self.logprobs += [t.logprob for t in (choice.logprobs and choice.logprobs.content) or []]

    def said(self):
        return self.text, self.reason, self.logprobs


def mixed(n, first=0):
    """n requests of every kind: greedy, seeded, with penalties, over a long prompt with sparse attention, and a prompt of many steps."""
    sampled = dict(temperature=1.0, max_tokens=100)
    endless = dict(ignore_eos=True)
    kinds = [
        lambda i: question(PHOTOSYNTHESIS, max_tokens=140),
        lambda i: question(UNSURE, seed=i, extra_body=endless, **sampled),
        lambda i: question(UNSURE, seed=i, presence_penalty=0.9, frequency_penalty=0.6, extra_body=endless, **sampled),
        lambda i: question(PHOTOSYNTHESIS, max_tokens=120, extra_body=endless | dict(repetition_penalty=1.4)),
        lambda i: request_of(CASES["long_sparse"]) | dict(max_tokens=80, extra_body=endless),
        lambda i: question(LONG, max_tokens=40, extra_body=endless | dict(repetition_penalty=1.2)),
        lambda i: question(PHOTOSYNTHESIS, thinking=True, max_tokens=140, top_p=0.8, temperature=0.7, seed=i),
        lambda i: question(UNSURE, seed=i, extra_body=endless | dict(repetition_penalty=1.3, min_p=0.01), **sampled),
    ]
    return [kinds[i % len(kinds)](i) for i in range(first, first + n)]


def alone(server, rs):
    """What each request says undisturbed: text, reason and log-probabilities; asked once."""
    key = lambda r: (server.tp, json.dumps(r, sort_keys=True))  # another split, other last bits
    new = {key(r): r for r in rs if key(r) not in _alone}
    streams = {k: Exact(server, r) for k, r in new.items()}
    stream_all(list(streams.values()) or [], 240)
    for k, s in streams.items():
        assert s.error is None, f"{s.error!r}" + server.log_end()
        assert len(s.logprobs) >= 10, s.logprobs
        _alone[k] = s.said()
    return [_alone[key(r)] for r in rs]


def stream_all_started(server, rs, pieces=2):
    streams = [Exact(server, r) for r in rs]
    for s in streams:
        s.start()
    eventually(lambda: sum(s.deltas >= pieces or not s.is_alive() for s in streams) >= len(streams) - len(rs) // 8, 60,
               f"{pieces} pieces on nearly every stream", server)
    return streams


def check_texts(server, streams, rs, seed=None):
    again = f"; repeat with OCTAVO_SEED={seed}" if seed is not None else ""
    for s, want in zip(streams, alone(server, rs)):
        assert s.error is None, f"{s.error!r}{again}" + server.log_end()
        at = next((i for i, (a, b) in enumerate(zip(want[2], s.logprobs)) if a != b), min(len(want[2]), len(s.logprobs)))
        assert s.said() == want, (f"token {at}: expected {want[2][at:at + 2]} of {want[:2]}, {len(want[2])} tokens, found "
                                  f"{s.logprobs[at:at + 2]} of {s.said()[:2]}, {len(s.logprobs)} tokens{again}") + server.log_end()


def pids(server):
    return {w["rank"]: w["pid"] for w in server.workers()}


def all_ready(server):
    rows = server.workers()
    return len(rows) == server.tp and all(w["state"] in READY for w in rows) and server.status("/health/ready") == 200


def wait_replaced(server, before, ranks, seconds=60):
    """All are ready again; those of `ranks` and nobody else have a new pid. Returns the pids."""
    eventually(lambda: all_ready(server) and all(pids(server)[r] != before[r] for r in ranks), seconds, f"ranks {ranks} replaced", server)
    after = pids(server)
    changed = sorted(r for r in after if after[r] != before[r])
    assert changed == sorted(ranks), f"expected new pids for ranks {sorted(ranks)}, found them for {changed}" + server.log_end()
    return after


def kill(server, now, ranks, number=signal.SIGKILL):
    for r in ranks:
        os.kill(now[r], number)


def last_recovery(server):
    found = re.findall(r" recovered (.*)", server.log())
    assert found, "expected a line that tells of a recovery" + server.log_end()
    return dict(re.findall(r"(\w+)=(\S+)", found[-1]))


def test_each_rank_in_turn_is_replaced_alone_under_mixed_streams(launch):
    server = launch(*PATIENT, tp=8).wait_ready()
    rs = mixed(8)
    alone(server, rs)
    now = pids(server)
    for half in range(2):
        streams = stream_all_started(server, rs)
        for rank in range(4 * half, 4 * half + 4):
            kill(server, now, [rank])
            now = wait_replaced(server, now, [rank])
        join_all(streams, 120)
        check_texts(server, streams, rs)
    rows = {w["rank"]: w for w in server.workers()}
    assert all(w["restarts"] == 1 and w["restarts_by_cause"]["exit"] == 1 for w in rows.values()), rows
    assert last_recovery(server)["by"] == "copy"
    server.check_healthy()
    server.stop()


@pytest.mark.smoke
def test_one_of_two_ranks_is_replaced_alone(launch):
    server = launch(*PATIENT, tp=2).wait_ready()
    rs = mixed(5)
    alone(server, rs)
    now = pids(server)
    streams = stream_all_started(server, rs)
    kill(server, now, [0])
    wait_replaced(server, now, [0])
    join_all(streams, 120)
    check_texts(server, streams, rs)
    server.stop()


def test_two_ranks_killed_at_once_are_replaced_and_the_others_stay(launch):
    server = launch(*PATIENT, "--pipeline", 2, tp=8).wait_ready()
    rs = mixed(9)
    alone(server, rs)
    now = pids(server)
    streams = stream_all_started(server, rs)
    kill(server, now, [0, 5])
    now = wait_replaced(server, now, [0, 5])
    kill(server, now, [0, 5])  # again, and now they have to wait
    wait_replaced(server, now, [0, 5])
    join_all(streams, 120)
    check_texts(server, streams, rs)
    server.stop()


def test_a_rank_killed_in_the_middle_of_a_prompt_costs_none_of_it(launch):
    server = launch(*PATIENT, "--max-step-tokens", 64, tp=4).wait_ready()
    r = question(LONG, max_tokens=20, extra_body=dict(ignore_eos=True))
    alone(server, [r])
    step = lambda: server.workers()[3]["last_step"]
    first, now = step(), pids(server)
    stream = Exact(server, r | dict(extra_body=r["extra_body"] | dict(cache_salt="not found")))
    stream.start()
    eventually(lambda: step() >= first + 8, 60, "eight steps of the prompt", server)
    assert stream.deltas == 0
    kill(server, now, [2])
    wait_replaced(server, now, [2])
    join_all([stream])
    check_texts(server, [stream], [r])
    assert int(last_recovery(server)["pages"]) >= 8, last_recovery(server)
    server.stop()


def test_deaths_while_one_is_being_replaced(launch):
    """The newborn while it loads, a survivor while it loads, and the last that has the caches."""
    server = launch(*PATIENT, tp=4).wait_ready()
    rs = mixed(8)
    alone(server, rs)
    before = pids(server)
    streams = stream_all_started(server, rs)
    kill(server, before, [1])
    newborn = eventually(lambda: pids(server).get(1, before[1]) != before[1] and pids(server)[1], 30, "a successor", server)
    for pid in (newborn, before[2]):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    now = wait_replaced(server, before, [1, 2])
    kill(server, now, [0, 1, 2, 3])
    wait_replaced(server, now, [0, 1, 2, 3])
    join_all(streams, 120)
    check_texts(server, streams, rs)
    server.check_healthy()
    server.stop()


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_stopped_rank_is_named_within_five_seconds(launch, busy):
    server = launch(*PATIENT, tp=4).wait_ready()
    rs = mixed(4) if busy else []
    alone(server, rs)
    now = pids(server)
    streams = stream_all_started(server, rs) if busy else []
    start = time.monotonic()
    kill(server, now, [2], signal.SIGSTOP)
    died = lambda: re.search(r" died rank=(\d+) .*?cause=(\w+) step=(\d+)", server.log())
    found = eventually(died, 20, "a line that names the dead", server)
    seconds = time.monotonic() - start
    assert (found[1], found[2]) == ("2", "silent"), found[0]
    assert (found[3] != "0") == busy, found[0]
    assert seconds < 5, f"expected less than 5 s, found {seconds:.1f}"
    wait_replaced(server, now, [2])
    join_all(streams, 120)
    check_texts(server, streams, rs)
    server.stop()


def test_health_tells_of_a_recovery(launch):
    server = launch(*PATIENT, tp=4).wait_ready()
    now = pids(server)
    kill(server, now, [3], signal.SIGSTOP)
    eventually(lambda: "recovering" in server.http("/health/ready")[2], 20, "a recovering state", server)
    assert server.status("/health/live") == 200
    wait_replaced(server, now, [3])
    row = server.workers()[3]
    assert row["restarts"] == 1 and row["restarts_by_cause"]["silent"] == 1, row
    assert "heartbeat" in row["last_error"], row
    server.stop()


def test_a_rank_killed_while_draining_is_replaced_and_the_answers_end(launch):
    server = launch(*PATIENT, tp=4).wait_ready()
    rs = mixed(4)
    alone(server, rs)
    now = pids(server)
    streams = stream_all_started(server, rs)
    server.signal(signal.SIGTERM)
    eventually(lambda: " draining" in server.log(), 10, "a drain", server)
    kill(server, now, [1])
    join_all(streams, 120)
    check_texts(server, streams, rs)
    assert server.wait_end() == 0
    server.check_clean()


def hit(pid, number):
    """1 if there was somebody to hit."""
    try:
        os.kill(pid, number)
        return 1
    except ProcessLookupError:
        return 0


def successor(server, rng, old):
    """A worker that was not there before, however far it has come since; None if none comes soon."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        born = [c.pid for c in psutil.Process(server.pid).children() if c.pid not in old]
        if born:
            return rng.choice(born)
    return None


def strike(server, rng, now):
    """Hits ranks in one of many ways; (how many, which ranks must be replaced, in words)."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    way = rng.choices(("one", "stopped", "two", "one and one stopped", "all", "successor", "successor stopped", "survivor too"),
                      (36, 5, 12, 4, 6, 22, 3, 12))[0]
    ranks = rng.sample(range(server.tp), dict(all=server.tp).get(way, 2 if way in ("two", "one and one stopped", "survivor too") else 1))
    first = stop if way == "stopped" else kill
    kills = hit(now[ranks[0]], first)
    if way in ("two", "all", "one and one stopped"):
        kills += sum(hit(now[r], stop if way.endswith("stopped") else kill) for r in ranks[1:])
    elif way != "one" and way != "stopped":  # loading, joining, singing, being copied to: whatever it is at
        pid = now[ranks[1]] if way == "survivor too" else successor(server, rng, set(now.values()))
        time.sleep(rng.random() * 0.12)
        kills += hit(pid, stop if way.endswith("stopped") else kill) if pid else 0
    return kills, ranks, way


def random_kills(server, seconds, most, seed):
    """Random ranks, one or several, killed or stopped at random moments under 64 streams that come and go."""
    rng = random.Random(seed)
    rs = mixed(16)
    alone(server, rs)
    now, kills, end = pids(server), 0, time.monotonic() + seconds
    going = lambda: time.monotonic() < end and kills < most
    while going():
        batch = [rng.choice(rs) for _ in range(64)]
        streams = [Exact(server, r) for r in batch]
        for s in streams:
            s.start()
        while any(s.is_alive() for s in streams) and going():
            time.sleep(rng.random() * 0.6)  # the moment is the point
            n, ranks, way = strike(server, rng, now)
            kills += n
            if rng.random() < 0.85:
                eventually(lambda: all_ready(server) and all(pids(server)[r] != now[r] for r in ranks), 120,
                           f"ranks {ranks} replaced ({way}); repeat with OCTAVO_SEED={seed}", server)
            now = pids(server) or now
        join_all(streams, 240)
        check_texts(server, streams, batch, seed)
    return kills


def seed_of_run():
    seed = int(os.environ.get("OCTAVO_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"OCTAVO_SEED={seed}")
    return seed


def soak(launch, seconds, most):
    seed = seed_of_run()
    server = launch("--restarts-max", 100000, "--restart-delay", 1, "--pipeline", 1 + seed % 2, tp=4).wait_ready()  # the pauses would be most of it
    kills = random_kills(server, seconds, most, seed)
    print(f"{kills} kills, seed {seed}")
    eventually(lambda: all_ready(server), 60, "all ready in the end", server)
    server.check_healthy()
    server.stop()
    return kills


def test_random_kills_for_a_minute_change_no_answer(launch):
    assert soak(launch, 60, 10**9) >= 10


@pytest.mark.soak
def test_random_kills_for_a_long_time_change_no_answer(launch):
    soak(launch, float(os.environ.get("OCTAVO_SOAK_SECONDS", "inf")), int(os.environ.get("OCTAVO_SOAK_KILLS", 10000)))
