"""Linear layers with compressed weights: parts of rows, columns between blocks, and products in the format itself."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from parallel_backend.checkpoint.stored_tensor import Compression
from parallel_backend.checkpoint.weight_headers import read_file, weights_under
from parallel_backend.loading import decoding, native_kernels
from parallel_backend.loading.compressed_linear import CompressedLinear
from parallel_backend.loading.scales import read_scale
from parallel_backend.loading.stored_bytes import opened
from tests.support import compressed

ROWS, COLUMNS = 64, 256
MULTIPLIED = ["fp8 e4m3", "int8", "int8 by row", "int8 rotated", "mxfp8", "nvfp4"]
"""Formats in which some device multiplies."""


@pytest.fixture
def layer(tmp_path):
    """``layer(name)`` is a layer in a format, and its decoded weight."""

    def build(name, **options):
        torch.manual_seed(0)
        plain = {"a.weight": torch.randn(ROWS, COLUMNS)}
        if name in compressed.GGUF_TYPES:
            path = tmp_path / "a.gguf"
            decoded = compressed.write_gguf(path, plain, name)
        else:
            path = tmp_path / "a.safetensors"
            decoded = compressed.write_described(path, plain, name, **options)
        stored = weights_under("", read_file(path))["a.weight"]
        assert stored.compression is not None
        made = CompressedLinear(nn.Linear(COLUMNS, ROWS, device="meta"), stored.compression).to_empty(device="cpu")
        with opened(stored) as data:
            made.packed.data = data.clone()
        for scale in stored.compression.scales:
            getattr(made, scale).data = read_scale(stored, scale)
        made.bias.data = torch.randn(ROWS)
        return made.requires_grad_(False), decoded["a.weight"]

    return build


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


@pytest.mark.parametrize("name", MULTIPLIED)
@pytest.mark.parametrize("tokens", [(32,), (2, 7)])
def test_devices_with_the_format_multiply_in_it(layer, monkeypatch, name, tokens):
    made, decoded = layer(name)
    x = torch.randn(*tokens, COLUMNS)
    exact = functional.linear(x, decoded, made.bias)
    assert torch.allclose(made(x), exact, atol=1e-4)
    monkeypatch.setattr(native_kernels, "_has_cores", lambda stored_format, device: True)
    if name in ("mxfp8", "nvfp4"):  # torch has no product in these formats for CPUs
        monkeypatch.setattr(native_kernels, "functional", SimpleNamespace(linear=decoded_product))
    rounded = made(x)
    assert rounded.shape == exact.shape
    difference = float((rounded - exact).abs().max() / exact.abs().max())
    assert 1e-3 < difference < 0.2  # the input is rounded, too


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
