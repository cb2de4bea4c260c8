"""Many clients at once: streams do not disturb each other, a leaving client is forgotten, a slow one is bounded."""
import json
import random
import socket
import threading

import psutil
import pytest
from octavo import CAPITAL, PHOTOSYNTHESIS, UNSURE, Stream, body_of, eventually, question, stream_all

QUESTIONS = [CAPITAL, PHOTOSYNTHESIS, "What is 12 + 30?", "Say hello in Japanese.", "Show an emoji for: cat, fire, house", "What is the capital of Italy?",
             "What is the capital of Peru?", "Give the capital of Spain as JSON.", "What is 7 + 8?", "Count from 1 to 10.", "What is 40 - 15?", "What is the capital of Japan?"]


def requests(rng, n):
    """n requests, half of them sampled, half of them thinking."""
    for _ in range(n):
        sampled = rng.random() < 0.5
        more = dict(temperature=1.0, seed=rng.randrange(1 << 30)) if sampled else {}
        yield question(UNSURE if sampled else rng.choice(QUESTIONS), thinking=rng.random() < 0.5, max_tokens=48, **more)


def crowd(server, seed, n):
    """n streams at once, a third of which leave early; the others must say what they say alone."""
    rng = random.Random(seed)
    streams = [Stream(server, r, leave_after=rng.randrange(1, 10) if rng.random() < 0.33 else None) for r in requests(rng, n)]
    stream_all(streams, 240)
    stayed = [s for s in streams if not s.left]
    for s in stayed:
        assert s.error is None, f"seed {seed}: {s.request['messages']}: {s.error!r}" + server.log_end()
    eventually(lambda: server.running() == 0, 10, "no sequence running after all clients went", server)
    for s in {json.dumps(s.request): s for s in stayed}.values():
        alone = Stream(server, s.request)
        stream_all([alone])
        for t in stayed:
            if t.request == s.request:
                assert t.text == alone.text and t.reason == alone.reason, f"seed {seed}: {t.request}: expected {alone.text!r}, found {t.text!r}"


def test_sixty_four_streams_with_random_leaving_say_what_they_say_alone(server):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    crowd(server, seed, 64)


@pytest.mark.smoke
def test_eight_streams_with_random_leaving_say_what_they_say_alone(server):
    crowd(server, 8, 8)


@pytest.mark.soak
def test_crowds_for_a_long_time(server):
    for seed in range(40):
        crowd(server, seed, 96)


def open_raw(server, receive_buffer=None, **more):
    """A raw streaming request of a long answer: the socket, nothing read yet."""
    data = json.dumps(body_of(question(PHOTOSYNTHESIS, stream=True, extra_body=dict(ignore_eos=True), **more))).encode()
    s = socket.socket()
    if receive_buffer:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    s.connect(("127.0.0.1", server.port))
    s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return s


@pytest.mark.smoke
def test_a_client_that_leaves_is_forgotten_at_once(server):
    with open_raw(server, max_tokens=3000) as s:
        s.recv(4096)
        eventually(lambda: server.running() == 1, 10, "one sequence running", server)
    eventually(lambda: server.running() == 0, 5, "no sequence running after the client left", server)
    server.check_healthy()


def test_thirty_clients_that_leave_leave_nothing(server):
    sockets = [open_raw(server, max_tokens=3000) for _ in range(30)]
    eventually(lambda: server.running() == 30, 30, "thirty sequences running", server)
    for s in sockets:
        s.close()
    eventually(lambda: server.running() == 0, 5, "no sequence running after the clients left", server)


def test_a_client_that_does_not_read_is_bounded_and_slows_nobody(server):
    memory = lambda: psutil.Process(server.pid).memory_info().rss
    with open_raw(server, receive_buffer=4096, max_tokens=3000) as slow:
        slow.recv(1)
        before = memory()
        others = [Stream(server, question(PHOTOSYNTHESIS)) for _ in range(10)]
        stream_all(others)
        assert len({s.text for s in others}) == 1 and not any(s.error for s in others)
        assert memory() - before < 32 << 20, "the coordinator's memory grew"
    eventually(lambda: server.running() == 0, 10, "no sequence running after the slow client left", server)


def test_scraping_does_not_disturb_streams(server):
    """Metrics and workers are read again and again, some reads broken off, while streams run."""
    done = threading.Event()

    def scrape():
        while not done.wait(0.05):
            server.http("/metrics")
            server.workers()
            with socket.create_connection(("127.0.0.1", server.port)) as s:
                s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    scraper = threading.Thread(target=scrape, daemon=True)
    scraper.start()
    streams = [Stream(server, question(PHOTOSYNTHESIS)) for _ in range(4)]
    stream_all(streams)
    done.set()
    scraper.join(30)
    assert not scraper.is_alive()
    assert len({s.text for s in streams}) == 1 and not any(s.error for s in streams)
