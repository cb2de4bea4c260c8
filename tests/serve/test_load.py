"""More is asked than there is room for: a bounded queue, fair refusals, time limits, keys, and memory that does not grow."""
import asyncio
import json
import random
import re
import socket
import threading

import octavo
import psutil
import pytest
from octavo import PHOTOSYNTHESIS, Stream, eventually, question, stream_all

COMPLETIONS = "/v1/completions"


def gauge(server, name):
    return int(re.search(rf"^octavo_{name} (\d+)", server.http("/metrics")[2], re.M)[1])


def body(prompt="Hi", max_tokens=1, **more):
    return dict(model="tiny.gguf", prompt=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True) | more


class Call(threading.Thread):
    """One request on a thread of its own: (status, headers, text)."""

    def __init__(self, server, b, key=None):
        super().__init__(daemon=True)
        self.server, self.body, self.key, self.answer = server, b, key, None
        self.start()

    def run(self):
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else None
        self.answer = self.server.http(COMPLETIONS, self.body, headers=headers, timeout=120)

    def status(self):
        self.join(120)
        assert self.answer, "no answer" + self.server.log_end()
        return self.answer[0]


def code_of(answer):
    return json.loads(answer[2])["error"]["code"]


def raw(b, key=None):
    data = json.dumps(b).encode()
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{auth}Content-Length: {len(data)}\r\n\r\n".encode() + data


def endless(server, key=None, **more):
    """The socket of a client that keeps a slot until it leaves."""
    s = socket.create_connection(("127.0.0.1", server.port))
    s.sendall(raw(body(PHOTOSYNTHESIS, 4000, stream=True, **more), key))
    s.recv(1)
    return s


@pytest.mark.smoke
def test_a_full_queue_refuses_n_answers_as_n_and_says_when_to_come_back(launch):
    server = launch("--max-seqs", 1, "--queue-requests", 3, "--request-timeout", 30, tp=1).wait_ready()
    hog = endless(server)
    two = [Call(server, body(max_tokens=2)) for _ in range(2)]
    eventually(lambda: gauge(server, "sequences_waiting") == 2, 20, "two wait", server)
    status, headers, text = server.http(COMPLETIONS, body(n=2))
    assert status == 503 and json.loads(text)["error"]["code"] == "queue_full", text
    assert int(headers["Retry-After"]) >= 1
    assert gauge(server, "sequences_waiting") == 2, "the one that had found a place gave it back"
    two.append(Call(server, body()))
    eventually(lambda: gauge(server, "sequences_waiting") == 3, 20, "three wait", server)
    assert server.http(COMPLETIONS, body())[0] == 503
    hog.close()
    assert [c.status() for c in two] == [200] * 3
    assert gauge(server, "requests_refused_total") >= 2


def test_who_is_more_urgent_goes_first_and_who_has_had_his_time_ends(launch):
    server = launch("--max-seqs", 1, tp=1).wait_ready()
    order = []
    hog = endless(server)

    class Ordered(Call):
        def run(self):
            super().run()
            order.append(self.body["priority"])
    late = Call(server, body(timeout=0.3))
    calls = []
    for n, priority in enumerate((5, 0, -5, 5)):
        calls.append(Ordered(server, body(priority=priority, max_tokens=30)))
        eventually(lambda: gauge(server, "sequences_waiting") >= n + 1, 20, "it waits", server)
    assert late.status() == 504 and code_of(late.answer) == "timeout"
    hog.close()
    assert [c.status() for c in calls] == [200] * 4
    assert order == [-5, 0, 5, 5]
    s = Stream(server, question(PHOTOSYNTHESIS, max_tokens=3500, extra_body=dict(ignore_eos=True, timeout=0.4)))
    stream_all([s])
    assert s.deltas > 0 and "not done in the time" in str(s.error), s.error
    eventually(lambda: server.running() == 0, 5, "nothing runs for who has had his time", server)


def test_a_key_has_its_share_and_no_more(launch, tmp_path):
    (tmp_path / "keys").write_text("first\nsecond\n")
    server = launch("--api-key-file", tmp_path / "keys", "--key-concurrency", 3, "--key-rate", 12, tp=1).wait_port()
    eventually(lambda: server.status("/health/ready") == 200, 60, "ready", server)
    ask = lambda key, b: server.http(COMPLETIONS, b, headers={"Authorization": f"Bearer {key}"})
    status, _, text = ask("first", body(n=4))
    assert status == 400 and json.loads(text)["error"]["param"] == "n", text
    hog = endless(server, "first", n=2)
    status, headers, text = ask("first", body(n=2))
    assert status == 429 and json.loads(text)["error"]["code"] == "concurrency_limit_exceeded", text
    assert int(headers["Retry-After"]) >= 1
    assert ask("first", body())[0] == 200, "the third has room"
    assert ask("second", body(n=3))[0] == 200, "another key has a share of its own"
    hog.close()
    eventually(lambda: ask("second", body(n=3))[0] == 200 and ask("first", body(n=3))[0] == 200, 10, "what has ended is given back", server)
    answers = [ask("first", body()) for _ in range(12)]
    refused = [a for a in answers if a[0] == 429]
    assert refused and code_of(refused[0]) == "rate_limit_exceeded"
    assert 1 <= int(refused[0][1]["Retry-After"]) <= 8


def test_out_of_pages_long_prompts_wait_or_are_computed_again_and_none_is_wrong(launch):
    server = launch("--cache-tokens", 1024, "--max-seqs", 16, tp=1).wait_ready()
    texts = [f"{i}: " + PHOTOSYNTHESIS * 12 for i in range(8)]
    request = lambda t, i: question(t, max_tokens=100, seed=i, temperature=0.8, extra_body=dict(ignore_eos=True, cache_salt=str(i)))
    streams = [Stream(server, request(t, i)) for i, t in enumerate(texts)]
    stream_all(streams)
    assert gauge(server, "preemptions_total") > 0
    assert gauge(server, "pages_total") == 16
    for i in (0, 7):
        alone = Stream(server, request(texts[i], i))
        stream_all([alone])
        assert streams[i].error is None and streams[i].text == alone.text
    too_long = server.http(COMPLETIONS, body([5] * 1500))
    assert too_long[0] == 400 and code_of(too_long) == "context_length_exceeded"
    server.stop()


# ---- many calls ---------------------------------------------------------------------------------


async def one_call(reader, writer, data):
    """(status, whether the connection goes on)."""
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head, re.I)[1])
    await reader.readexactly(length)
    return int(head.split()[1]), b"connection: close" not in head.lower()


async def many_calls(port, n, at_once, rng, cancels=0):
    """n calls over `at_once` connections, besides `cancels` that are left at a random moment: how often each status came."""
    found, left = {}, [n]

    async def client():
        reader = writer = None
        while left[0] > 0:
            left[0] -= 1
            if not writer:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            status, on = await one_call(reader, writer, raw(body([rng.randrange(5, 400) for _ in range(rng.randrange(1, 24))], rng.randrange(1, 4))))
            found[status] = found.get(status, 0) + 1
            if not on:
                writer.close()
                writer = None
        if writer:
            writer.close()

    async def leaver():
        for _ in range(cancels // 8):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw(body([rng.randrange(5, 400) for _ in range(rng.randrange(1, 80))], 500, stream=bool(rng.randrange(2)))))
            await asyncio.sleep(rng.random() * 0.02)
            writer.close()
    await asyncio.gather(*(client() for _ in range(at_once)), *(leaver() for _ in range(8 if cancels else 0)))
    return found


def check_flat(server, calls, cancels, at_once, seed):
    process = psutil.Process(server.pid)
    rng = random.Random(seed)
    asyncio.run(many_calls(server.port, 200, at_once, rng, 40))  # pools and buffers have their size now
    eventually(lambda: server.running() == 0, 20, "nothing left", server)
    before, files = process.memory_info().rss, process.num_fds()
    found = asyncio.run(many_calls(server.port, calls, at_once, rng, cancels))
    assert sum(found.values()) >= calls and set(found) <= {200, 503}, f"seed {seed}: {found}"
    eventually(lambda: server.running() == 0 and gauge(server, "pages_used") == 0 and gauge(server, "requests_in_progress") == 0, 20, "all gauges at 0", server)
    eventually(lambda: process.num_fds() <= files + 1, 20, f"at most {files + 1} open files", server)
    grown = process.memory_info().rss - before
    kept = 8 << 20 if octavo.PATIENCE == 1 else 256 << 20  # sanitizers keep what is freed for a while
    assert grown < kept + 200 * calls, f"seed {seed}: {calls} calls: the coordinator grew by {grown} bytes"
    server.check_healthy()
    return found


def test_thousands_of_calls_and_clients_that_leave_leave_no_memory_no_files_and_no_pages(launch):
    server = launch("--queue-requests", 100, "--max-seqs", 32, tp=1).wait_ready()
    check_flat(server, 400, 160, 32, 1)
    server.stop()


@pytest.mark.smoke
def test_requests_far_beyond_the_queue_are_answered_or_refused_every_one(launch):
    server = launch("--queue-requests", 8, "--max-seqs", 4, tp=1).wait_ready()
    found = check_flat(server, 500, 0, 200, 2)
    assert found.get(503, 0) > 0 and found.get(200, 0) > 0, found
    server.stop()


@pytest.mark.soak
def test_twenty_thousand_calls_and_ten_thousand_cancels(launch):
    server = launch(tp=1).wait_ready()
    check_flat(server, 20000, 10000, 64, 3)
    server.stop()
