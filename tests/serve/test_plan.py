"""`octavo plan`: a header of true shapes, without a byte of weights, is planned; what it prints, and its exit codes."""
import json
import subprocess
import sys

import pytest
from octavo import BUILD, SOURCE

sys.path.insert(0, str(SOURCE / "tests/bench"))
import make_gguf  # noqa: E402

TINY = SOURCE / "tests/models/tiny.gguf"


def plan(*arguments):
    p = subprocess.run([BUILD / "octavo", "plan", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    return p.returncode, p.stdout, p.stderr


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """GLM-5 at true width and depth, 450 GB of which only the header is there: the rest is a hole."""
    d = make_gguf.shape_of("full:78", False) | {"dense_layers": 3}
    header, data_bytes = make_gguf.header_of(make_gguf.keys_of(d, "hole"), make_gguf.tensors_of(d))
    path = tmp_path_factory.mktemp("plan") / "glm-5.gguf"
    with open(path, "wb") as f:
        f.write(header)
        f.truncate(len(header) + data_bytes)
    return path


def test_eight_cards_hold_the_whole_model_and_four_do_not(full):
    code, out, err = plan("--json", "--device", "rtx-pro-6000", "--tp", 8, full)
    p = json.loads(out)
    assert code == 0 and not err and p["fits"] and not p["notes"]
    assert 55e9 < p["weight_bytes"] < 62e9 and sum(p["parts"].values()) == p["weight_bytes"]
    assert p["page_bytes"] == 64 * 78 * (576 + 128) * 2
    assert p["sequences_at_context"] >= 1 and p["context"] == 202752
    one, most = p["batches"][0], p["batches"][-1]
    assert [b["batch"] for b in p["batches"]] == [1, 2, 4, 8, 16, 32, 64]
    # five to six GB a rank of eight at batch 1, whatever the exact mix
    assert 5e9 < one["read_bytes"] < 7e9 and abs(one["floor_ms"] - one["read_bytes"] / 1792e6) < 1e-6
    assert one["tokens_per_s"] < most["tokens_per_s"] and one["context_max"] > most["context_max"] > 0

    code, out, err = plan("--device", "rtx-pro-6000", "--tp", 4, full)
    assert code == 1 and out.endswith("it does not fit\n") and not err


def test_what_it_prints_names_parts_room_speed_and_what_is_not_loaded():
    code, out, err = plan("--device", "h200", "--tp", 2, TINY)
    assert code == 0 and not err
    for words in ("memory of the fullest of 2 ranks, 2 x h200", "all weights", "scratch", "for each token of a sequence", "tokens/s",
                  "note: 27 tensors of the file", "it fits"):
        assert words in out, out


@pytest.mark.parametrize("arguments, sentence", [
    (["--tp", 3, TINY], "--tp: expected a divisor of 8 heads and 4096 words, found 3"),
    (["--ctx", 5000, TINY], "--ctx: expected at most the model's 4096 tokens, found 5000"),
    (["--device", "other", TINY], "--device other: expected --memory in GiB and --bandwidth in GB/s"),
    (["--device", "abacus", TINY], "--device: expected"),
    (["--memory", "-1", TINY], "expected --memory in GiB and --bandwidth in GB/s, found -1 and 1792"),
    (["--memory", "0", TINY], "expected --memory in GiB and --bandwidth in GB/s, found 0 and 1792"),
    (["--bandwidth", "1e300", TINY], "expected --memory in GiB and --bandwidth in GB/s, found 95.6 and 1e+300"),
    ([], "expected the path of a GGUF file, found none"),
    (["none.gguf"], "none.gguf: expected to open this file"),
])
def test_a_wrong_question_is_one_sentence(arguments, sentence):
    code, out, err = plan(*arguments)
    assert code == 2 and not out and sentence in err and len(err.splitlines()) == 1, (code, out, err)
