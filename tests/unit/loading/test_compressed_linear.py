"""Linear layers with compressed weights: parts of rows, columns between blocks, and products in the format itself."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend.checkpoint.stored_tensor import Compression
from parallel_backend.loading import decoding, native_kernels
from tests.support import compressed
from tests.support.compressed_layer import COLUMNS, ROWS, compressed_layer

MULTIPLIED = ["fp8 e4m3", "int8", "int8 by row", "int8 rotated", "mxfp8", "nvfp4"]
"""Formats in which some device multiplies."""


@pytest.fixture
def layer(tmp_path):
    """``layer(name)`` is a layer in a format, and its decoded weight."""
    return partial(compressed_layer, tmp_path)


@pytest.mark.parametrize("at_once", [3 * COLUMNS, 1 << 22])
@pytest.mark.parametrize("name", [*compressed.FORMATS, *compressed.GGUF_TYPES])
def test_the_weight_is_that_of_the_formats_own_decoder(layer, monkeypatch, name, at_once):
    monkeypatch.setattr(decoding, "_AT_ONCE", {"cpu": at_once})
    made, decoded = layer(name)
    assert (made.weight - decoded).abs().max() <= 1e-6 * decoded.abs().max()
    assert (made.in_features, made.out_features) == (COLUMNS, ROWS)
    assert made.weight.dtype == torch.float32
    x = torch.randn(2, 3, COLUMNS)
    assert torch.allclose(made(x), functional.linear(x, decoded, made.bias), atol=1e-4)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "nvfp4", "int8 rotated", "fp8 e4m3"])
def test_columns_are_widened_to_what_can_be_decoded(layer, name):
    made, decoded = layer(name)
    packed, scales = made.packed, {scale: getattr(made, scale) for scale in made.compression.scales}
    parts = (slice(3, 40), slice(130, 161))
    new = made.cut_weight(1, parts)
    names = {parameter: name for name, parameter in made.named_parameters()}
    for parameter, (dim, slices) in new.items():
        whole = packed if names[parameter] == "packed" else scales["block_scale"]
        held = torch.cat([whole[:, part] for part in slices], dim=dim)
        assert held.shape == parameter.shape
        setattr(made, names[parameter], nn.Parameter(held, requires_grad=False))
    wanted = torch.cat([decoded[:, part] for part in parts], dim=1)
    assert (made.weight - wanted).abs().max() <= 1e-6 * decoded.abs().max()


def decoded_product(x, weight, bias):
    return functional.linear(x.dequantize(), weight.dequantize(), bias)


@pytest.fixture
def with_cores(monkeypatch):
    """Compute as on a device that multiplies in every format."""
    monkeypatch.setattr(native_kernels, "_has_cores", lambda stored_format, device: True)
    real = functional.linear

    def product(x, weight, bias):
        # torch has no product of numbers with block scales for CPUs.
        blocks = x._layout_cls in ("TensorCoreMXFP8Layout", "TensorCoreNVFP4Layout")
        return (decoded_product if blocks else real)(x, weight, bias)

    monkeypatch.setattr(native_kernels, "functional", SimpleNamespace(linear=product))


@pytest.mark.parametrize("name", MULTIPLIED)
@pytest.mark.parametrize("tokens", [(32,), (2, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_devices_with_the_format_multiply_in_it(layer, request, name, tokens, bias):
    made, decoded = layer(name, bias=bias)
    x = torch.randn(*tokens, COLUMNS)
    exact = functional.linear(x, decoded, made.bias)
    assert torch.allclose(made(x), exact, atol=1e-4)
    request.getfixturevalue("with_cores")
    rounded = made(x)
    assert rounded.shape == exact.shape
    difference = float((rounded - exact).abs().max() / exact.abs().max())
    assert 1e-3 < difference < 0.2  # the input is rounded, too


@pytest.mark.parametrize("name", [*MULTIPLIED, "Q4_K"])
@pytest.mark.parametrize("shape", [(0,), (1, 0), (0, 5)])
def test_a_rank_without_tokens_gets_an_empty_result(layer, with_cores, name, shape):
    made, _ = layer(name)
    out = made(torch.empty(*shape, COLUMNS, dtype=torch.bfloat16))
    assert (out.shape, out.dtype) == ((*shape, ROWS), torch.bfloat16)


def test_tokens_of_zeros_give_the_bias(layer, with_cores):
    made, _ = layer("nvfp4")
    assert torch.equal(made(torch.zeros(3, COLUMNS)), made.bias.expand(3, ROWS))


class Maxima(TorchDispatchMode):
    """Counts the maxima over whole tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.amax.default and len(args) == 1
        return func(*args, **(kwargs or {}))


def test_nvfp4_takes_the_input_scale_of_the_file_or_of_the_tokens(layer, with_cores):
    made, _ = layer("nvfp4")
    for x in (torch.randn(16, COLUMNS).bfloat16(), torch.randn(16, COLUMNS)):
        # As ComfyUI's TensorCoreNVFP4Layout.quantize.
        whole = (torch.amax(x.abs()) / (448.0 * 6.0)).to(torch.float32)
        assert torch.equal(native_kernels._nvfp4_scale(x), whole)
    with Maxima() as maxima:
        found = made(x)
    assert maxima.count == 1
    made.compression = replace(made.compression, input_scale=made.compression.tensor_scale)
    made.register_buffer("input_scale", whole)
    with Maxima() as maxima:
        assert torch.equal(made(x), found)
    assert maxima.count == 0


def test_without_comfy_kitchen_fp8_is_decoded(layer, with_cores, monkeypatch):
    monkeypatch.setattr(native_kernels, "is_usable", lambda: False)
    made, decoded = layer("fp8 e4m3")
    x = torch.randn(3, COLUMNS)
    assert torch.allclose(made(x), functional.linear(x, decoded, made.bias), atol=1e-4)


@pytest.mark.parametrize(
    ("compression", "rows"),
    [
        (Compression(format="F8_E4M3"), 64),
        (Compression(format="F8_E5M2", native=True), 64),
        (Compression(format="nvfp4", native=True), 63),
        (Compression(format="Q4_K", native=True), 64),
    ],
)
def test_other_layers_are_decoded_everywhere(monkeypatch, compression, rows):
    monkeypatch.setattr(
        native_kernels, "_has_cores", lambda stored_format, device: stored_format in native_kernels._NEEDS
    )
    assert native_kernels.product(compression, rows, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("stored_format", "capability", "has"),
    [("F8_E4M3", (8, 6), False), ("F8_E4M3", (8, 9), True), ("nvfp4", (9, 0), False), ("nvfp4", (10, 0), True)],
)
def test_the_compute_capability_decides(monkeypatch, stored_format, capability, has):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    compression = Compression(format=stored_format, native=True)
    assert (native_kernels.product(compression, 64, torch.device("cuda:0")) is not None) == has
    assert native_kernels.product(compression, 64, torch.device("cpu")) is None
