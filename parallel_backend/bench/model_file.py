"""A large model file with random weights, written without holding them in memory."""

import json
import math
import struct
from pathlib import Path
from typing import BinaryIO

import torch

HEAD_DIM, TEXT, FREQUENCIES = 128, 4096, 256
LATENT, PATCH = 16, 4
"""Latent channels, and latent positions of a patch."""

_CHUNK = 1 << 20
"""Numbers that are written at a time."""


def write_wan(path: Path, *, heads: int, layers: int) -> None:
    """Write a text-to-video Wan in float32, in its original names and with the proportions of the published ones."""
    shapes = _shapes(heads * HEAD_DIM, layers)
    entries, position = {}, 0
    for name, shape in shapes.items():
        end = position + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        _write_random(file, position // 4)


def _write_random(file: BinaryIO, count: int) -> None:
    chunk = (torch.randn(_CHUNK, generator=torch.Generator().manual_seed(0)) * 0.02).numpy()
    while count:
        written = min(count, _CHUNK)
        file.write(chunk[:written].tobytes())
        count -= written


def _shapes(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    hidden = width * 35 // 6
    linear = {
        "text_embedding.0": (width, TEXT), "text_embedding.2": (width, width),
        "time_embedding.0": (width, FREQUENCIES), "time_embedding.2": (width, width),
        "time_projection.1": (6 * width, width), "head.head": (LATENT * PATCH, width),
    }  # fmt: skip
    others = {"patch_embedding.weight": (width, LATENT, 1, 2, 2), "patch_embedding.bias": (width,),
              "head.modulation": (1, 2, width)}  # fmt: skip
    for i in range(layers):
        block = f"blocks.{i}"
        for attention in ("self_attn", "cross_attn"):
            linear |= {f"{block}.{attention}.{layer}": (width, width) for layer in "qkvo"}
            others |= {f"{block}.{attention}.norm_{layer}.weight": (width,) for layer in "qk"}
        linear |= {f"{block}.ffn.0": (hidden, width), f"{block}.ffn.2": (width, hidden)}
        others |= {f"{block}.norm3.{part}": (width,) for part in ("weight", "bias")}
        others[f"{block}.modulation"] = (1, 6, width)
    weights = {f"{name}.weight": shape for name, shape in linear.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in linear.items()} | others
