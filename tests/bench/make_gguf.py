#!/usr/bin/env python3
"""Writes a GGUF file of GLM-5's true shapes with random weights, to measure engines that nobody has 400 GB for.

usage: tests/bench/make_gguf.py --shape full:LAYERS | shard:N[:LAYERS] [--out FILE] [--seed S] [--tiny]

full:LAYERS       true width, one dense layer and LAYERS - 1 of experts
shard:N[:LAYERS]  what one of N ranks reads: heads, expert, dense and vocabulary widths divided by N,
                  the rest whole (default: all 78 layers, 3 of them dense; else one dense)
--tiny            the same structure with small widths, a few megabytes
The same shapes as `octavo-worker-cuda --bench`: experts Q4_K with down Q5_K, attention, shared expert,
dense layer and indexer Q8_0, head Q6_K, embedding Q4_K, router, indexer.proj and norms F32.

Owns: FILE, and FILE.part while it is written.  Called by: people; needs numpy alone.
Fails how: exit 2 with a sentence. An interrupted run leaves FILE.part, never half of FILE.
Limits: N must leave whole blocks of 256 to an expert; memory is a few chunks, whatever the size.
Tested by: tests/tree/test_make_gguf.py

Blocks are made as bytes, without quantising anything: random quants and sub-scales, and a scale that
gives the values a standard deviation of 1/sqrt(columns), so that a product of unit vectors is a unit
vector and the activations of any depth stay sane. Sub-block minima are set to the middle of the
quants: values have mean zero. Each tensor has a stream of its own, from the seed and its name, and
takes raw numbers of the generator, which numpy never changes: the same seed, the same bytes.
"""
import argparse
import math
import os
import re
import shutil
import struct
import sys
import zlib

import numpy as np

ALIGN = 32
CHUNK = 8 << 20  # bytes made at a time
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # value types of the format

# name: (number in the format, elements of a block, bytes of it)
TYPES = {"F32": (0, 1, 4), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210)}
# Standard deviation of the values when the scale is 1: that of the quants times that of the sub-scales.
SPREAD = {"Q8_0": math.sqrt(65535 / 12 + 1 / 4), "Q4_K": math.sqrt(63 * 127 / 6 * 255 / 12),
          "Q5_K": math.sqrt(63 * 127 / 6 * 1023 / 12), "Q6_K": math.sqrt((65535 / 12 + 1 / 4) * (4095 / 12 + 1 / 4))}

TRUE = dict(width=6144, heads=64, q_rank=2048, dense=12288, expert=2048, experts=256, used=8,
            index_heads=32, top_k=2048, vocabulary=154880, context=202752)
TINY = dict(width=512, heads=8, q_rank=256, dense=1024, expert=512, experts=16, used=4,
            index_heads=4, top_k=64, vocabulary=4096, context=4096)
KV_RANK, NOPE, ROPE, VALUE, INDEX = 512, 192, 64, 256, 128

# The tokens that end the vocabulary, before 24 unused ones: control tokens but for the user's.
CONTROL = """<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>
<|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> <|begin_of_audio|> <|end_of_audio|>
<|begin_of_transcription|> <|end_of_transcription|> <|code_prefix|> <|code_middle|> <|code_suffix|>
<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>
/nothink <|begin_of_box|> <|end_of_box|> <|image|> <|video|>""".split()
USERS = re.compile(r"</?(think|tool_call|tool_response|arg_key|arg_value)>")
UNUSED = 24
MERGES = ["h e", "i n", "r e", "o n", "Ġ t", "Ġ a", "Ġt he", "Ġa n", "Ġan d", "in g"]


def shape_of(text, tiny):
    """The dimensions that --shape names; ValueError with a sentence."""
    d = dict(TINY if tiny else TRUE)
    m = re.fullmatch(r"full:(\d+)|shard:(\d+)(?::(\d+))?", text)
    if not m:
        raise ValueError(f"--shape: expected full:LAYERS or shard:N[:LAYERS], found {text!r}")
    n = int(m[2] or 1)
    d["layers"] = int(m[1] or m[3] or 78)
    d["dense_layers"] = 1 if m[1] or m[3] else 3
    if not 1 <= d["layers"] <= 512:
        raise ValueError(f"--shape: expected 1 to 512 layers, found {d['layers']}")
    if n < 1 or d["heads"] % n or d["expert"] % (256 * n):
        raise ValueError(f"--shape: expected ranks that cut {d['heads']} heads and {d['expert'] // 256} blocks of an expert evenly, found {n}")
    for cut in ("heads", "expert", "dense", "vocabulary"):
        d[cut] //= n
    return d


def tensors_of(d):
    """[(name, type, shape with columns first, standard deviation)]; none for a gain: about 1."""
    out = []

    def matrix(name, kind, *shape):
        out.append((name + ".weight", kind, shape, 1 / math.sqrt(shape[0])))

    def gain(name, n):
        out.append((name + ".weight", "F32", (n,), None))

    D, H, Q = d["width"], d["heads"], d["q_rank"]
    out.append(("token_embd.weight", "Q4_K", (D, d["vocabulary"]), 1))
    for block in range(d["layers"]):
        b = f"blk.{block}."
        gain(b + "attn_norm", D)
        matrix(b + "attn_q_a", "Q8_0", D, Q)
        gain(b + "attn_q_a_norm", Q)
        matrix(b + "attn_q_b", "Q8_0", Q, H * (NOPE + ROPE))
        matrix(b + "attn_kv_a_mqa", "Q8_0", D, KV_RANK + ROPE)
        gain(b + "attn_kv_a_norm", KV_RANK)
        matrix(b + "attn_k_b", "Q8_0", NOPE, KV_RANK, H)
        matrix(b + "attn_v_b", "Q8_0", KV_RANK, VALUE, H)
        matrix(b + "attn_output", "Q8_0", H * VALUE, D)
        matrix(b + "indexer.attn_q_b", "Q8_0", Q, d["index_heads"] * INDEX)
        matrix(b + "indexer.attn_k", "Q8_0", D, INDEX)
        matrix(b + "indexer.proj", "F32", D, d["index_heads"])
        gain(b + "indexer.k_norm", INDEX)
        out.append((b + "indexer.k_norm.bias", "F32", (INDEX,), 0.1))
        gain(b + "ffn_norm", D)
        dense = block < d["dense_layers"]
        for part in ("",) if dense else ("_shexp", "_exps"):
            wide = d["dense"] if dense else d["expert"]
            kinds = ("Q4_K", "Q5_K") if part == "_exps" else ("Q8_0", "Q8_0")
            stack = (d["experts"],) if part == "_exps" else ()
            matrix(b + "ffn_gate" + part, kinds[0], D, wide, *stack)
            matrix(b + "ffn_up" + part, kinds[0], D, wide, *stack)
            matrix(b + "ffn_down" + part, kinds[1], wide, D, *stack)
        if not dense:
            matrix(b + "ffn_gate_inp", "F32", D, d["experts"])
            out.append((b + "exp_probs_b.bias", "F32", (d["experts"],), 0.01))
    gain("output_norm", D)
    matrix("output", "Q6_K", D, d["vocabulary"])
    return out


def bytes_of(kind, shape):
    _, elements, size = TYPES[kind]
    assert shape[0] % elements == 0, f"{kind}: expected whole blocks of {elements}, found {shape[0]} columns"
    return math.prod(shape) // elements * size


# ---- the header

def tokenizer_of(n):
    """(tokens, types, id of the first control token) of a vocabulary of n."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
    tokens = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))] + [m.replace(" ", "") for m in MERGES]
    first = n - UNUSED - len(CONTROL)
    tokens += [f"Ġw{i}" for i in range(len(tokens), first)]
    types = [1] * first + [4 if USERS.fullmatch(t) else 3 for t in CONTROL] + [5] * UNUSED
    tokens += CONTROL + [f"[PAD{i}]" for i in range(n - UNUSED, n)]
    assert len(tokens) == len(types) == n
    return tokens, types, first


def keys_of(d, name):
    """[(key, value type, value)], an array's value as (type of its elements, list)."""
    tokens, types, control = tokenizer_of(d["vocabulary"])
    u = dict(block_count=d["layers"], context_length=d["context"], embedding_length=d["width"], feed_forward_length=d["dense"],
             vocab_size=d["vocabulary"], leading_dense_block_count=min(d["dense_layers"], d["layers"]), expert_count=d["experts"],
             expert_used_count=d["used"], expert_shared_count=1, expert_feed_forward_length=d["expert"], expert_gating_func=2,
             expert_group_count=1, expert_group_used_count=1, nextn_predict_layers=0)
    u |= {"attention.head_count": d["heads"], "attention.head_count_kv": 1, "attention.q_lora_rank": d["q_rank"],
          "attention.kv_lora_rank": KV_RANK, "attention.key_length": KV_RANK + ROPE, "attention.value_length": KV_RANK,
          "attention.key_length_mla": NOPE + ROPE, "attention.value_length_mla": VALUE, "rope.dimension_count": ROPE,
          "attention.indexer.head_count": d["index_heads"], "attention.indexer.key_length": INDEX, "attention.indexer.top_k": d["top_k"]}
    f = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6, "expert_weights_scale": 2.5}
    special = dict(eos=0, unknown=0, padding=1, bos=2, eot=7, eom=9)
    return [("general.architecture", STRING, "glm-dsa"), ("general.type", STRING, "model"), ("general.name", STRING, name),
            ("general.file_type", U32, 15), ("general.quantization_version", U32, 2),
            *((f"glm-dsa.{k}", U32, v) for k, v in u.items()), *((f"glm-dsa.{k}", F32, v) for k, v in f.items()),
            ("glm-dsa.expert_weights_norm", BOOL, True),
            ("tokenizer.ggml.model", STRING, "gpt2"), ("tokenizer.ggml.pre", STRING, "glm4"),
            ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)), ("tokenizer.ggml.token_type", ARRAY, (I32, types)),
            ("tokenizer.ggml.merges", ARRAY, (STRING, MERGES)),
            *((f"tokenizer.ggml.{k}_token_id", U32, control + v) for k, v in special.items())]


def packed(kind, value):
    if kind == STRING:
        text = value.encode()
        return struct.pack("<Q", len(text)) + text
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(packed(inner, v) for v in values)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], value)


def padding(n):
    return bytes(-n % ALIGN)


def header_of(keys, tensors):
    """All before the first tensor's bytes, and where the last ends, counted from there."""
    out, at = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))], 0
    out += [packed(STRING, k) + struct.pack("<I", kind) + packed(kind, v) for k, kind, v in keys]
    for name, kind, shape, _ in tensors:
        out.append(packed(STRING, name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPES[kind][0], at))
        at += bytes_of(kind, shape)
        at += len(padding(at))
    header = b"".join(out)
    return header + padding(len(header)), at


# ---- the weights

def uniform(raw, n):
    """n numbers in [0, 1)."""
    return (raw.random_raw(n) >> 11) * 2.0**-53


def f16_bytes(x):
    return x.astype("<f2").view(np.uint8).reshape(-1, 2)


def blocks(raw, kind, n, deviation):
    """n blocks as bytes [n, size]; their scales vary by a quarter."""
    size = TYPES[kind][2]
    b = raw.random_raw((n * size + 7) // 8).astype("<u8").view(np.uint8)[:n * size].reshape(n, size)
    d = (0.75 + uniform(raw, n) / 2) * (deviation / SPREAD[kind] / math.sqrt(1 + 1 / 48))
    if kind == "Q6_K":
        b[:, 208:210] = f16_bytes(d)
        return b
    b[:, 0:2] = f16_bytes(d)
    if kind != "Q8_0":  # minima of the sub-blocks the same as their scales, dmin in the quants' middle
        b[:, 2:4] = f16_bytes(d * (7.5 if kind == "Q4_K" else 15.5))
        b[:, 8:12] = b[:, 4:8]
        b[:, 12:16] = (b[:, 12:16] & 15) * 17
    return b


def weights(name, kind, shape, deviation, seed):
    """The bytes of a tensor, in chunks."""
    raw = np.random.SFC64([seed, zlib.crc32(name.encode())])
    _, elements, size = TYPES[kind]
    left = math.prod(shape) // elements
    while left:
        n = min(left, CHUNK // size)
        left -= n
        if kind != "F32":
            yield blocks(raw, kind, n, deviation)
            continue
        x = (uniform(raw, n) - 0.5) * math.sqrt(12)  # deviation 1
        yield (1 + 0.1 * x if deviation is None else deviation * x).astype("<f4")


def write(path, d, seed, name):
    tensors = tensors_of(d)
    header, data_bytes = header_of(keys_of(d, name), tensors)
    free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
    if len(header) + data_bytes > free:
        raise ValueError(f"{path}: expected room for {len(header) + data_bytes} bytes, found {free}")
    with open(path + ".part", "wb") as out:
        out.write(header)
        for tensor, kind, shape, deviation in tensors:
            for chunk in weights(tensor, kind, shape, deviation, seed):
                out.write(chunk)
            out.write(padding(bytes_of(kind, shape)))
        assert out.tell() == len(header) + data_bytes
    os.replace(path + ".part", path)
    return len(tensors), len(header) + data_bytes


def main():
    p = argparse.ArgumentParser(description="Writes a GGUF file of GLM-5's true shapes with random weights.")
    p.add_argument("--shape", required=True, help="full:LAYERS, or shard:N[:LAYERS] for what one of N ranks reads")
    p.add_argument("--out", help="file to write (default: glm-5-SHAPE.gguf here)")
    p.add_argument("--seed", type=int, default=1, help="other seeds, other weights (default: 1)")
    p.add_argument("--tiny", action="store_true", help="the same structure with small widths")
    a = p.parse_args()
    name = f"glm-5-{'tiny-' if a.tiny else ''}{a.shape.replace(':', '-')}"
    path = a.out or name + ".gguf"
    try:
        if a.seed < 0:
            raise ValueError(f"--seed: expected a number from 0, found {a.seed}")
        n, size = write(path, shape_of(a.shape, a.tiny), a.seed, name)
    except (ValueError, OSError) as e:
        print(f"make_gguf: {e}", file=sys.stderr)
        return 2
    print(f"{path}: {n} tensors, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
