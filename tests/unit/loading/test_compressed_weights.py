"""Compressed weights that stay no matrices: convolutions are decoded when they are read; padded ones are refused."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from torch import nn

from parallel_backend.checkpoint.checkpoint import StoredComponent
from parallel_backend.errors import InvalidRequest
from parallel_backend.loading.compressed_linear import keep_compressed
from parallel_backend.loading.weight_source import WeightSource
from tests.support import compressed

CLASS = "WanTransformer3DModel"


def source(path):
    return WeightSource(StoredComponent(files=(path,), name=path.name), CLASS)


def read(weights, name, parts=None, rows=None):
    shape = torch.empty(weights.shape(name))[slice(None) if rows is None else rows].shape
    into = torch.empty(shape)
    weights.read(name, 0, parts, rows, into=into)
    return into


@pytest.fixture
def convolution():
    torch.manual_seed(0)
    return torch.randn(64, 16, 1, 2, 2)


@pytest.mark.parametrize("by_row", [True, False])
def test_a_convolution_in_fp8_is_decoded(tmp_path, convolution, by_row):
    path = tmp_path / "model.safetensors"
    flat = compressed.FORMATS["fp8 by row" if by_row else "fp8 e4m3"][1](convolution.flatten(1))
    stored = {f"a.{end}": tensor for end, tensor in flat.stored.items()}
    stored["a.weight"] = stored["a.weight"].reshape(convolution.shape)
    stored["a.comfy_quant"] = compressed._json_bytes(flat.description)
    save_file(stored, path)
    check_convolution(path, flat.decoded.reshape(convolution.shape))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("Q8_0", (64, 16, 1, 2, 2)),
        ("Q4_K", (16, 64, 1, 2, 2)),  # a row is one block
        ("Q4_K", (64, 16, 1, 2, 2)),  # and here a block is four rows
    ],
)
def test_a_convolution_of_five_dims_in_gguf_is_decoded(tmp_path, convolution, kind, shape):
    path, type_ = tmp_path / "model.gguf", GGMLQuantizationType[kind]
    rows = convolution.reshape(-1, 256)
    blocks = compressed.gguf_blocks(rows, kind)
    writer = gguf.GGUFWriter(path, "wan")
    writer.add_array("comfy.gguf.orig_shape.a.weight", list(shape))
    writer.add_tensor("a.weight", blocks, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_convolution(path, torch.from_numpy(gguf.quants.dequantize(blocks, type_).copy()).reshape(shape))


def check_convolution(path, decoded):
    weights = source(path)
    weights.check({"a.weight": tuple(decoded.shape)})
    torch.testing.assert_close(read(weights, "a.weight"), decoded)
    torch.testing.assert_close(read(weights, "a.weight", rows=slice(3, 10)), decoded[3:10])
    module = nn.ModuleDict({"a": nn.Conv3d(decoded.shape[1], decoded.shape[0], (1, 2, 2), device="meta")})
    keep_compressed(module, weights)
    assert type(module["a"]) is nn.Conv3d


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("nvfp4", (113, 120), r"a.weight is padded from \[113, 120\] to \[128, 128\] .*nvfp4 .*fp8, INT8 or GGUF file"),
        ("mxfp8", (97, 128), r"a.weight is padded from \[97, 128\] to \[128, 128\] .*padded mxfp8 is not supported"),
        ("nvfp4", (112, 128), "has shape .128, 128. in model.safetensors, but .112, 128. in the config"),
        ("mxfp8", (160, 128), "has shape .128, 128. in model.safetensors, but .160, 128. in the config"),
        ("fp8 e4m3", (127, 128), "has shape .128, 128. in model.safetensors, but .127, 128. in the config"),
    ],
)
def test_padded_matrices_are_named(tmp_path, name, shape, message):
    path = tmp_path / "model.safetensors"
    compressed.write_described(path, {"a.weight": torch.randn(128, 128)}, name)
    with pytest.raises(InvalidRequest, match=message):
        source(path).check({"a.weight": shape})
