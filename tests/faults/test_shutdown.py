"""Asked to stop: running streams finish, new ones are refused, exit code 0; asked again: at once."""
import json
import signal
import time

import pytest
from octavo import CAPITAL, PHOTOSYNTHESIS, PATIENCE, Stream, body_of, eventually, join_all, question, stream_all


def long_request(tokens):
    return question(PHOTOSYNTHESIS, max_tokens=tokens, extra_body=dict(ignore_eos=True))


def start_streams(server, n, tokens):
    streams = [Stream(server, long_request(tokens)) for _ in range(n)]
    for s in streams:
        s.start()
    eventually(lambda: all(s.deltas >= 3 for s in streams), 60, "three pieces on every stream", server)
    return streams


@pytest.mark.smoke
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_asked_to_stop_it_finishes_running_streams(launch, number):
    server = launch(tp=2).wait_ready()
    undisturbed = Stream(server, long_request(300))
    stream_all([undisturbed])
    streams = start_streams(server, 3, 300)
    server.signal(number)
    eventually(lambda: server.status("/health/ready") in (503, None), 10, "health not ready", server)
    join_all(streams)
    for s in streams:
        assert s.error is None and s.reason == "length" and s.text == undisturbed.text, s.error
    assert server.wait_end() == 0
    server.check_clean()


def test_while_it_drains_new_requests_are_refused(launch):
    server = launch(tp=2).wait_ready()
    streams = start_streams(server, 2, 3000)
    server.signal()
    eventually(lambda: server.status("/health/ready") == 503, 10, "503 from /health/ready", server)
    assert server.status("/health/live") == 200
    status, headers, text = server.http("/v1/chat/completions", body_of(question(CAPITAL)))
    assert status == 503 and int(headers["Retry-After"]) > 0 and json.loads(text)["error"]["message"]
    assert all(s.is_alive() for s in streams)
    server.signal()
    assert server.wait_end() == 0
    server.check_clean()
    join_all(streams, 30)


def test_asked_twice_it_stops_at_once(launch):
    server = launch(tp=2).wait_ready()
    streams = start_streams(server, 2, 3500)
    server.signal()
    eventually(lambda: server.status("/health/ready") in (503, None), 10, "health not ready", server)
    start = time.monotonic()
    server.signal()
    assert server.wait_end(10) == 0
    assert time.monotonic() - start < 10 * PATIENCE
    server.check_clean()
    join_all(streams, 30)


def test_idle_it_stops_at_once(launch):
    server = launch(tp=8).wait_ready()
    server.signal()
    assert server.wait_end(10) == 0
    server.check_clean()


def test_asked_to_stop_while_loading_it_stops(launch):
    server = launch(tp=8).wait_port()
    server.signal()
    assert server.wait_end(15) == 0
    server.check_clean()
