"""Headers of safetensors files, and what is refused before weights are read."""

import json
import struct
import time

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint.dtypes import STORED_NAMES, TORCH_DTYPES
from parallel_backend.checkpoint.safetensors_file import read_header
from parallel_backend.checkpoint.stored_tensor import DTYPE_BYTES
from parallel_backend.errors import InvalidRequest

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path, entries, data=b"\0" * 24):
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_names_dtypes_shapes_and_metadata(tmp_path):
    tensors = {"a.weight": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.float8_e4m3fn), "c": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "model.safetensors", {"config": "{}"})
    header = read_header(tmp_path / "model.safetensors")
    found = {name: (tensor.dtype, tensor.shape, tensor.bytes) for name, tensor in header.tensors.items()}
    assert found == {"a.weight": ("F32", (2, 3), 24), "b": ("F8_E4M3", (4,), 4), "c": ("F32", (), 4)}
    assert header.metadata == {"config": "{}"}


def test_each_dtype_has_the_name_and_the_size_that_safetensors_gives_it(tmp_path):
    assert TORCH_DTYPES.keys() == DTYPE_BYTES.keys()
    save_file({name: torch.zeros(3, dtype=dtype) for name, dtype in TORCH_DTYPES.items()}, tmp_path / "all.safetensors")
    stored = read_header(tmp_path / "all.safetensors").tensors
    assert {name: (tensor.dtype, tensor.bytes) for name, tensor in stored.items()} == {
        name: (STORED_NAMES[dtype], 3 * DTYPE_BYTES[name]) for name, dtype in TORCH_DTYPES.items()
    }


@pytest.mark.parametrize(
    ("entries", "data", "message"),
    [
        ({"a": ENTRY}, b"\0" * 20, "has 20 bytes of weights, and its header lists 24"),
        ({"a": ENTRY}, b"\0" * 30, "has 30 bytes of weights, and its header lists 24"),
        ({"a": ENTRY | {"shape": [2, 4]}}, b"\0" * 24, r"a has 24 bytes, and F32 of shape \[2, 4\] takes 32"),
        ({"a": ENTRY, "b": ENTRY}, b"\0" * 24, "overlaps or has gaps"),
        ({"a": ENTRY | {"data_offsets": [8, 32]}}, b"\0" * 32, "overlaps or has gaps"),
        ({"a": ENTRY | {"data_offsets": [24, 0]}}, b"\0" * 24, "a has -24 bytes"),
        ({"a": ENTRY | {"shape": [-2, 3]}}, b"\0" * 24, "entry for a is not valid"),
        ({"a": ENTRY | {"shape": [True, 6]}}, b"\0" * 24, "entry for a is not valid"),
        ({"a": {"dtype": "F32"}}, b"\0" * 24, "entry for a is not valid"),
        ({"a": ENTRY | {"shape": [10**12, 0], "data_offsets": [0, 0]}}, b"", "entry for a is not valid"),
        ({"a": ENTRY | {"data_offsets": [0, 24, 30]}}, b"\0" * 24, "entry for a is not valid"),
        (["a"], b"", "not a JSON object"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, entries, data, message):
    with pytest.raises(InvalidRequest, match=message):
        read_header(write(tmp_path / "model.safetensors", entries, data))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off or has another format"),
        (b"\x80\x04", "cut off or has another format"),
        (struct.pack("<Q", 1 << 60), "cut off or has another format"),
        (struct.pack("<Q", 4) + b"nono", "cannot be read as a safetensors file"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "cannot be read as a safetensors file"),
    ],
)
def test_other_content_is_refused(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize("shape", [[1 << 62] * 200_000, [10**4000] * 8], ids=["dims", "digits"])
def test_absurd_shapes_are_refused_before_they_are_multiplied(tmp_path, shape):
    """The product of so many takes a minute, and a number of so many digits cannot be written into a message."""
    path = write(tmp_path / "model.safetensors", {"a": ENTRY | {"shape": shape}}, b"\0" * 24)
    start = time.process_time()
    with pytest.raises(InvalidRequest, match="entry for a is not valid"):
        read_header(path)
    assert time.process_time() - start < 5.0


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_header(tmp_path / "model.safetensors")
