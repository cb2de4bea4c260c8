"""Drives one `octavo serve` as a user would: starts it, waits, asks, stops it, and looks for what it left.

Owns: the process it started, its log file.  Called by: tests/conftest.py, tests/serve, tests/faults.
Fails how: AssertionError with the end of the server's log. Every wait has a deadline and polls; there
is no sleep that a result depends on.
"""
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import openai
import psutil

SOURCE = Path(os.environ.get("OCTAVO_SOURCE_ROOT", Path(__file__).resolve().parent.parent))
BUILD = Path(os.environ.get("OCTAVO_BUILD_ROOT", SOURCE / "build"))
GOLDEN = json.loads((SOURCE / "tests/golden/golden.json").read_text())
CASES = {c["name"]: c for c in GOLDEN["cases"]}

CAPITAL = "What is the capital of France? Answer in one sentence."
CAPITAL_ANSWER = "The capital of France is Paris."
UNSURE = "Tell me about zebras and lamps."  # not in its training: sampling says something else each time
PHOTOSYNTHESIS = "Write a brief explanation of how photosynthesis works."

# Deadlines are for a quiet machine; sanitizer builds multiply them (--patience).
PATIENCE = 1.0
TP = 8


def eventually(found, seconds, what, server=None):
    """Polls until found() is true and returns its value."""
    deadline = time.monotonic() + seconds * PATIENCE
    while True:
        value = found()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"expected within {seconds * PATIENCE:.0f} s: {what}" + (server.log_end() if server else ""))
        time.sleep(0.02)


def visible(text):
    """A golden answer without its end token."""
    return re.sub(r"<\|(user|observation|endoftext)\|>$", "", text)


def expected(case):
    """What the API owes for a golden case: (reasoning or None, content, [(tool, arguments)])."""
    text = visible(case["greedy_text"])
    reasoning = None
    if case["thinking"]:
        reasoning, _, text = text.partition("</think>")
    calls = []
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", text):
        name = body.partition("<arg_key>")[0]
        pairs = re.findall(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", body)
        calls.append((name, dict(pairs)))
    return reasoning, text.partition("<tool_call>")[0], calls


def request_of(case):
    """The request for a golden case, as the official client sends it."""
    messages = []
    for m in case["messages"]:
        m = dict(m)
        if m.get("tool_calls"):
            m["tool_calls"] = [dict(id="call_1", type="function", function=dict(
                name=c["function"]["name"], arguments=json.dumps(c["function"]["arguments"]))) for c in m["tool_calls"]]
        if m["role"] == "tool":
            m["tool_call_id"] = "call_1"
        messages.append(m)
    request = dict(model="tiny.gguf", messages=messages, temperature=0, max_tokens=200,
                   extra_body=dict(chat_template_kwargs=dict(enable_thinking=case["thinking"])))
    if case.get("tools"):
        request["tools"] = case["tools"]
    return request


def question(text, thinking=False, **more):
    """The request for one question, greedy unless told otherwise."""
    extra = dict(chat_template_kwargs=dict(enable_thinking=thinking)) | more.pop("extra_body", {})
    return dict(model="tiny.gguf", messages=[dict(role="user", content=text)], temperature=0, max_tokens=200, extra_body=extra) | more


def body_of(request):
    """A request of the official client as the body that it sends."""
    return {k: v for k, v in request.items() if k != "extra_body"} | request.get("extra_body", {})


class Server:
    """One `octavo serve` on a free port of its own choosing."""

    def __init__(self, folder, *options, tp=None, port=0, env=None, cpus=None, program=None):
        self.tp = tp or TP
        self.mark = uuid.uuid4().hex  # in the environment of all its processes
        self.log_path = Path(folder) / f"octavo-{self.mark[:8]}.log"
        self.shm_before = set(os.listdir("/dev/shm"))
        self.seen = set()  # pids that the workers' list named
        self.port = None
        command = [str(program or BUILD / "octavo"), "serve", "--tp", str(self.tp), "--port", str(port), *map(str, options)]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command, stderr=log, stdout=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"TEST_MARK": self.mark} | (env or {}),
                preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None)
        self.pid = self.process.pid

    # ---- looking

    def log(self):
        return self.log_path.read_text(errors="replace")

    def log_end(self):
        return "\n---- end of the server's log ----\n" + "\n".join(self.log().splitlines()[-40:])

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def http(self, path, body=None, method=None, headers=None, timeout=30):
        """(status, headers, text) of one request."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} | (headers or {}), method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout * PATIENCE) as r:
                return r.status, r.headers, r.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.headers, e.read().decode()

    def status(self, path, **more):
        """The status of a GET, or None when nobody answers."""
        try:
            return self.http(path, **more)[0]
        except OSError:
            return None

    def workers(self):
        """The workers as the API lists them; [] when it does not answer."""
        try:
            rows = json.loads(self.http("/v1/workers", timeout=5)[2])["data"]
        except (OSError, ValueError, KeyError):
            return []
        self.seen.update(w["pid"] for w in rows if w["pid"] > 0)
        return rows

    def running(self):
        """Sequences in progress and waiting, as the metrics tell."""
        text = self.http("/metrics")[2]
        found = re.findall(r"^octavo_(?:requests|sequences)_(?:running|waiting)(?:\{[^}]*\})? (\d+)", text, re.M)
        assert len(found) >= 2, f"expected gauges of running and waiting sequences, found:\n{text}"
        return sum(map(int, found))

    def processes(self):
        """Pids of this server's processes that are alive, coordinator included."""
        alive = set()
        for p in psutil.process_iter(["pid", "status"]):
            if p.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            try:
                if f"TEST_MARK={self.mark}".encode() in Path(f"/proc/{p.pid}/environ").read_bytes().split(b"\0"):
                    alive.add(p.pid)
            except OSError:
                pass
        return alive

    # ---- waiting

    def wait_port(self):
        def found():
            m = re.search(r"\b(?:listening|serving|listen)\b.*?(?:port=|:)(\d+)\b(?![:.])", self.log())
            assert m or self.process.poll() is None, f"the server ended with {self.process.returncode}" + self.log_end()
            return m and int(m[1])
        self.port = eventually(found, 60, "a log line that names the port", self)
        return self

    def wait_ready(self, seconds=60):
        if self.port is None:
            self.wait_port()

        def ready():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}" + self.log_end()
            return self.status("/health/ready") == 200
        eventually(ready, seconds, "200 from /health/ready", self)
        self.workers()
        return self

    # ---- asking

    def client(self, **more):
        return openai.OpenAI(base_url=self.url + "/v1", **(dict(api_key="none", max_retries=0, timeout=120 * PATIENCE) | more))

    def chat(self, text, **more):
        """The content of one whole answer."""
        with self.client() as client:
            return client.chat.completions.create(**question(text, **more)).choices[0].message.content

    def check_healthy(self):
        found = self.chat(CAPITAL, max_tokens=16)
        assert found == CAPITAL_ANSWER, f"expected {CAPITAL_ANSWER!r}, found {found!r}" + self.log_end()

    # ---- ending

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait_end(self, seconds=30):
        try:
            return self.process.wait(seconds * PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"expected the server to end within {seconds * PATIENCE:.0f} s" + self.log_end()) from None

    def check_clean(self, seconds=10):
        """Nothing of it is left: no process, no shared memory, no complaint of a sanitizer."""
        eventually(lambda: not self.processes(), seconds, "no process of the server left", self)
        left = set(os.listdir("/dev/shm")) - self.shm_before
        assert not left, f"expected nothing new in /dev/shm, found {sorted(left)}"
        wrong = re.search(r"^.*(?:ERROR: \w+Sanitizer|runtime error:|WARNING: ThreadSanitizer|assertion|Assertion).*$", self.log(), re.M)
        assert not wrong, f"expected a clean log, found {wrong[0]}" + self.log_end()

    def stop(self):
        """Asks it to stop and checks that it did, cleanly."""
        if self.process.poll() is None:
            self.signal()
        code = self.wait_end()
        assert code == 0, f"expected exit code 0, found {code}" + self.log_end()
        self.check_clean()

    def destroy(self):
        """Whatever state it is in, nothing of it stays behind."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Stream(threading.Thread):
    """One streamed answer, read on a thread of its own: text so far, reason, error."""

    def __init__(self, server, request, leave_after=None):
        super().__init__(daemon=True)
        self.server, self.request, self.leave_after = server, request, leave_after
        self.text, self.deltas, self.reason, self.error, self.left = "", 0, None, None, False

    def run(self):
        try:
            with self.server.client() as client, client.chat.completions.create(stream=True, **self.request) as stream:
                for chunk in stream:
                    for choice in chunk.choices:
                        self.take(choice)
                    if self.leave_after is not None and self.deltas >= self.leave_after:
                        self.left = True
                        return
        except Exception as e:  # shown by whoever looks at the result
            self.error = e

    def take(self, choice):
        piece = (getattr(choice.delta, "reasoning_content", None) or "") + (choice.delta.content or "")
        self.text += piece
        self.deltas += bool(piece)
        self.reason = choice.finish_reason or self.reason


def stream_all(streams, seconds=120):
    """Starts them, waits for all."""
    for s in streams:
        s.start()
    join_all(streams, seconds)


def join_all(streams, seconds=120):
    deadline = time.monotonic() + seconds * PATIENCE
    for s in streams:
        s.join(max(0.0, deadline - time.monotonic()))
    stuck = [s for s in streams if s.is_alive()]
    assert not stuck, f"expected every stream to end within {seconds * PATIENCE:.0f} s, {len(stuck)} did not" + streams[0].server.log_end()
