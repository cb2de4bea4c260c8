"""Recovery is exhausted: open streams end well-formed with an error after what they had, and the exit code says what to do."""
import json
import os
import signal
import threading
import urllib.error
import urllib.request

import pytest
from octavo import PATIENCE, PHOTOSYNTHESIS, Stream, body_of, eventually, question, stream_all

ENDLESS = dict(max_tokens=3000, extra_body=dict(ignore_eos=True))


class Raw(threading.Thread):
    """One answer as it comes, to its very end: status, events, or how the connection broke."""

    def __init__(self, server, path, body):
        super().__init__(daemon=True)
        self.request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        self.status, self.text, self.broken = None, "", None

    def run(self):
        try:
            with urllib.request.urlopen(self.request, timeout=120 * PATIENCE) as r:
                self.status = r.status
                for line in r:
                    self.text += line.decode()
        except urllib.error.HTTPError as e:
            self.status, self.text = e.code, e.read().decode()
        except Exception as e:
            self.broken = e

    def events(self):
        return [e.removeprefix("data: ") for e in self.text.split("\n\n") if e.startswith("data: ")]


@pytest.mark.smoke
def test_streams_end_with_an_error_after_the_tokens_they_had(launch):
    server = launch("--restarts-max", 1, tp=2).wait_ready()
    undisturbed = Stream(server, question(PHOTOSYNTHESIS, **ENDLESS | dict(max_tokens=600)))
    stream_all([undisturbed])
    chat = body_of(question(PHOTOSYNTHESIS, stream=True, **ENDLESS))
    text = dict(model="tiny.gguf", prompt="a", temperature=0, max_tokens=3000, ignore_eos=True, stream=True)
    streams = [Raw(server, "/v1/chat/completions", chat) for _ in range(4)] + [Raw(server, "/v1/completions", text)]
    whole = Raw(server, "/v1/chat/completions", chat | dict(stream=False))
    for s in streams + [whole]:
        s.start()
    for _ in range(2):
        before = [s.text.count("\n\n") for s in streams]
        eventually(lambda: all(s.text.count("\n\n") >= n + 3 for s, n in zip(streams, before)), 60, "three events more on every stream", server)
        os.kill(server.workers()[1]["pid"], signal.SIGKILL)
    for s in streams + [whole]:
        s.join(30 * PATIENCE)
        assert not s.is_alive() and s.broken is None, f"expected an orderly end, found {s.broken!r}" + server.log_end()
    for s in streams:
        *said, last = s.events()
        error = json.loads(last)["error"]
        assert "restarts within" in error["message"] and error["type"] == "server_error", error
        assert "[DONE]" not in said and not any("error" in json.loads(e) for e in said)
        assert not any(c["finish_reason"] for e in said for c in json.loads(e)["choices"])
    for s in streams[:4]:
        content = "".join(c["delta"].get("content") or "" for e in s.events()[:-1] for c in json.loads(e)["choices"])
        assert len(content) > 10 and (undisturbed.text.startswith(content) or content.startswith(undisturbed.text)), content
    assert whole.status == 503 and "restarts within" in json.loads(whole.text)["error"]["message"], whole.text
    assert server.wait_end() == 1, server.log_end()
    server.check_clean()


def test_those_who_wait_in_the_queue_are_told_too(launch):
    server = launch("--restarts-max", 1, "--max-seqs", 1, tp=1).wait_ready()
    waiting = [Raw(server, "/v1/chat/completions", body_of(question(PHOTOSYNTHESIS, **ENDLESS))) for _ in range(5)]
    for s in waiting:
        s.start()
    eventually(lambda: server.running() == 5, 30, "five sequences", server)
    for _ in range(2):
        pid = server.workers()[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: server.process.poll() is not None or not os.path.exists(f"/proc/{pid}"), 30, "its end", server)
        eventually(lambda: server.process.poll() is not None or [w for w in server.workers() if w["pid"] not in (0, pid)], 30, "a successor or the end", server)
    for s in waiting:
        s.join(30 * PATIENCE)
        assert s.status == 503 and json.loads(s.text)["error"]["message"], (s.status, s.text, s.broken)
    assert server.wait_end() == 1, server.log_end()
    server.check_clean()
