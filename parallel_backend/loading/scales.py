"""The scales of compressed weights, as ``decoding`` needs them, and the refusal of invalid scales."""

from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.stored_tensor import Compression, StoredTensor
from ..errors import InvalidRequest
from .kitchen import kitchen
from .stored_bytes import opened

_NEED_KITCHEN = ("int8_tensorwise", "mxfp8", "nvfp4")
"""Formats that comfy-kitchen alone decodes."""

_SIGN, _NAN_FP8, _NAN_E8M0 = 0x80, 0x7F, 0xFF
"""Bits of an 8-bit number: the sign, and what float8_e4m3fn and float8_e8m0fnu have for NaN."""

_EXPONENT = 0x7C00
"""The bits of a float16 that are all set in NaN and infinity."""

_GGUF_SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where float16 scales and minima are in the blocks of GGUF's types (``ggml-common.h`` of llama.cpp), in bytes."""


def read_scale(weight: StoredTensor, name: str) -> Tensor:
    """Return a scale of a compressed weight.

    Returns:
        ``[]`` for a single number and ``[rows, 1]`` for one each row, both in float32; bytes ``[rows, blocks]``,
        without the tiles in which they are stored, for one each block.
    """
    compression = weight.compression
    assert compression is not None
    if name == "block_scale":
        rows, columns = weight.shape
        tiles = _bytes(compression.scales[name])
        return kitchen().from_blocked(tiles, rows, columns // compression.block).contiguous()  # type: ignore[no-any-return]
    with opened(compression.scales[name]) as stored:
        return stored.float().reshape(-1, 1) if name == "row_scale" else stored.float().reshape(())


def check_scales(weight: StoredTensor) -> None:
    """Refuse a weight with a scale that is NaN, infinite, zero or negative. A block's scale may be zero.

    GGUF's scales lie among the numbers, so this reads such a weight as a whole, at several GB/s from the page cache.
    Numbers themselves, of 8 bits or more, are not checked, whatever the format.

    Raises:
        InvalidRequest: names the scale.
        BrokenPackage: comfy-kitchen is needed and cannot be imported.
    """
    compression = weight.compression
    if compression is None:
        return
    if compression.format in _NEED_KITCHEN:
        kitchen()
    if compression.format in _GGUF_SCALES and not _valid_gguf(weight, compression):
        raise InvalidRequest(f"{weight.name} has a block with a scale that is NaN or infinite: download the file again")
    for name, scale in compression.scales.items():
        if name == "block_scale":
            valid = _valid_blocks(compression, _bytes(scale))
        else:
            values = read_scale(weight, name)
            valid = bool((values.isfinite() & (values > 0)).all())
        if not valid:
            raise InvalidRequest(
                f"{scale.name} has a value that is NaN, infinite, zero or negative, which no scale can be: download "
                "the file again"
            )


def _valid_gguf(weight: StoredTensor, compression: Compression) -> bool:
    with opened(weight) as data:
        halves = data.reshape(-1).view(torch.int16).reshape(-1, compression.block_bytes // 2)
        scales = (halves[:, at // 2] for at in _GGUF_SCALES[compression.format])
        return all(bool(((each & _EXPONENT) != _EXPONENT).all()) for each in scales)


def _valid_blocks(compression: Compression, scales: Tensor) -> bool:
    if compression.format == "mxfp8":
        return bool((scales != _NAN_E8M0).all())
    return bool(((scales < _NAN_FP8) | (scales == _SIGN)).all())  # the sign alone is a negative zero


def _bytes(scale: StoredTensor) -> Tensor:
    with opened(replace(scale, compression=Compression(format=scale.dtype))) as data:
        return data.clone().to(torch.uint8)
