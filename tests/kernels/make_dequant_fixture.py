#!/usr/bin/env python3
"""Writes dequant.bin: random blocks of every weight type, and their values by the `gguf` package.

usage: make_dequant_fixture.py [OUT]      (default: dequant.bin beside this file)

Layout, little-endian, per type until the end: u32 type, u32 elements, u32 bytes, the blocks, the
values as f32. The scales of the first blocks are set to the cases that random bytes seldom make:
ordinary positive and negative, subnormal, largest, zero, infinite.
"""
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}
SPECIAL = [0.0123, -0.37, 3e-7, -5.9e-8, 65504.0, 0.0, np.inf, -1.75]

rng = np.random.default_rng(20240607)
out = bytearray()
for name in ["F32", "F16", "BF16", *SCALES]:
    kind = gguf.GGMLQuantizationType[name]
    elems, size = gguf.GGML_QUANT_SIZES[kind]
    n = {1: 256, 32: 24, 256: 8}[elems]
    blocks = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for at in SCALES.get(name, []):
        for b in range(n):
            d = np.float16(SPECIAL[b] if b < len(SPECIAL) else rng.normal())
            blocks[b, at:at + 2] = np.frombuffer(d.tobytes(), np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks.reshape(1, -1), kind).astype("<f4").reshape(-1)
    assert values.size == n * elems
    out += struct.pack("<III", int(kind), n * elems, n * size) + blocks.tobytes() + values.tobytes()

path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("dequant.bin")
path.write_bytes(out)
print(f"{path}: {len(out)} bytes")
