#!/usr/bin/env python3
"""Load on one server: requests arrive at random (Poisson), share beginnings, differ in length; prints what their readers saw.

usage: tests/bench/load.py [--rate R,R…] [--seconds S] [--prompt N] [--long P] [--output N] [--shared P] [--ttft MS] [--gap MS] [--seed N]
                           [--url URL] [OPTION OF octavo serve…]

Owns: the server it starts, unless --url names one.  Called by: people; tests/tree/test_bench_load.py for a second.
Fails how: exit 1 with the sentence of the first request that was answered with anything but 200 or 503.

out/s    tokens of answers a second, from the first arrival to the last token
in/s     tokens of prompts a second, found in the cache or computed
ttft     ms from sending a request to its first token: half, 95 and 99 of 100 waited no longer
gap      ms between two tokens of a stream, the same way, and the longest
good/s   requests a second whose first token came within --ttft and all others within --gap of the one before
refused  answered 503
cached   tokens of prompts that were found, of all
"""
import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlparse

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from octavo import Server  # noqa: E402

VOCABULARY = 400  # plain tokens of any vocabulary


def request(rng, o, beginnings):
    """The body of one request: a shared beginning or none, a short prompt or a long one, an answer of exponential length."""
    n = int(max(1, rng.expovariate(1 / o.prompt))) * (10 if rng.random() < o.long else 1)
    n = min(n, o.context // 2)
    prompt = rng.choice(beginnings)[:n // 2] if rng.random() < o.shared else []
    prompt = prompt + [rng.randrange(5, VOCABULARY) for _ in range(n - len(prompt))]
    answer = min(1 + int(rng.expovariate(1 / o.output)), o.context - n - 1)
    return dict(model=o.model, prompt=prompt, max_tokens=answer, temperature=0, ignore_eos=True, stream=True, logprobs=0,
                stream_options=dict(include_usage=True))


class Seen:
    """What one reader saw."""

    def __init__(self):
        self.sent, self.times, self.status, self.prompt, self.cached, self.error = time.perf_counter(), [], 0, 0, 0, ""


async def read(host, port, key, body):
    s = Seen()
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{auth}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        s.status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        if s.status != 200:
            s.error = (await reader.read()).decode(errors="replace")
            return s
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            now = time.perf_counter()
            for choice in event.get("choices", []):
                s.times += [now] * len((choice.get("logprobs") or {}).get("tokens", []))
            if event.get("usage"):
                s.prompt = event["usage"]["prompt_tokens"]
                s.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            if "error" in event:
                s.status, s.error = 500, event["error"]["message"]
    finally:
        writer.close()
    return s


async def run(host, port, key, o, rate, rng):
    beginnings = [[rng.randrange(5, VOCABULARY) for _ in range(o.context)] for _ in range(4)]
    tasks, due, end = [], time.perf_counter(), time.perf_counter() + o.seconds
    while due < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(read(host, port, key, request(rng, o, beginnings))))
        due += rng.expovariate(rate)
    return await asyncio.gather(*tasks)


def share(values, p):
    return sorted(values)[min(len(values) - 1, int(p * len(values)))] * 1e3 if values else float("nan")


HEAD = f"{'rate':>6} {'calls':>6} {'out/s':>8} {'in/s':>9} {'ttft 50':>8} {'95':>7} {'99':>7} {'gap 50':>8} {'95':>7} {'99':>7} {'max':>7} {'good/s':>7} {'refused':>7} {'cached':>7}"


def line(rate, seen, o):
    done = [s for s in seen if s.status == 200 and s.times]
    wrong = next((s.error for s in seen if s.status not in (200, 503)), None)
    if wrong:
        raise SystemExit(f"load: expected 200 or 503, found: {wrong}")
    first = [s.times[0] - s.sent for s in done]
    gaps = [b - a for s in done for a, b in zip(s.times, s.times[1:])]
    took = max(s.times[-1] for s in done) - min(s.sent for s in seen)
    good = sum(s.times[0] - s.sent <= o.ttft / 1e3 and all(b - a <= o.gap / 1e3 for a, b in zip(s.times, s.times[1:])) for s in done)
    asked = sum(s.prompt for s in done)
    return (f"{rate:6g} {len(seen):6} {sum(len(s.times) for s in done) / took:8.0f} {asked / took:9.0f} {share(first, .5):8.1f} {share(first, .95):7.1f} {share(first, .99):7.1f} "
            f"{share(gaps, .5):8.2f} {share(gaps, .95):7.2f} {share(gaps, .99):7.2f} {share(gaps, 1):7.2f} {good / took:7.2f} {len(seen) - len(done):7} {100 * sum(s.cached for s in done) / max(1, asked):6.0f}%")


def main():
    p = argparse.ArgumentParser(usage=__doc__.partition("usage: ")[2].partition("\n\n")[0])
    p.add_argument("--rate", default="2,8,32")
    p.add_argument("--seconds", type=float, default=10)
    p.add_argument("--prompt", type=int, default=100, help="mean length")
    p.add_argument("--long", type=float, default=0.1, help="how many are ten times as long")
    p.add_argument("--output", type=int, default=50, help="mean length")
    p.add_argument("--shared", type=float, default=0.5, help="how many begin with half a prompt that others have too")
    p.add_argument("--ttft", type=float, default=1000)
    p.add_argument("--gap", type=float, default=200)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--url")
    p.add_argument("--key")
    o, options = p.parse_known_args()
    server = None
    try:
        if o.url:
            u = urlparse(o.url)
            host, port = u.hostname, u.port or 80
        else:
            tp = int(options[options.index("--tp") + 1]) if "--tp" in options else None
            if tp:
                del options[(at := options.index("--tp")):at + 2]
            server = Server(tempfile.mkdtemp(prefix="octavo-load-"), *options, tp=tp).wait_ready()
            host, port = "127.0.0.1", server.port
        headers = {"Authorization": f"Bearer {o.key}"} if o.key else {}
        with urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/v1/models", headers=headers)) as r:
            model = json.load(r)["data"][0]
        o.model, o.context = model["id"], model["max_model_len"]
        print(f"seed {o.seed}, {' '.join(options) or 'default options'}\n{HEAD}")
        for rate in map(float, o.rate.split(",")):
            print(line(rate, asyncio.run(run(host, port, o.key, o, rate, random.Random(o.seed))), o), flush=True)
        if server:
            server.stop()
    finally:
        if server:
            server.destroy()


if __name__ == "__main__":
    main()
