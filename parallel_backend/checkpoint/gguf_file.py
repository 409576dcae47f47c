"""The header of a GGUF file: names, block types and shapes, checked against the file's size. No torch.

Read with the ``gguf`` package of llama.cpp. Names are the original model's, as city96's ComfyUI-GGUF converts.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import packages
from ..errors import BrokenPackage, InvalidRequest
from .stored_tensor import Compression, Header, StoredTensor

if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderField, ReaderTensor

_PLAIN = ("F32", "F16", "BF16", "F64")
"""Types that are plain numbers. safetensors has the same names for them."""

DECODED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Block types that diffusers' ``quantizers/gguf/utils.py`` decodes."""

_SMALLEST_TENSOR, _SMALLEST_FIELD = 8 + 4 + 4 + 8, 8 + 4 + 1
"""Bytes that the description of a tensor, and a field, take at least."""

_MAX_VALUES, _MAX_DIMS = 1 << 22, 8
"""Most values in all arrays of the header, which models for text need for their words, and most dims of a tensor."""

_MAX_TENSORS, _MAX_FIELDS, _MAX_TEXT = 1 << 16, 1 << 16, 1 << 20
"""Most tensors and fields (each takes some KB of memory), and most bytes of a name or a text."""

_SHAPES = "comfy.gguf.orig_shape."
"""Beginning of the fields with the shapes of tensors that have more dims than GGUF allows."""


def read_gguf(file: Path) -> Header:
    """Read the header of a GGUF file, and check that the tensors it lists lie in the file and do not overlap.

    Raises:
        InvalidRequest: the file cannot be read, is not a GGUF file of version 2 or 3, is cut off, lists data that
            overlaps, or has a block type that is not supported.
    """
    try:
        packages.load("gguf")
        _check_counts(file)
        reader = _reader(file)
        tensors = [_stored(file, reader, each) for each in reader.tensors]
        said = {name: str(field.contents()) for name, field in reader.fields.items() if _is_text(field)}
    except InvalidRequest:
        raise
    except BrokenPackage as error:
        raise InvalidRequest(f"{file.name} is not loaded: {error}") from error
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise InvalidRequest(f"{file} cannot be read as a GGUF file ({error}): download it again") from error
    _check_spans(file, reader.data_offset, tensors)
    return Header(tensors={tensor.name: tensor for tensor in tensors}, metadata=said)


def _is_text(field: "ReaderField") -> bool:
    """Whether a field of the header is one text, as those are that files of other formats have as metadata."""
    from gguf import GGUFValueType

    return field.types == [GGUFValueType.STRING]


def _check_counts(file: Path) -> None:
    """Refuse counts that cannot be true before anything is read by them."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(24)
    if len(start) < 24 or start[:4] != b"GGUF":
        raise ValueError("it is cut off or has another format")
    version, tensors, fields = struct.unpack("<IQQ", start[4:])
    if version not in (2, 3):
        raise ValueError(f"it has version {version}, and versions 2 and 3 are known")
    if tensors * _SMALLEST_TENSOR + fields * _SMALLEST_FIELD > size or tensors > _MAX_TENSORS or fields > _MAX_FIELDS:
        raise ValueError(f"it claims {tensors} tensors and {fields} fields in {size} bytes")


def _reader(file: Path) -> "GGUFReader":
    """Return the package's reader, which does not follow a length that cannot be true."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        values = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"it is cut off, or something in it claims {count} numbers")
            return super()._get(offset, dtype, count, override_order)

        def _get_str(self, offset: int) -> Any:
            if (length := int(self._get(offset, np.uint64)[0])) > _MAX_TEXT:
                raise ValueError(f"a name or text claims {length} bytes")
            return super()._get_str(offset)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            inner, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            self.values += int(count[0])
            return _array_parts(self, orig_offs, inner, count)

        def _get_tensor_info_field(self, orig_offs: int) -> Any:
            field = super()._get_tensor_info_field(orig_offs)
            _check_info(field, len(self.data))
            return field

    return Reader(file)


def _array_parts(reader: Any, offset: int, inner: Any, count: Any) -> Any:
    """Return what ``GGUFReader._get_field_parts`` returns for the array at ``offset``, with its data as one part.

    The package's own method makes an object for each value. Nothing needs texts in arrays, so these have no part.
    """
    from gguf import GGUFValueType

    kind, length, start = GGUFValueType(int(inner[0])), int(count[0]), offset + inner.nbytes + count.nbytes
    if kind == GGUFValueType.ARRAY or reader.values > _MAX_VALUES:
        raise ValueError(f"a field claims {length} values of type {kind.name}")
    types = [GGUFValueType.ARRAY, kind]
    if kind == GGUFValueType.STRING:
        return _end_of_texts(reader.data, start, length) - offset, [inner, count], [], types
    data = reader._get(start, reader.gguf_scalar_to_np[kind], length)
    return start - offset + data.nbytes, [inner, count, data], [2], types


def _end_of_texts(data: Any, position: int, count: int) -> int:
    """Return where ``count`` texts end. Each follows its length."""
    for _ in range(count):
        if position + 8 > len(data):
            raise ValueError(f"it is cut off, or a field claims {count} texts")
        position += 8 + struct.unpack_from("<Q", data, position)[0]
    return position


def _check_info(field: "ReaderField", size: int) -> None:
    """Refuse a tensor whose shape or block type cannot be true in a file of ``size`` bytes."""
    from gguf import GGMLQuantizationType

    dims = [int(length) for length in field.parts[3]]
    if not 1 <= len(dims) <= _MAX_DIMS or not 0 < math.prod(dims) <= 8 * size:
        raise ValueError(f"{field.name} claims the shape {dims[::-1][:_MAX_DIMS]}")
    if (kind := int(field.parts[4][0])) not in list(GGMLQuantizationType):
        raise ValueError(f"{field.name} has the block type {kind}, which is not known")


def _stored(file: Path, reader: "GGUFReader", tensor: "ReaderTensor") -> StoredTensor:
    from gguf import GGML_QUANT_SIZES

    kind = tensor.tensor_type.name
    shape = _shape(reader, tensor)
    compression = None
    if kind not in _PLAIN:
        if kind not in DECODED:
            raise InvalidRequest(
                f"{file.name}: {tensor.name} has the block type {kind}, which is not supported; supported: "
                f"{', '.join((*_PLAIN, *DECODED))}"
            )
        block, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
        compression = Compression(format=kind, block=block, block_bytes=block_bytes)
    return StoredTensor(
        file=file, name=tensor.name, dtype=kind, shape=shape, bytes=int(tensor.n_bytes),
        offset=int(tensor.data_offset), compression=compression,
    )  # fmt: skip


def _shape(reader: "GGUFReader", tensor: "ReaderTensor") -> tuple[int, ...]:
    """Return the shape of a tensor in torch's order of dims."""
    stored = tuple(int(length) for length in reversed(tensor.shape))
    field = reader.get_field(_SHAPES + tensor.name)
    if field is None:
        return stored
    original = field.contents()
    if not isinstance(original, list) or not all(isinstance(length, int) and length > 0 for length in original):
        raise ValueError(f"{_SHAPES}{tensor.name} is not a shape")
    if math.prod(original) != math.prod(stored):
        raise ValueError(f"{_SHAPES}{tensor.name} is {original}, and the tensor has the shape {list(stored)}")
    return tuple(original)


def _check_spans(file: Path, end: int, tensors: Sequence[StoredTensor]) -> None:
    """Refuse data that overlaps another tensor's or the header, which ends at ``end``, or goes beyond the file."""
    size = file.stat().st_size
    for tensor in sorted(tensors, key=lambda each: each.offset):
        if tensor.offset < end or tensor.offset + tensor.bytes > size:
            raise InvalidRequest(
                f"{file}: the data of {tensor.name} overlaps another's or goes beyond the file: download it again"
            )
        end = tensor.offset + tensor.bytes
