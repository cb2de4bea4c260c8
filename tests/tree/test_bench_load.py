"""The load benchmark runs, and its figures agree with each other."""
import os
import subprocess
import sys

from octavo import SOURCE


def test_a_second_of_load_gives_a_line_whose_figures_agree():
    run = subprocess.run([sys.executable, str(SOURCE / "tests/bench/load.py"), "--rate", "20", "--seconds", "1", "--prompt", "20", "--output", "5", "--tp", "1"],
                         capture_output=True, text=True, timeout=120, env=os.environ)
    assert run.returncode == 0, run.stdout + run.stderr
    seed, head, row = run.stdout.splitlines()
    assert seed.startswith("seed 1")
    rate, calls, out, tokens_in, *times = row.split()
    ttft, gaps = [float(t) for t in times[:3]], [float(t) for t in times[3:7]]
    assert float(rate) == 20 and int(calls) >= 5 and float(out) > 0 and float(tokens_in) > 0
    assert ttft == sorted(ttft) and gaps == sorted(gaps) and ttft[0] > 0
    good, refused, cached = times[7:]
    # calls and tokens are both told by the second, and a call has a token at least
    assert 0 <= float(good) <= float(out) + 1 and int(refused) == 0 and cached.endswith("%")
