"""The scales of compressed weights, as ``decoding`` needs them, and the refusal of scales that cannot be meant."""

from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.stored_tensor import Compression, StoredTensor
from ..errors import InvalidRequest
from .kitchen import kitchen
from .stored_bytes import opened

_SIGN, _NAN_FP8, _NAN_E8M0 = 0x80, 0x7F, 0xFF
"""Bits of an 8-bit number: the sign, and what float8_e4m3fn and float8_e8m0fnu have for NaN."""


def read_scale(weight: StoredTensor, name: str) -> Tensor:
    """Return a scale of a compressed weight.

    Args:
        weight: the weight.
        name: the attribute of ``Compression`` that holds the scale.

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

    Raises:
        InvalidRequest: names the scale.
    """
    scales = weight.compression.scales if weight.compression else {}
    for name, scale in scales.items():
        if name == "block_scale":
            assert weight.compression is not None
            valid = _valid_blocks(weight.compression, _bytes(scale))
        else:
            values = read_scale(weight, name)
            valid = bool((values.isfinite() & (values > 0)).all())
        if not valid:
            raise InvalidRequest(
                f"{scale.name} has a value that is NaN, infinite, zero or negative, which no scale can be: download "
                "the file again"
            )


def _valid_blocks(compression: Compression, scales: Tensor) -> bool:
    if compression.format == "mxfp8":
        return bool((scales != _NAN_E8M0).all())
    return bool(((scales < _NAN_FP8) | (scales == _SIGN)).all())  # the sign alone is a negative zero


def _bytes(scale: StoredTensor) -> Tensor:
    with opened(replace(scale, compression=Compression(format=scale.dtype))) as data:
        return data.clone().to(torch.uint8)
