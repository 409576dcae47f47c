"""A large model file with random weights, written without holding them in memory."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

HEAD_DIM, TEXT, FREQUENCIES = 128, 4096, 256
LATENT, PATCH = 16, 4
"""Latent channels, and latent positions of a patch."""

_CHUNK = 1 << 20
"""Numbers that are written at a time."""


FORMATS: dict[str, float] = {"plain": 4.0, "fp8": 1.0, "int8": 1.0, "mxfp8": 33 / 32, "nvfp4": 9 / 16, "gguf": 34 / 32}
"""Formats of a file's matrices, and bytes of a number: float32, those of ``checkpoint/quantised.py``, GGUF's Q8_0."""

_DESCRIBED = {"fp8": "float8_e4m3fn", "int8": "int8_tensorwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_PATCH_EMBEDDING = "patch_embedding.weight"
"""A weight that is no matrix."""


def suffix(stored_format: str) -> str:
    """Return the suffix of a format's files."""
    return ".gguf" if stored_format == "gguf" else ".safetensors"


def write_wan(path: Path, *, heads: int, layers: int, stored_format: str = "plain") -> None:
    """Write a text-to-video Wan in its original names and with the proportions of the published ones."""
    shapes = _shapes(heads * HEAD_DIM, layers)
    if stored_format == "gguf":
        _write_gguf(path, shapes)
        return
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    said: dict[str, dict[str, str]] = {}
    for name, shape in shapes.items():
        if stored_format == "plain" or not _is_matrix(name, shape):
            stored[name] = ("F32", shape)
            continue
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.{end}": each for end, each in _described(stored_format, *shape).items()}
        said[layer] = {"format": _DESCRIBED[stored_format]}
    _write_safetensors(path, stored, {"_quantization_metadata": json.dumps({"layers": said})} if said else {})


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".weight") and len(shape) == 2


def _described(stored_format: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtypes and shapes of a matrix in one of ComfyUI's formats, by the ends of their names."""
    block = {"mxfp8": 32, "nvfp4": 16}.get(stored_format, columns)
    tiles = (-(-rows // 128) * 128, -(-columns // block // 4) * 4)
    described: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        "fp8": {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", ())},
        "int8": {"weight": ("I8", (rows, columns)), "weight_scale": ("F32", (rows, 1))},
        "mxfp8": {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("U8", tiles)},
        "nvfp4": {
            "weight": ("U8", (rows, columns // 2)), "weight_scale": ("U8", tiles), "weight_scale_2": ("F32", ()),
        },
    }  # fmt: skip
    return described[stored_format]


def _write_safetensors(path: Path, stored: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> None:
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape) in stored.items():
        end = position + math.prod(shape) * (4 if dtype == "F32" else 1)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries).encode()
    random = torch.Generator().manual_seed(0)
    floats = (torch.randn(_CHUNK, generator=random) * 0.02).abs().numpy().tobytes()  # a scale is no negative number
    others = torch.randint(1, 64, (4 * _CHUNK,), generator=random, dtype=torch.uint8).numpy().tobytes()  # without NaN
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for dtype, shape in stored.values():
            left = math.prod(shape) * (4 if dtype == "F32" else 1)
            while left:
                left -= file.write((floats if dtype == "F32" else others)[:left])


def _write_gguf(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    kind = GGMLQuantizationType.Q8_0
    block, size = GGML_QUANT_SIZES[kind]
    writer = GGUFWriter(path, "wan")
    for name, shape in shapes.items():
        if _is_matrix(name, shape):
            row = np.tile(
                np.frombuffer(np.float16(1e-3).tobytes() + bytes(range(size - 2)), np.uint8), shape[1] // block
            )
            writer.add_tensor(name, np.broadcast_to(row, (shape[0], len(row))), raw_dtype=kind)
            continue
        if name == _PATCH_EMBEDDING:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
        flat = (shape[0], math.prod(shape[1:])) if name == _PATCH_EMBEDDING else shape
        writer.add_tensor(name, np.full(flat, 0.02, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    hidden = width * 35 // 6 // 64 * 64  # whole blocks of every format
    linear = {
        "text_embedding.0": (width, TEXT), "text_embedding.2": (width, width),
        "time_embedding.0": (width, FREQUENCIES), "time_embedding.2": (width, width),
        "time_projection.1": (6 * width, width), "head.head": (LATENT * PATCH, width),
    }  # fmt: skip
    others = {_PATCH_EMBEDDING: (width, LATENT, 1, 2, 2), "patch_embedding.bias": (width,),
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
