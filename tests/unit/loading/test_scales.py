"""Scales that cannot be meant, inside blocks, and packages that are missing, are noticed before a weight is read."""

import numpy as np
import pytest
import torch

from parallel_backend.checkpoint.stored_tensor import StoredTensor
from parallel_backend.checkpoint.weight_headers import read_file, weights_under
from parallel_backend.errors import InvalidRequest
from parallel_backend.loading import scales
from parallel_backend.loading.scales import check_scales
from tests.support import compressed

FIELDS = [(kind, at) for kind, offsets in compressed.SCALES_AT.items() for at in offsets]


@pytest.fixture
def matrix(tmp_path):
    """``matrix(kind)`` is a stored matrix in a GGUF type or in a format of ComfyUI."""

    def write(kind: str) -> StoredTensor:
        torch.manual_seed(0)
        weights = {"a.weight": torch.randn(8, 512)}
        if kind in compressed.GGUF_TYPES:
            compressed.write_gguf(tmp_path / "model.gguf", weights, kind)
            return read_file(tmp_path / "model.gguf").tensors["a.weight"]
        compressed.write_described(tmp_path / "model.safetensors", weights, kind)
        return weights_under("", read_file(tmp_path / "model.safetensors"))["a.weight"]

    return write


def test_the_table_of_scales_covers_every_type():
    assert set(compressed.SCALES_AT) == set(compressed.GGUF_TYPES) == set(scales._GGUF_SCALES)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("kind", "at"), FIELDS)
def test_a_scale_in_a_block_that_is_no_number_is_refused(matrix, kind, at, value):
    weight = matrix(kind)
    blocks = np.memmap(weight.file, np.uint8, "r+", weight.offset, (weight.bytes,))
    last = weight.bytes - weight.compression.block_bytes + at
    blocks[last : last + 2] = np.array([value], np.float16).view(np.uint8)
    blocks.flush()
    with pytest.raises(InvalidRequest, match=r"^a.weight has a block with a scale that is NaN or infinite"):
        check_scales(weight)


@pytest.mark.parametrize("kind", compressed.GGUF_TYPES)
def test_blocks_of_zeros_and_any_other_bytes_are_accepted(matrix, kind):
    weight = matrix(kind)
    blocks = np.memmap(weight.file, np.uint8, "r+", weight.offset, (weight.bytes,))
    rows = blocks.reshape(-1, weight.compression.block_bytes)
    scaled = [at + i for at in compressed.SCALES_AT[kind] for i in (0, 1)]
    rows[0], rows[1] = 0, [0 if i in scaled else 0x7F for i in range(rows.shape[1])]
    rows[2] = [0 if i in scaled else 0xFF for i in range(rows.shape[1])]
    blocks.flush()
    check_scales(weight)


@pytest.mark.parametrize("kind", ["int8", "int8 rotated", "mxfp8", "nvfp4"])
def test_formats_that_need_comfy_kitchen_are_refused_without_it(matrix, monkeypatch, kind):
    weight = matrix(kind)

    def missing():
        raise InvalidRequest("these weights need the package comfy-kitchen")

    monkeypatch.setattr(scales, "kitchen", missing)
    with pytest.raises(InvalidRequest, match="need the package comfy-kitchen"):
        check_scales(weight)


def test_fp8_needs_no_comfy_kitchen(matrix, monkeypatch):
    monkeypatch.setattr(scales, "kitchen", None)
    check_scales(matrix("fp8 e4m3"))
