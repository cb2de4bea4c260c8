"""Requests with bytes changed at random: each gets an answer or an end, and the server goes on.

The seed of a failure is printed; set SEED to it to see the same requests again.
"""
import json
import random
import socket

import pytest
from octavo import PATIENCE

SEED = None  # a printed seed, to repeat that run
PARTS = [b"null", b"-1", b"1e999", b"9" * 400, b"{", b"}", b"[", b"]", b'"', b"\\u0000", b"\\ud800", b"\xff", b"\0", b"\r\n", b"\r\n\r\n", b":", b",", b" ", b"chunked", b"0", b"true"]
BODY = dict(model="tiny.gguf", messages=[dict(role="system", content="Be brief."), dict(role="user", content=[dict(type="text", text="What is 2 + 3?")]),
            dict(role="assistant", content=None, tool_calls=[dict(id="c", type="function", function=dict(name="f", arguments='{"a":1}'))]),
            dict(role="tool", tool_call_id="c", content="5")], tools=[dict(type="function", function=dict(name="f", description="d", parameters=dict(type="object", properties=dict(a=dict(type="integer")))))],
            max_tokens=4, temperature=0.5, top_p=0.9, seed=3, stop=["x"], n=2, stream=True, stream_options=dict(include_usage=True), logprobs=True, top_logprobs=2,
            logit_bias={"5": 1.5}, presence_penalty=0.5, chat_template_kwargs=dict(enable_thinking=False))


def mutated(rng, data):
    for _ in range(rng.randrange(1, 4)):
        i = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:i] + bytes([rng.randrange(256)]) + data[i + 1:]
        elif kind == 1:
            data = data[:i] + data[i + rng.randrange(1, 20):]
        elif kind == 2:
            data = data[:i] + rng.choice(PARTS) + data[i:]
        elif kind == 3:
            j = rng.randrange(len(data) + 1)
            data = data[:i] + data[min(i, j):max(i, j)] + data[i:]
        else:
            data = data[:i]
        if not data:
            return b"x"
    return data


def send(server, data, half_close):
    """What comes back until the server closes or, for a whole request, until its answer has ended."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60 * PATIENCE) as s:
        try:
            s.sendall(data)
            if half_close:
                s.shutdown(socket.SHUT_WR)
            answer = b""
            while more := s.recv(65536):
                answer += more
            return answer
        except ConnectionError:
            return b""


def head(length):
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % length


def mutate(server, n):
    seed = SEED or random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole = json.dumps(BODY).encode()
    for i in range(n):
        if i % 2:
            body = mutated(rng, whole)
            answer = send(server, head(len(body)) + body, False)
            assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4")), f"seed {seed}, request {i}: {body!r}: expected 200 or a refusal, found {answer[:200]!r}"
        else:
            answer = send(server, mutated(rng, head(len(whole)) + whole), True)
            assert not answer or answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4", b"HTTP/1.1 1", b"HTTP/1.1 501", b"HTTP/1.1 505")), f"seed {seed}, request {i}: found {answer[:200]!r}"
        assert server.process.poll() is None, f"seed {seed}, request {i}: the server ended" + server.log_end()


@pytest.mark.smoke
def test_mutated_requests_are_answered_or_refused(server):
    mutate(server, 150)
    server.check_healthy()


@pytest.mark.soak
def test_many_mutated_requests_are_answered_or_refused(server):
    mutate(server, 20_000)
    server.check_healthy()
