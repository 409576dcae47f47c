"""The header of a safetensors file: names, dtypes and shapes, checked against the file's size. No torch."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import InvalidRequest
from .stored_tensor import DTYPE_BYTES, PACKED_BYTES, Header, StoredTensor

_SIZES = DTYPE_BYTES | PACKED_BYTES

_LAYERS = "_quantization_metadata"
"""ComfyUI's name of what the metadata says about compressed layers."""

_MAX_HEADER = 100_000_000
"""Largest safetensors header in bytes, as in the safetensors library."""

Described = TypeVar("Described")

_MAX_DIMS, _MAX_SIZE = 8, (1 << 63) - 1
"""Most dims of a tensor, and the largest of their lengths and of an offset, so that products stay small numbers."""


def read_header(file: Path) -> Header:
    """Read the header of a safetensors file, and check that the tensors it lists fill the file exactly.

    Raises:
        InvalidRequest: the file cannot be read, is not a safetensors file, is cut off, or lists data that overlaps,
            has gaps or does not fit a tensor's shape.
    """
    listed, start, data_bytes = _read_json(file)
    metadata = listed.pop("__metadata__", {})
    stored = {name: _stored(file, name, entry, start) for name, entry in listed.items()}
    _check_spans(file, [span for _, span in stored.values()], data_bytes)
    entries = metadata.items() if isinstance(metadata, dict) else ()
    texts = {name: text for name, text in entries if isinstance(text, str)}
    return Header(
        tensors={name: tensor for name, (tensor, _) in stored.items()},
        metadata=texts,
        layers=(texts[_LAYERS],) if _LAYERS in texts else (),
    )


def read_metadata(file: Path, metadata: Mapping[str, str], name: str, kind: type[Described]) -> Described:
    """Return what a text of the metadata holds as JSON, as an object of ``kind``.

    Raises:
        InvalidRequest: there is no such text, or it is no such JSON.
    """
    try:
        return msgspec.convert(json.loads(metadata[name]), kind)
    except (KeyError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file} has no valid {name} in its metadata: run the workflow again") from error


def check_id(file: Path, metadata: Mapping[str, str], file_id: str) -> None:
    """Check that a path names the file that is meant. One in ``/proc`` names another file when the first is closed.

    Raises:
        InvalidRequest: the file's metadata has another id.
    """
    if metadata.get("id") != file_id:
        raise InvalidRequest(f"{file} holds other weights than the request means ({file_id}): run the workflow again")


def _read_json(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header's entries, where the data begin, and how many bytes they have."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(_MAX_HEADER, size - 8):
                raise ValueError("it is cut off or has another format")
            entries = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file} cannot be read as a safetensors file ({error}): download it again") from error
    if not isinstance(entries, dict):
        raise InvalidRequest(f"{file} is not a safetensors file: its header is not a JSON object")
    return entries, 8 + length, size - 8 - length


def _stored(file: Path, name: str, entry: Any, data: int) -> tuple[StoredTensor, tuple[int, int]]:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, end)
        valid = isinstance(dtype, str) and len(shape) <= _MAX_DIMS
        valid = valid and all(type(number) is int and 0 <= number <= _MAX_SIZE for number in numbers)
        valid = valid and (math.prod(shape) > 0 or max(shape) == 0)  # no rows without any data
    except (KeyError, IndexError, TypeError, ValueError):
        valid = False
    if not valid:
        raise InvalidRequest(f"{file}: the header's entry for {name} is not valid: download the file again")
    expected = math.prod(shape) * _SIZES.get(dtype, 0)
    if dtype in _SIZES and end - start != expected:
        raise InvalidRequest(
            f"{file}: {name} has {end - start} bytes, and {dtype} of shape {list(shape)} takes {expected}: download "
            "the file again"
        )
    tensor = StoredTensor(file=file, name=name, dtype=dtype, shape=shape, bytes=end - start, offset=data + start)
    return tensor, (start, end)


def _check_spans(file: Path, spans: list[tuple[int, int]], data_bytes: int) -> None:
    """Refuse data that overlaps, leaves gaps or goes beyond the file, as the safetensors library does."""
    position = 0
    for start, end in sorted(spans):
        if start != position or end < start:
            raise InvalidRequest(f"{file}: the tensors' data overlaps or has gaps: download the file again")
        position = end
    if position != data_bytes:
        raise InvalidRequest(
            f"{file} has {data_bytes} bytes of weights, and its header lists {position}: download the file again"
        )
