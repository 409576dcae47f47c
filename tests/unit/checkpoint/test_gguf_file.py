"""GGUF files: what their headers say, and the refusal of those that cannot be true, without waiting or allocating."""

import struct
import time

import gguf
import numpy as np
import pytest
import torch

from parallel_backend.checkpoint.gguf_file import DECODED, read_gguf
from parallel_backend.errors import InvalidRequest
from tests.support import compressed

SECONDS = 5.0


@pytest.fixture
def file(tmp_path):
    """A file with a compressed matrix, a plain vector and a tensor of five dims."""
    path = tmp_path / "model.gguf"
    weights = {"a.weight": torch.ones(4, 256), "b.bias": torch.ones(3), "c.weight": torch.ones(2, 3, 1, 2, 2)}
    compressed.write_gguf(path, weights, "Q4_K")
    return path


def refused(path, message):
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match=message):
        read_gguf(path)
    assert time.monotonic() - start < SECONDS


def test_names_types_and_shapes(file):
    header = read_gguf(file)
    assert {name: (each.dtype, each.shape) for name, each in header.tensors.items()} == {
        "a.weight": ("Q4_K", (4, 256)), "b.bias": ("F32", (3,)), "c.weight": ("F32", (2, 3, 1, 2, 2)),
    }  # fmt: skip
    assert header.metadata == {"general.architecture": "wan"}


def test_diffusers_decodes_every_type_that_is_read():
    from diffusers.quantizers.gguf.utils import dequantize_functions

    assert {kind.name for kind in dequantize_functions} - {"BF16"} == set(DECODED)


@pytest.mark.parametrize("length", [0, 3, 20, 60, 200, -1, -100])
def test_a_truncated_file_is_refused(file, length):
    file.write_bytes(file.read_bytes()[:length])
    refused(file, "model.gguf cannot be read as a GGUF file")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "has another format"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack("<I", 1 << 20), "version 1048576"),
        (8, struct.pack("<Q", 1 << 60), "claims 1152921504606846976 tensors"),
        (16, struct.pack("<Q", 1 << 40), "claims 3 tensors and 1099511627776 fields"),
        (16, struct.pack("<Q", 20), "cannot be read as a GGUF file"),
        (24, struct.pack("<Q", 1 << 62), "a name or text claims 4611686018427387904 bytes"),
    ],
)
def test_absurd_counts_are_refused(file, at, value, message):
    content = bytearray(file.read_bytes())
    content[at : at + len(value)] = value
    file.write_bytes(content)
    refused(file, message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dims", struct.pack("<I", 1 << 30), "cut off, or something in it claims"),
        ("shape", struct.pack("<Q", 1 << 61), "claims the shape"),
        ("shape", struct.pack("<Q", 0), "claims the shape"),
        ("shape", struct.pack("<Q", 255), "255. is not a multiple of Q4_K block size .256."),
        ("type", struct.pack("<I", 999), "a.weight has the block type 999, which is not known"),
        ("type", struct.pack("<I", gguf.GGMLQuantizationType.IQ2_XXS), "block type IQ2_XXS, which is not supported"),
        ("offset", struct.pack("<Q", 1 << 50), "cut off, or something"),
        ("offset", struct.pack("<Q", 32), "overlaps another's or goes beyond the file"),
        ("offset", struct.pack("<Q", (1 << 64) - 32), "cannot be read as a GGUF file|overlaps"),
    ],
)
def test_what_a_tensors_entry_cannot_say_is_refused(file, field, value, message):
    content = bytearray(file.read_bytes())
    entry = content.index(b"a.weight") + len("a.weight")
    at = entry + {"dims": 0, "shape": 4, "type": 20, "offset": 24}[field]
    content[at : at + len(value)] = value
    file.write_bytes(content)
    refused(file, message)


def with_field(path, write):
    """Write a file with one more field, which ``write(writer)`` adds, and one tensor."""
    writer = gguf.GGUFWriter(path, "wan")
    write(writer)
    writer.add_tensor("a", np.zeros(12, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


UINT8, STRING, ARRAY = gguf.GGUFValueType.UINT8, gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([(UINT8, 1 << 23, 1 << 23)], "a field claims 8388608 values of type UINT8"),
        ([(UINT8, 1 << 21, 1 << 21)] * 3, "a field claims 2097152 values of type UINT8"),
        ([(UINT8, 1 << 60, 0)], "a field claims 1152921504606846976 values of type UINT8"),
        ([(STRING, 1 << 22, 1 << 10)], "cut off, or a field claims 4194304 texts"),
        ([(STRING, 3, 1 << 10)], "cannot be read as a GGUF file"),
        ([(ARRAY, 1, 1 << 10)], "a field claims 1 values of type ARRAY"),
        ([(99, 1, 1 << 10)], "99 is not a valid GGUFValueType"),
    ],
)
def test_absurd_arrays_are_refused(tmp_path, fields, message):
    def write(writer):
        for i in range(len(fields)):
            writer.add_array(f"long{i}", [1])

    path = with_field(tmp_path / "model.gguf", write)
    content = path.read_bytes()
    for i, (kind, count, size) in enumerate(fields):
        at = content.index(f"long{i}".encode()) + len("long0") + 4
        content = content[:at] + struct.pack("<IQ", kind, count) + b"\1" * size + content[at + 16 :]
    path.write_bytes(content)
    refused(path, message)


def test_nested_arrays_do_not_recurse(tmp_path):
    path = with_field(tmp_path / "model.gguf", lambda writer: writer.add_array("long", [1]))
    content = path.read_bytes()
    at = content.index(b"long") + len("long") + 4
    path.write_bytes(content[:at] + struct.pack("<IQ", ARRAY, 1) * 5000 + content[at:])
    refused(path, "a field claims 1 values of type ARRAY")


@pytest.mark.parametrize("values", [[7] * (1 << 20), ["word"] * (1 << 20)], ids=["numbers", "texts"])
def test_a_long_array_costs_no_object_for_each_value(tmp_path, values):
    path = with_field(tmp_path / "model.gguf", lambda writer: writer.add_array("long", values))
    start = time.process_time()
    assert list(read_gguf(path).tensors) == ["a"]
    assert time.process_time() - start < SECONDS


def test_a_shape_that_is_not_the_tensors_is_refused(tmp_path):
    path = with_field(tmp_path / "model.gguf", lambda writer: writer.add_array("comfy.gguf.orig_shape.a", [4, 5]))
    refused(path, r"orig_shape.a is \[4, 5\], and the tensor has the shape \[12\]")


@pytest.mark.parametrize(("at", "words"), [(8, "65537 tensors"), (16, "65537 fields")])
def test_more_tensors_or_fields_than_any_model_has_are_refused_unread(file, at, words):
    """Each takes some KB of memory, so a file of some MB could take GBs."""
    content = bytearray(file.read_bytes())
    content[at : at + 8] = struct.pack("<Q", (1 << 16) + 1)
    file.write_bytes(content + bytes(4 << 20))
    refused(file, words)
