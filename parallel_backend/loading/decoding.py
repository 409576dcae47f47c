"""Decodes rows of compressed weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .. import packages
from ..checkpoint.dtypes import TORCH_DTYPES
from ..checkpoint.stored_tensor import FP8_DTYPES, Compression
from .kitchen import kitchen

Scales = Mapping[str, Tensor]
"""By attribute of ``Compression``: ``tensor_scale`` ``[]`` and ``row_scale`` ``[rows, 1]`` in float32, ``block_scale``
``[rows, blocks]`` in bytes, without tiles."""

_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 25}
"""How many numbers a device decodes at once. Decoders take several times the memory of what they return."""


def decode(compression: Compression, packed: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Return the numbers of rows of bytes.

    Args:
        packed: ``[rows, bytes]``, uint8.

    Returns:
        ``[rows, columns]``.
    """
    rows, row_bytes = packed.shape
    columns = row_bytes // compression.block_bytes * compression.block
    decoded = packed.new_empty(rows, columns, dtype=dtype)
    at_once = max(_AT_ONCE[packed.device.type] // max(columns, 1), 1)
    for part in (slice(start, start + at_once) for start in range(0, rows, at_once)):
        of_rows = {name: scale if scale.ndim == 0 else scale[part] for name, scale in scales.items()}
        decoded[part] = _DECODERS.get(compression.format, _gguf)(compression, packed[part], of_rows, dtype)
    return decoded


def _fp8(compression: Compression, packed: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    numbers = packed.view(TORCH_DTYPES[compression.format]).to(dtype)
    scale = scales.get("tensor_scale", scales.get("row_scale"))
    return numbers if scale is None else numbers * scale.to(dtype)


def _int8(compression: Compression, packed: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    scale = scales.get("tensor_scale", scales.get("row_scale"))
    kitchen()
    if compression.rotation:
        rotated = torch.ops.comfy_kitchen.dequantize_int8_convrot_weight
        numbers: Tensor = rotated(packed.view(torch.int8), scale, compression.rotation)
    else:
        numbers = torch.ops.comfy_kitchen.dequantize_int8_simple(packed.view(torch.int8), scale)
    return numbers.to(dtype)


def _mxfp8(compression: Compression, packed: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    tiles = kitchen().to_blocked(scales["block_scale"], flatten=False).view(torch.float8_e8m0fnu)
    numbers: Tensor = kitchen().dequantize_mxfp8(packed.view(torch.float8_e4m3fn), tiles, dtype)
    return numbers


def _nvfp4(compression: Compression, packed: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    tiles = kitchen().to_blocked(scales["block_scale"], flatten=False).view(torch.float8_e4m3fn)
    numbers: Tensor = kitchen().dequantize_nvfp4(packed, scales["tensor_scale"], tiles, dtype)
    return numbers


def _gguf(compression: Compression, packed: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Decode in float16 unless float32 is wanted, as diffusers and ComfyUI-GGUF do: GGUF's scales are float16."""
    kinds = packages.load("gguf").GGMLQuantizationType  # before diffusers, which cannot find it
    from diffusers.quantizers.gguf.utils import dequantize_functions

    dequantize = dequantize_functions[kinds[compression.format]]
    blocks = packed.reshape(-1, compression.block_bytes)
    between = torch.float32 if dtype == torch.float32 else torch.float16
    numbers: Tensor = dequantize(blocks, compression.block, compression.block_bytes, dtype=between)
    return numbers.to(dtype).reshape(len(packed), -1)


_DECODERS: dict[str, Callable[[Compression, Tensor, Scales, torch.dtype], Tensor]] = {
    **dict.fromkeys(FP8_DTYPES, _fp8), "int8_tensorwise": _int8, "mxfp8": _mxfp8, "nvfp4": _nvfp4,
}  # fmt: skip
"""By the name of the format; all others are GGUF's."""
