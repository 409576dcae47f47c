"""A tensor in a weight file, according to the file's header, and how its numbers are compressed. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidRequest

_DTYPES: dict[str, tuple[int, str]] = {
    "F32": (4, "float32"), "BF16": (2, "bfloat16"), "F16": (2, "float16"), "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"), "F64": (8, "float64"), "I64": (8, "int64"),
}  # fmt: skip
"""The dtypes that weights may have, by safetensors' names: bytes of one number, and torch's name."""

DTYPE_BYTES: dict[str, int] = {name: size for name, (size, _) in _DTYPES.items()}
"""Bytes of one number of each dtype that weights may have."""

TORCH_NAMES: dict[str, str] = {name: torch_name for name, (_, torch_name) in _DTYPES.items()}
"""torch's names of these dtypes."""

PACKED_BYTES: dict[str, int] = {"U8": 1, "I8": 1, "F8_E8M0": 1}
"""Bytes of one element of the dtypes that only compressed weights and their scales have."""

_PADDED_TO: dict[str, int] = {"mxfp8": 32, "nvfp4": 16}
"""What comfy-kitchen pads rows and columns to a multiple of."""

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
"""The dtypes of 8-bit floating-point numbers, by safetensors' names."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, according to the file's header.

    Attributes:
        file: the file that holds it.
        name: its name in the file.
        dtype: safetensors' name of the dtype, such as ``BF16``, or GGUF's name of the block type, such as ``Q4_K``.
        shape: the shape of its numbers, however they are stored.
        bytes: its size in the file.
        offset: where its data begin in the file.
        compression: how its numbers are stored; None if each is a number of ``dtype``.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    offset: int
    compression: "Compression | None" = None


def check_readable(tensor: StoredTensor) -> None:
    """Refuse a weight whose numbers are not known to be decoded.

    Raises:
        InvalidRequest: names its dtype and the supported ones.
    """
    if tensor.compression is None and tensor.dtype not in DTYPE_BYTES:
        raise InvalidRequest(
            f"{tensor.name} has dtype {tensor.dtype}, which is not supported; supported: {', '.join(DTYPE_BYTES)}"
        )


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How numbers are stored as blocks of bytes, along the rows of a matrix one after the other.

    Attributes:
        format: ComfyUI's name of the format, such as ``nvfp4``, or GGUF's name of the block type, such as ``Q4_K``.
        block: how many numbers of a row are decoded together.
        block_bytes: bytes of a block in the file.
        tensor_scale: what all numbers are multiplied by.
        row_scale: what the numbers of each row are multiplied by, ``[rows]`` or ``[rows, 1]``.
        block_scale: what the numbers of each block are multiplied by, in the tiles of 128 rows x 4 blocks in which
            NVIDIA's tensor cores read them (https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout).
        input_scale: what a native kernel divides the layer's input by.
        native: whether the file allows a matrix multiplication in this format.
        rotation: size of the groups of columns that a Hadamard matrix has rotated; 0 without rotation.
    """

    format: str
    block: int = 1
    block_bytes: int = 1
    tensor_scale: StoredTensor | None = None
    row_scale: StoredTensor | None = None
    block_scale: StoredTensor | None = None
    input_scale: StoredTensor | None = None
    native: bool = False
    rotation: int = 0

    @property
    def unit(self) -> int:
        """How many columns can be decoded without the others of their row."""
        return self.rotation or self.block

    @property
    def scales(self) -> dict[str, StoredTensor]:
        """The scales that there are, by attribute."""
        named = {name: getattr(self, name) for name in ("tensor_scale", "row_scale", "block_scale", "input_scale")}
        return {name: scale for name, scale in named.items() if scale is not None}

    def is_padded(self, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a stored shape may be another one, with rows and columns padded as comfy-kitchen does."""
        step = _PADDED_TO.get(self.format, 0)
        pairs = tuple(zip(stored, shape, strict=False))
        return len(stored) == len(shape) == 2 and all(0 <= longer - length < step for longer, length in pairs)

    def in_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether each row of a tensor of this shape is whole blocks, so that rows can be read one by one."""
        return math.prod(shape[1:]) % self.block == 0 and len(shape) > 1


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a weight file says about itself.

    Attributes:
        tensors: by name, in the file's order.
        metadata: free text by name.
        layers: what each file's metadata says about compressed layers, as JSON. A model in parts has several.
    """

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    layers: tuple[str, ...] = ()
