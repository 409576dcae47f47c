"""Matrix products in a weight's own format, on devices that have them, as ComfyUI computes there (``comfy/ops.py``).

They round a layer's input to the format as well, so they differ from a product with the decoded weight.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..checkpoint.stored_tensor import Compression
from .decoding import Scales
from .kitchen import is_usable, kitchen

Product = Callable[[Tensor, Tensor, Scales, Tensor | None], Tensor]
"""Computes from inputs ``[tokens, columns]``, the packed weight, its scales and the bias."""

_LARGEST_FP8, _LARGEST_FP4 = 448.0, 6.0

_NEEDS: dict[str, tuple[int, int]] = {
    "F8_E4M3": (8, 9), "int8_tensorwise": (7, 5), "mxfp8": (10, 0), "nvfp4": (10, 0),
}  # fmt: skip
"""The least compute capability of a GPU of NVIDIA whose tensor cores multiply in a format."""

_ROWS: dict[str, int] = {"mxfp8": 32, "nvfp4": 16}
"""What the rows of a weight must be a multiple of."""


def product(compression: Compression, rows: int, device: torch.device) -> Product | None:
    """Return the product in a format; None if the file, the device or the number of rows does not allow it."""
    allowed = compression.native and not (compression.format == "F8_E4M3" and compression.row_scale)
    if not allowed or rows % _ROWS.get(compression.format, 1) or not _has_cores(compression.format, device):
        return None
    if not is_usable():
        return None  # fp8 is decoded without the package; weights in the other formats are refused
    if compression.format == "int8_tensorwise":
        return _Int8(compression.rotation)
    return {"F8_E4M3": _fp8, "mxfp8": _mxfp8, "nvfp4": _nvfp4}[compression.format]


def _has_cores(stored_format: str, device: torch.device) -> bool:
    needed = _NEEDS.get(stored_format)
    if needed is None or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= needed


class _Int8:
    """A product that rounds each row of the input by itself, and rotates its columns as the weight's are."""

    def __init__(self, rotation: int) -> None:
        self._rotation = rotation

    def __call__(self, x: Tensor, packed: Tensor, scales: Scales, bias: Tensor | None) -> Tensor:
        scale = scales.get("tensor_scale", scales.get("row_scale"))
        rotated, group = self._rotation > 0, self._rotation or 256
        result: Tensor = kitchen().int8_linear(x, packed.view(torch.int8), scale, bias, x.dtype, rotated, group)
        return result


def _fp8(x: Tensor, packed: Tensor, scales: Scales, bias: Tensor | None) -> Tensor:
    tensor = kitchen().tensor
    scale = scales.get("input_scale", torch.ones((), device=x.device))
    layout, shape = "TensorCoreFP8Layout", (len(packed), packed.shape[1])
    params = tensor.TensorCoreFP8Layout.Params
    rounded = kitchen().quantize_per_tensor_fp8(x, scale, torch.float8_e4m3fn)
    left = tensor.QuantizedTensor(rounded, layout, params(scale=scale, orig_dtype=x.dtype, orig_shape=tuple(x.shape)))
    right = params(scale=scales["tensor_scale"], orig_dtype=x.dtype, orig_shape=shape)
    weight = tensor.QuantizedTensor(packed.view(torch.float8_e4m3fn), layout, right)
    return functional.linear(left, weight, bias)


def _mxfp8(x: Tensor, packed: Tensor, scales: Scales, bias: Tensor | None) -> Tensor:
    tensor = kitchen().tensor
    layout, params = "TensorCoreMXFP8Layout", tensor.TensorCoreMXFP8Layout.Params
    rounded, blocks = kitchen().quantize_mxfp8(x, pad_32x=len(x) % 32 > 0)
    left = tensor.QuantizedTensor(rounded, layout, params(scale=blocks, orig_dtype=x.dtype, orig_shape=tuple(x.shape)))
    tiles = kitchen().to_blocked(scales["block_scale"], flatten=False).view(torch.float8_e8m0fnu)
    right = params(scale=tiles, orig_dtype=x.dtype, orig_shape=tuple(packed.shape))
    weight = tensor.QuantizedTensor(packed.view(torch.float8_e4m3fn), layout, right)
    return functional.linear(left, weight, bias)


def _nvfp4_scale(x: Tensor) -> Tensor:
    """Return the scale that ComfyUI takes where the file has none. Tokens that are all zero get one above zero."""
    return (x.abs().amax() / (_LARGEST_FP8 * _LARGEST_FP4)).float().clamp(min=torch.finfo(torch.float32).tiny)


def _nvfp4(x: Tensor, packed: Tensor, scales: Scales, bias: Tensor | None) -> Tensor:
    tensor = kitchen().tensor
    layout, params = "TensorCoreNVFP4Layout", tensor.TensorCoreNVFP4Layout.Params
    whole = scales["input_scale"] if "input_scale" in scales else _nvfp4_scale(x)
    rounded, blocks = kitchen().quantize_nvfp4(x, whole, pad_16x=len(x) % 16 > 0)
    left = params(scale=whole, block_scale=blocks, orig_dtype=x.dtype, orig_shape=tuple(x.shape))
    tiles = kitchen().to_blocked(scales["block_scale"], flatten=False).view(torch.float8_e4m3fn)
    shape = (len(packed), 2 * packed.shape[1])
    right = params(scale=scales["tensor_scale"], block_scale=tiles, orig_dtype=x.dtype, orig_shape=shape)
    weight = tensor.QuantizedTensor(packed, layout, right)
    return functional.linear(tensor.QuantizedTensor(rounded, layout, left), weight, bias)
