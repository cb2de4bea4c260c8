"""The writer of synthetic models: names, shapes and types of every tensor, sane values, equal bytes for equal seeds, and Octavo serves what it writes."""
import json
import re
import subprocess
import sys

import gguf
import numpy as np
import pytest
from octavo import BUILD, SOURCE

sys.path.insert(0, str(SOURCE / "tests/bench"))
import make_gguf  # noqa: E402

# What full:2 --tiny holds, columns first: 512 wide, 8 heads, dense 1024, 16 experts of 512.
EVERY = {"attn_norm": ("F32", 512), "attn_q_a": ("Q8_0", 512, 256), "attn_q_a_norm": ("F32", 256), "attn_q_b": ("Q8_0", 256, 2048),
         "attn_kv_a_mqa": ("Q8_0", 512, 576), "attn_kv_a_norm": ("F32", 512), "attn_k_b": ("Q8_0", 192, 512, 8),
         "attn_v_b": ("Q8_0", 512, 256, 8), "attn_output": ("Q8_0", 2048, 512), "indexer.attn_q_b": ("Q8_0", 256, 512),
         "indexer.attn_k": ("Q8_0", 512, 128), "indexer.proj": ("F32", 512, 4), "indexer.k_norm": ("F32", 128),
         "indexer.k_norm.bias": ("F32", 128), "ffn_norm": ("F32", 512)}
DENSE = {"ffn_gate": ("Q8_0", 512, 1024), "ffn_up": ("Q8_0", 512, 1024), "ffn_down": ("Q8_0", 1024, 512)}
EXPERTS = {"ffn_gate_inp": ("F32", 512, 16), "exp_probs_b.bias": ("F32", 16),
           "ffn_gate_exps": ("Q4_K", 512, 512, 16), "ffn_up_exps": ("Q4_K", 512, 512, 16), "ffn_down_exps": ("Q5_K", 512, 512, 16),
           "ffn_gate_shexp": ("Q8_0", 512, 512), "ffn_up_shexp": ("Q8_0", 512, 512), "ffn_down_shexp": ("Q8_0", 512, 512)}
GLOBAL = {"token_embd": ("Q4_K", 512, 4096), "output_norm": ("F32", 512), "output": ("Q6_K", 512, 4096)}
EXPECTED = GLOBAL | {f"blk.{n}.{k}": v for n, more in ((0, DENSE), (1, EXPERTS)) for k, v in (EVERY | more).items()}
EXPECTED = {k if k.endswith(".bias") else k + ".weight": v for k, v in EXPECTED.items()}


def make(*arguments):
    return subprocess.run([sys.executable, SOURCE / "tests/bench/make_gguf.py", *map(str, arguments)], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "tiny-full.gguf"
    p = make("--shape", "full:2", "--tiny", "--out", path)
    assert p.returncode == 0 and not p.stderr, p.stderr
    return path


def test_every_tensor_is_there_with_its_shape_and_type(tiny):
    found = {t.name: (t.tensor_type.name, *t.shape.tolist()) for t in gguf.GGUFReader(tiny).tensors}
    assert found == EXPECTED


def test_values_are_finite_with_mean_zero_and_the_deviation_that_keeps_vectors_at_unit_size(tiny):
    for t in gguf.GGUFReader(tiny).tensors:
        x = gguf.dequantize(t.data, t.tensor_type).astype(np.float64)
        assert np.isfinite(x).all(), t.name
        if x.size < 10000:
            assert np.abs(x).max() < 2, t.name
            continue
        expected = 1 if t.name == "token_embd.weight" else 1 / np.sqrt(t.shape[0])
        assert abs(x.std() / expected - 1) < 0.05, f"{t.name}: expected a deviation of {expected:.4f}, found {x.std():.4f}"
        assert abs(x.mean()) < 0.05 * expected, f"{t.name}: expected a mean of 0, found {x.mean():.6f}"


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path, tiny):
    for seed, same in ((1, True), (2, False)):
        path = tmp_path / "again.gguf"
        assert make("--shape", "full:2", "--tiny", "--seed", seed, "--out", path).returncode == 0
        assert (path.read_bytes() == tiny.read_bytes()) == same, f"seed {seed}"
        assert path.stat().st_size == tiny.stat().st_size and list(tmp_path.iterdir()) == [path]


def test_the_tokenizer_has_every_byte_and_the_marks_of_the_chat(tiny):
    fields = gguf.GGUFReader(tiny).fields
    tokens, types = (fields[f"tokenizer.ggml.{k}"].contents() for k in ("tokens", "token_type"))
    assert len(tokens) == len(types) == len(set(tokens)) == 4096
    for mark, offset, kind in (("<|endoftext|>", 0, 3), ("[gMASK]", 2, 3), ("<|user|>", 7, 3), ("<think>", 21, 4), ("</arg_value>", 30, 4), ("<|video|>", 35, 3)):
        at = 4096 - 60 + offset
        assert (tokens[at], types[at]) == (mark, kind)
    for merge in fields["tokenizer.ggml.merges"].contents():
        assert all(t in tokens for t in (*merge.split(), merge.replace(" ", "")))


def test_the_true_shapes_have_the_size_that_arithmetic_gives():
    """Millions of weights times bytes of one; norms and biases are less than a thousandth."""
    q8, q4, q5, q6 = 34 / 32, 144 / 256, 176 / 256, 210 / 256
    for shape, n, layers in (("full:5", 1, 5), ("shard:8:20", 8, 20)):
        whole = (6144 * (2048 + 576 + 128) + 2048 * 4096) * q8 + 6144 * 32 * 4
        cut = (2048 * 16384 + 64 * (192 + 256) * 512 + 16384 * 6144) * q8
        experts = 6144 * 2048 * (256 * (2 * q4 + q5) + 3 * q8) / n + 6144 * 256 * 4
        expected = layers * (whole + cut / n) + (layers - 1) * experts + (3 * 6144 * 12288 * q8 + 154880 * 6144 * (q4 + q6)) / n
        _, found = make_gguf.header_of([], make_gguf.tensors_of(make_gguf.shape_of(shape, False)))
        assert 0 < found / expected - 1 < 1e-3, f"{shape}: expected {expected / 1e9:.3f} GB, found {found / 1e9:.3f}"
    rank = make_gguf.shape_of("shard:8", False)
    assert {k: rank[k] for k in ("width", "heads", "expert", "dense", "vocabulary", "layers", "dense_layers")} == dict(
        width=6144, heads=8, expert=256, dense=1536, vocabulary=19360, layers=78, dense_layers=3)


def test_a_shape_that_cannot_be_is_refused_with_a_sentence(tmp_path):
    for shape in ("full", "full:0", "shard:3:4", "shard:16:4", "shard:0:4", "half:2"):
        with pytest.raises(ValueError, match="^--shape: expected .*, found .*$"):
            make_gguf.shape_of(shape, False)
    p = make("--shape", "shard:3", "--out", tmp_path / "none.gguf")
    assert p.returncode == 2 and re.match("make_gguf: --shape: expected .*, found 3\n$", p.stderr) and not list(tmp_path.iterdir())


def test_octavo_inspects_and_serves_what_was_written(tiny, launch):
    p = subprocess.run([BUILD / "octavo", "inspect", tiny], capture_output=True, text=True, timeout=60)
    assert p.returncode == 0 and f"tensors: {len(EXPECTED)}," in p.stdout, p.stderr
    server = launch("--model", tiny, "--device", "cpu", "--ctx", 256, tp=1).wait_ready()
    status, _, text = server.http("/v1/completions", dict(model=tiny.name, prompt=[5, 700, 4000, 17], max_tokens=4, temperature=0, logprobs=1))
    assert status == 200, text
    choice = json.loads(text)["choices"][0]
    found = choice["logprobs"]["token_logprobs"]
    assert 1 <= len(found) <= 4 and all(-12 < x < 0 for x in found), text
    server.stop()
