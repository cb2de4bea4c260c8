"""octavo-worker --bench on a tiny shape: every part gives rows, and the CSV says what the table says."""
import csv
import subprocess

from octavo import BUILD

SHAPE = ["--shape", "tiny", "--decode", "1,3", "--context", "32,300", "--prefill", "70", "--prompts", "3:32", "--ops", "2",
         "--ops-prefill", "66"]


def bench(*args):
    return subprocess.run([BUILD / "octavo-worker", "--bench", *args], capture_output=True, text=True, timeout=120)


def number(row, name):
    return float(row[name]) if row[name] else 0.0


def test_every_part_gives_rows_whose_numbers_agree(tmp_path):
    ran = bench(*SHAPE, "--csv", str(tmp_path / "bench.csv"))
    assert ran.returncode == 0, ran.stderr
    rows = list(csv.DictReader(open(tmp_path / "bench.csv")))
    assert all(None not in r and None not in r.values() for r in rows), "a row has more or fewer fields than the header"
    ceiling = next(number(r, "gb_s") for r in rows if r["name"] == "read bandwidth")
    assert ceiling > 0
    steps = [(r["section"], r["name"], int(r["rows"]), int(r["context"])) for r in rows if r["section"] in ("decode", "prefill")]
    assert steps == [("decode", "", 1, 32), ("decode", "", 3, 32), ("decode", "", 1, 300), ("decode", "", 3, 300), ("prefill", "prefill", 70, 70),
                     ("prefill", "prefill, 3 prompts", 96, 32)]
    ops = [r for r in rows if r["section"] == "op"]
    names = {r["name"] for r in ops if r["rows"] == "2"}
    assert {"norm", "attend", "experts_up", "experts_down", "sample", "matmul o", "matmul head", "head_matmul (k_b, v_b)"} <= names
    assert {r["rows"] for r in ops} == {"2", "66"}
    for r in ops + [r for r in rows if r["section"] in ("decode", "prefill")]:
        us, bytes_moved = number(r, "us"), number(r, "bytes")
        assert us > 0 and bytes_moved > 0 and number(r, "fastest_us") <= us <= number(r, "slowest_us"), r
        assert abs(number(r, "floor_us") - bytes_moved / ceiling / 1e3) <= 0.01 * number(r, "floor_us") + 0.01, r
        assert abs(number(r, "gb_s") - bytes_moved / us / 1e3) <= 0.05 * number(r, "gb_s") + 0.02, r
        assert r["section"] == "op" or abs(number(r, "tokens_s") - number(r, "rows") / us * 1e6) <= 0.01 * number(r, "tokens_s"), r
    for r in rows:
        if r["section"] == "decode":
            assert 1 <= number(r, "distinct_experts") <= min(8, 2 * int(r["rows"])), r
            line = next(x.split() for x in ran.stdout.splitlines() if x.split()[:3] == ["decode", r["rows"], r["context"]])
            assert abs(float(line[3]) - number(r, "us")) <= 0.01, ("the table says something else than the CSV", r, line)


def test_what_it_cannot_read_is_a_sentence():
    for args in (["--shape", "cube"], ["--decode", "1,,2"], ["--decode", "65"], ["--context", "0"], ["--prompts", "4"], ["--csv"], ["--speed", "1"]):
        ran = bench(*args)
        assert ran.returncode == 2 and ran.stderr.startswith("bench: ") and "usage:" in ran.stderr, (args, ran.stderr)


def test_parts_left_out_are_left_out(tmp_path):
    ran = bench("--shape", "tiny", "--decode", "none", "--prefill", "none", "--csv", str(tmp_path / "bench.csv"))
    assert ran.returncode == 0, ran.stderr
    assert {r["section"] for r in csv.DictReader(open(tmp_path / "bench.csv"))} == {"ceiling"}


def test_more_prompts_than_there_are_slots_are_fed_by_turns(tmp_path):
    ran = bench("--shape", "tiny", "--decode", "none", "--prefill", "none", "--prompts", "1024:1", "--csv", str(tmp_path / "bench.csv"))
    assert ran.returncode == 0, ran.stderr
    assert [r["rows"] for r in csv.DictReader(open(tmp_path / "bench.csv")) if r["section"] == "prefill"] == ["1024"]
