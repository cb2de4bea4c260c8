#!/usr/bin/env python3
"""How long a death is felt: kills ranks of a running server under streams and prints the time from the death to the next token, by part.

usage: tests/bench/recovery.py [--tp N] [--streams N] [--kills N] [OPTION OF octavo serve…]

Owns: the server it starts.  Called by: people, and tests/run in its soak ring.
Fails how: an AssertionError when a stream breaks or the log tells of no recovery.

notice   from the kill to the log line that names the dead
reclaim  until its memory is back and a successor is started
load     until the successor has its weights
join     until all ranks share a communicator again
copy     until the successor has the live cache pages
token    from then until the next piece of text reaches a client
total    from the kill to that piece
"""
import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from octavo import UNSURE, Server, Stream, eventually, question  # noqa: E402

PARTS = ("notice", "reclaim", "load", "join", "copy", "token", "total")


class Watched(Stream):
    """A stream that notes when its pieces come."""
    at = 0.0

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "text" and value:
            super().__setattr__("at", time.time())


def stamp(line):
    """The time of a log line, in seconds since 1970."""
    day, clock, ms = re.match(r"(\S+)T(\d\d:\d\d:\d\d)\.(\d+)Z", line).groups()
    return time.mktime(time.strptime(f"{day} {clock} UTC", "%Y-%m-%d %H:%M:%S %Z")) - time.timezone + int(ms) / 1000


def lines(server, event):
    return [line for line in server.log().splitlines() if f" coordinator {event} " in line]


def once(server, streams, rank):
    """Kills `rank` and returns the parts in milliseconds."""
    before = len(lines(server, "recovered"))
    pid = next(w["pid"] for w in server.workers() if w["rank"] == rank)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(lines(server, "recovered")) > before, 120, "a line that tells of the recovery", server)
    told = lines(server, "recovered")[-1]
    ready = stamp(told)
    eventually(lambda: any(s.at >= ready + 0.001 for s in streams), 60, "the next piece of text", server)
    token = min(s.at for s in streams if s.at >= ready + 0.001)
    ms = {k: float(v) for k, v in re.findall(r"(\w+)_ms=([\d.]+)", told)}
    died = stamp(lines(server, "died")[-1])
    assert (died - killed) * 1000 < 60000
    return ms | dict(notice=max(0.0, (died - killed) * 1000), token=(token - ready) * 1000, total=(token - killed) * 1000)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--kills", type=int, default=8)
    mine, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(folder, "--restarts-max", 1000, *options, tp=mine.tp)
        try:
            server.wait_ready(3600)
            rows = []
            endless = lambda i: question(UNSURE, temperature=1.0, seed=i, max_tokens=2000, extra_body=dict(ignore_eos=True))
            streams = [Watched(server, endless(i)) for i in range(mine.streams)]
            for s in streams:
                s.start()
            eventually(lambda: all(s.deltas >= 3 for s in streams), 120, "three pieces on every stream", server)
            for k in range(mine.kills):
                rows.append(once(server, streams, k % mine.tp))
                assert all(s.error is None for s in streams), [s.error for s in streams]
        finally:
            server.destroy()
    print(f"{mine.tp} ranks, {mine.streams} streams, {mine.kills} deaths; milliseconds")
    print(f"{'':8}" + "".join(f"{p:>9}" for p in PARTS))
    for name, f in (("median", statistics.median), ("worst", max)):
        print(f"{name:8}" + "".join(f"{f(r[p] for r in rows):9.1f}" for p in PARTS))


if __name__ == "__main__":
    main()
