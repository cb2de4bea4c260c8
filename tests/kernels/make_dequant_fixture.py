#!/usr/bin/env python3
"""Writes dequant.bin: random blocks of every weight type, and their values by the `gguf` package.

usage: make_dequant_fixture.py [OUT]      (default: dequant.bin beside this file)

Layout, little-endian, per type until the end: u32 type, u32 elements, u32 bytes, the blocks, the
values as f32. The scales of the first blocks are set to the cases that random bytes seldom make:
ordinary positive and negative, subnormal, largest, zero, infinite.

A type 0xFFFFFFFF is a codebook: u32 number of a weight type that uses it, u32 bytes, then a 64-bit
FNV-1a digest of its entries, one byte an element.
"""
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
          "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0],
          "IQ1_M": [], "MXFP4": [], "NVFP4": []}
GRIDS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]
SPECIAL = [0.0123, -0.37, 3e-7, -5.9e-8, 65504.0, 0.0, np.inf, -1.75]

rng = np.random.default_rng(20240607)
out = bytearray()
for name in ["F32", "F16", "BF16", *SCALES]:
    kind = gguf.GGMLQuantizationType[name]
    elems, size = gguf.GGML_QUANT_SIZES[kind]
    n = {1: 256, 32: 24, 64: 24, 256: 8}[elems]
    blocks = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for at in SCALES.get(name, []):
        for b in range(n):
            d = np.float16(SPECIAL[b] if b < len(SPECIAL) else rng.normal())
            blocks[b, at:at + 2] = np.frombuffer(d.tobytes(), np.uint8)
    for b, d in enumerate(SPECIAL if name == "IQ1_M" else []):  # its bits are scattered
        bits = int(np.float16(d).view(np.uint16))
        for k in range(4):
            blocks[b, 49 + 2 * k] = (blocks[b, 49 + 2 * k] & 15) | (bits >> 4 * k & 15) << 4
    if name == "MXFP4":
        blocks[:4, 0] = [0, 1, 2, 255]
    if name == "NVFP4":  # every scale byte, zeros and 0x7F among them
        blocks[:, :4] = np.arange(0, 256, 256 / (4 * n)).astype(np.uint8).reshape(n, 4)
        blocks[1, :4] = [0x7F, 0xFF, 0x80, 0x01]
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks.reshape(1, -1), kind).astype("<f4").reshape(-1)
    assert values.size == n * elems
    out += struct.pack("<III", int(kind), n * elems, n * size) + blocks.tobytes() + values.tobytes()

for name in GRIDS:
    quant = getattr(gguf.quants, name)
    quant.init_grid()
    grid = quant.grid.astype(np.int8).tobytes()
    digest = 0xCBF29CE484222325
    for byte in grid:
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    kind = int(gguf.GGMLQuantizationType[name])
    out += struct.pack("<IIIQ", 0xFFFFFFFF, kind, len(grid), digest)

path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("dequant.bin")
path.write_bytes(out)
print(f"{path}: {len(out)} bytes")
