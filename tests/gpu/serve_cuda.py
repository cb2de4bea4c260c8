"""The whole service on a GPU: golden answers through HTTP for several numbers of ranks, a killed rank, speed.

usage: tests/gpu/serve_cuda.py [--octavo PATH] [--device cuda] [--tp 1,2,4,8] [--cases NAME,…] [--streams N] [-- OPTION…]

Needs a GPU, a folder of programs (deploy/bundle makes one) and nothing beyond Python's standard library, so
that it runs where no package can be installed. Ranks share the GPU when there are fewer GPUs than ranks.
Prints a line per check and a table; exit 1 if a check failed.
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent
CASES = json.loads((TOP / "tests/golden/golden.json").read_text())["cases"]
PHOTOSYNTHESIS = "Write a brief explanation of how photosynthesis works."
TIE = 0.02  # where the golden margin is smaller, float32 sums in another order may choose otherwise
failed = 0


def check(ok, what, detail=""):
    global failed
    failed += not ok
    print(("PASS " if ok else "FAIL ") + what + (f": {detail}" if detail and not ok else ""), flush=True)


class Server:
    def __init__(self, octavo, device, tp, *more):
        self.log = open(f"serve-cuda-{tp}.log", "w+", errors="replace")
        self.start = time.monotonic()
        self.process = subprocess.Popen([octavo, "serve", "--model", str(TOP / "tests/models/tiny.gguf"), "--device", device, "--tp", str(tp),
                                         "--port", "0", *more], stderr=self.log, stdout=self.log)
        self.base = None
        while self.base is None:
            if self.process.poll() is not None or time.monotonic() - self.start > 120:
                raise SystemExit(f"FAIL the server with {tp} ranks is not ready\n{self.text()[-3000:]}")
            found = re.search(r" ready url=(\S+)", self.text())
            self.base = found and found.group(1)
            time.sleep(0.02)
        self.ready_s = time.monotonic() - self.start

    def text(self):
        return Path(self.log.name).read_text(errors="replace")

    def get(self, path):
        return json.load(urllib.request.urlopen(self.base + path, timeout=30))

    def chat(self, body):
        request = urllib.request.Request(self.base + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def expected(case):
    text = re.sub(r"<\|(user|observation|endoftext)\|>$", "", case["greedy_text"])
    reasoning, calls = None, []
    if case["thinking"]:
        reasoning, _, text = text.partition("</think>")
    for call in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S):
        name = call.split("<arg_key>")[0]
        calls.append((name, dict(re.findall(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", call, re.S))))
    return reasoning or None, re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.S), calls


def golden(server, tp, names):
    for case in CASES:
        if names and case["name"] not in names:
            continue
        body = dict(messages=case["messages"], temperature=0, max_tokens=200, chat_template_kwargs=dict(enable_thinking=case["thinking"]))
        if case.get("tools"):
            body["tools"] = case["tools"]
        message = json.load(server.chat(body))["choices"][0]["message"]
        calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
        found = (message.get("reasoning_content") or None, message.get("content") or "", calls)
        close = min(g[2] for g in case["greedy"]) < TIE
        if found != expected(case) and close:
            print(f"note {tp} ranks, {case['name']}: differs, with a golden margin below {TIE}")
            continue
        check(found == expected(case), f"{tp} ranks, golden answer of {case['name']}", f"expected {expected(case)}, found {found}")


def stream(server, out, first=None):
    body = dict(messages=[dict(role="user", content=PHOTOSYNTHESIS)], temperature=0, stream=True, chat_template_kwargs=dict(enable_thinking=False))
    text, stamps = "", []
    for line in server.chat(body):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("error"):
            text += f"<error {event['error']}>"
        for choice in event.get("choices", []):
            if choice["delta"].get("content"):
                stamps.append(time.monotonic())
                text += choice["delta"]["content"]
                if first:
                    first.set()
    out.append((text, stamps))


def crowd(server, n, during=None):
    outs, started = [], threading.Event()
    threads = [threading.Thread(target=stream, args=(server, outs, started)) for _ in range(n)]
    begin = time.monotonic()
    for t in threads:
        t.start()
    if during:
        started.wait(60)
        during()
    for t in threads:
        t.join()
    return outs, time.monotonic() - begin


def speed(server, n):
    crowd(server, 1)
    (one,), _ = crowd(server, 1)
    rate = (len(one[1]) - 1) / (one[1][-1] - one[1][0])
    outs, seconds = crowd(server, n)
    return rate, sum(len(s) for _, s in outs) / seconds, one[0]


def kill_one(server, tp, want):
    workers = server.get("/v1/workers")["data"]
    victim = workers[-1]["pid"]
    outs, seconds = crowd(server, 8, lambda: os.kill(victim, signal.SIGKILL))
    check(len(outs) == 8 and all(t == want for t, _ in outs), f"{tp} ranks, eight streams go on after kill -9 of the last rank", f"{[t[-80:] for t, _ in outs]}")
    after = server.get("/v1/workers")["data"]
    kept = sum(a["pid"] == b["pid"] for a, b in zip(workers, after))
    check(kept == tp - 1, f"{tp} ranks, the others were kept", f"kept {kept}")
    for line in server.text().splitlines():
        if re.search(r" (recovered|reclaimed|died|lost) ", line):
            print("     " + line)


def main():
    parse = argparse.ArgumentParser()
    parse.add_argument("--octavo", default=str(TOP / "bundle/octavo"))
    parse.add_argument("--device", default="cuda")
    parse.add_argument("--tp", default="1,2,4,8")
    parse.add_argument("--cases", default="", help="golden cases to ask, all if empty")
    parse.add_argument("--streams", type=int, default=64, help="streams of the crowd that is timed")
    parse.add_argument("more", nargs="*", help="further options of octavo serve, after --")
    o = parse.parse_args()
    rows = []
    for tp in map(int, o.tp.split(",")):
        server = Server(o.octavo, o.device, tp, *o.more)
        golden(server, tp, o.cases.split(",") if o.cases else None)
        one, many, text = speed(server, o.streams)
        rows.append((tp, server.ready_s, one, many))
        if tp > 1:
            kill_one(server, tp, text)
        code = server.stop()
        check(code == 0, f"{tp} ranks, stops with exit code 0", f"found {code}")
    print(f"\nranks  ready s  tokens/s, one stream  tokens/s, {o.streams} streams")
    for tp, ready, one, many in rows:
        print(f"{tp:5}  {ready:7.2f}  {one:20.0f}  {many:20.0f}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
