"""Compressed weights in every format: what a file holds, and what it stands for once it is decoded."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass
class Compressed:
    """A layer's weight as a file holds it.

    Attributes:
        stored: tensors by the end of their names, without the layer's.
        decoded: the weight that they stand for, in float32.
        description: what ``.comfy_quant`` says.
    """

    stored: Tensors
    decoded: Tensor
    description: dict[str, Any] = field(default_factory=dict)


def _fp8(weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, by_row: bool = False) -> Compressed:
    limit = torch.finfo(dtype).max
    scale = (weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max()) / limit
    stored = (weight / scale).clamp(-limit, limit).to(dtype)
    name = "float8_e4m3fn" if dtype == torch.float8_e4m3fn else "float8_e5m2"
    return Compressed({"weight": stored, "weight_scale": scale}, stored.float() * scale, {"format": name})


def _int8(weight: Tensor, **options: Any) -> Compressed:
    from comfy_kitchen.tensor import TensorWiseINT8Layout

    stored, params = TensorWiseINT8Layout.quantize(weight, **options)
    said = {"convrot": True, "convrot_groupsize": params.convrot_groupsize} if params.convrot else {}
    decoded = TensorWiseINT8Layout.dequantize(stored, params)
    return Compressed({"weight": stored, "weight_scale": params.scale}, decoded, {"format": "int8_tensorwise", **said})


def _mxfp8(weight: Tensor) -> Compressed:
    from comfy_kitchen.tensor import TensorCoreMXFP8Layout

    stored, params = TensorCoreMXFP8Layout.quantize(weight)
    decoded = TensorCoreMXFP8Layout.dequantize(stored, params)
    scale = params.scale.view(torch.uint8)
    return Compressed({"weight": stored, "weight_scale": scale}, decoded, {"format": "mxfp8"})


def _nvfp4(weight: Tensor) -> Compressed:
    from comfy_kitchen.tensor import TensorCoreNVFP4Layout

    stored, params = TensorCoreNVFP4Layout.quantize(weight)
    decoded = TensorCoreNVFP4Layout.dequantize(stored, params)
    scales = {"weight_scale": params.block_scale, "weight_scale_2": params.scale}
    return Compressed({"weight": stored, **scales}, decoded, {"format": "nvfp4"})


FORMATS: dict[str, tuple[int, Callable[[Tensor], Compressed]]] = {
    "fp8 e4m3": (1, _fp8),
    "fp8 e5m2": (1, lambda weight: _fp8(weight, torch.float8_e5m2)),
    "fp8 by row": (1, lambda weight: _fp8(weight, by_row=True)),
    "int8": (1, _int8),
    "int8 by row": (1, lambda weight: _int8(weight, per_channel=True)),
    "int8 rotated": (64, lambda weight: _int8(weight, per_channel=True, convrot=True, convrot_groupsize=64)),
    "mxfp8": (32, _mxfp8),
    "nvfp4": (16, _nvfp4),
}
"""Formats that ComfyUI describes in safetensors files: columns that belong together, and the compression."""


def is_matrix(name: str, weight: Tensor, block: int) -> bool:
    """Whether a weight can be compressed in blocks of this length."""
    return name.endswith(".weight") and weight.ndim == 2 and weight.shape[1] % block == 0


def write_described(
    path: Path,
    weights: Mapping[str, Tensor],
    *formats: str,
    in_metadata: bool = False,
    said: Mapping[str, str] | None = None,
) -> Tensors:
    """Write a safetensors file whose matrices are in ``formats``, in turn. Returns the decoded weights.

    Args:
        path: the file.
        weights: by name.
        formats: names in ``FORMATS``.
        in_metadata: whether the file's metadata describes the layers, and not a tensor beside each.
        said: what else the metadata says.
    """
    stored: Tensors = {}
    decoded: Tensors = {}
    layers: dict[str, Any] = {}
    chosen = cycle(formats)
    for name, weight in weights.items():
        block, compress = FORMATS[next(chosen)] if weight.ndim == 2 else (1, _fp8)
        if not is_matrix(name, weight, block):
            stored[name] = decoded[name] = weight.clone().contiguous()
            continue
        layer, result = name.removesuffix(".weight"), compress(weight)
        stored |= {f"{layer}.{end}": tensor.contiguous() for end, tensor in result.stored.items()}
        decoded[name], layers[layer] = result.decoded, result.description
    if not in_metadata:
        stored |= {f"{layer}.comfy_quant": _json_bytes(each) for layer, each in layers.items()}
    in_file = {"_quantization_metadata": json.dumps({"layers": layers})} if in_metadata else {}
    save_file(stored, path, {**in_file, **(said or {})} or None)
    return decoded


def described(path: Path) -> dict[str, Any]:
    """Return what a file says about each layer."""
    with safe_open(path, "pt") as file:
        said: dict[str, Any] = json.loads((file.metadata() or {}).get("_quantization_metadata", "{}")).get("layers", {})
        names = [name for name in file.keys() if name.endswith(".comfy_quant")]  # noqa: SIM118
        return said | {name: json.loads(bytes(file.get_tensor(name).tolist())) for name in names}


def write_scaled(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float8_e4m3fn) -> Tensors:
    """Write a file in the older dialect of scaled fp8. Returns the decoded weights."""
    stored: Tensors = {"scaled_fp8": torch.zeros(2, dtype=dtype)}
    decoded: Tensors = {}
    for name, weight in weights.items():
        if not is_matrix(name, weight, 1):
            stored[name] = decoded[name] = weight.clone().contiguous()
            continue
        result, layer = _fp8(weight, dtype), name.removesuffix(".weight")
        stored[name], decoded[name] = result.stored["weight"], result.decoded
        stored[f"{layer}.scale_weight"] = result.stored["weight_scale"].reshape(1)
    save_file(stored, path)
    return decoded


def write_mixed(path: Path, weights: Mapping[str, Tensor], prefix: str = "") -> Tensors:
    """Write a file with three dialects of fp8: matrices in the older one, described ones, and plain numbers, in turn.

    Returns the decoded weights, without the prefix.
    """
    stored: Tensors = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    decoded: Tensors = {}
    dialects = cycle(("older", "described", "plain"))
    for name, weight in weights.items():
        if not is_matrix(name, weight, 1):
            stored[name] = decoded[name] = weight.clone().contiguous()
            continue
        result, layer, dialect = _fp8(weight), name.removesuffix(".weight"), next(dialects)
        stored[name], decoded[name] = result.stored["weight"], result.decoded
        if dialect == "older":
            stored[f"{layer}.scale_weight"] = result.stored["weight_scale"].reshape(1)
        elif dialect == "described":
            stored[f"{layer}.weight_scale"] = result.stored["weight_scale"]
            stored[f"{layer}.comfy_quant"] = _json_bytes(result.description)
        else:
            stored[name] = weight.to(torch.float8_e4m3fn)
            decoded[name] = stored[name].float()
    save_file({prefix + name: tensor for name, tensor in stored.items()}, path)
    return decoded


def _json_bytes(description: Mapping[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)


GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")

SCALES_AT = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where the float16 scales and minima are in a block."""

_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types in which ``gguf`` can quantise."""


def gguf_blocks(weight: Tensor, kind: str) -> np.ndarray:
    """Return rows of blocks: quantised where ``gguf`` can, else random ones with numbers as large as the weight's."""
    type_ = GGMLQuantizationType[kind]
    if kind in _QUANTISED:
        return gguf.quants.quantize(weight.float().numpy(), type_)
    block, size = gguf.GGML_QUANT_SIZES[type_]
    rows, columns = weight.shape
    random = np.random.default_rng(rows + columns)
    blocks = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 1, np.float16).view(np.uint8)
    spread = gguf.quants.dequantize(blocks.reshape(rows, -1), type_).std()
    for at in SCALES_AT[kind]:
        scales = random.uniform(0.5, 1.5, (len(blocks), 1)) * float(weight.std()) / spread
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    path: Path,
    weights: Mapping[str, Tensor],
    *kinds: str,
    architecture: str = "wan",
    said: Mapping[str, str] | None = None,
) -> Tensors:
    """Write a GGUF file whose matrices have ``kinds``, in turn. Returns what ``gguf`` decodes.

    Args:
        path: the file.
        weights: by name.
        kinds: block types.
        architecture: what the file says that it holds.
        said: further texts of the header.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, text in (said or {}).items():
        writer.add_string(name, text)
    decoded: Tensors = {}
    chosen = cycle(kinds)
    for name, weight in weights.items():
        type_ = GGMLQuantizationType[next(chosen) if weight.ndim == 2 else kinds[0]]
        if is_matrix(name, weight, gguf.GGML_QUANT_SIZES[type_][0]):
            blocks = gguf_blocks(weight, type_.name)
            writer.add_tensor(name, blocks, raw_dtype=type_)
            decoded[name] = torch.from_numpy(gguf.quants.dequantize(blocks, type_).copy())
            continue
        plain = weight.float().numpy()
        if plain.ndim > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(plain.shape))
            plain = plain.reshape(len(plain), -1)
        writer.add_tensor(name, plain.copy())
        decoded[name] = weight.float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded
