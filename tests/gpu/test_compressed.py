"""Products in a weight's own format on a GPU: they equal the decoded weight's, except that inputs are rounded too."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from parallel_backend.loading import native_kernels
from tests.support.compressed_layer import COLUMNS, compressed_layer

OUTPUT = 2.0**-8
"""Relative error of a result in bfloat16."""

LARGEST = {"fp8 e4m3": 2.0**-4, "int8": 4.5 / 254, "int8 by row": 4.5 / 254, "int8 rotated": 4.5 / 254}
"""Bounds of the relative error of a rounded input, as a root mean square.

A number in e4m3 has 3 bits after its first one, and is off by 1/16 of itself at most. A row in INT8 has steps of 1/127
of its largest number, which is less than 4.5 times the root mean square of 256 normal ones: each is off by half a step.
"""

TOKENS = [(32,), (2, 7), (1, 0)]


def errors(device, name, tokens):
    """Relative root mean square errors of a layer's result and of its decoded weight's; the reason if it cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        made, decoded = compressed_layer(Path(folder), name)
    made = made.to(device)
    made.dtype, made.bias.data = torch.bfloat16, made.bias.data.bfloat16()
    if native_kernels.product(made.compression, len(made.packed), torch.device(device)) is None:
        return f"this GPU does not multiply in {name}"
    x = torch.randn(*tokens, COLUMNS, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    out = made(x)
    assert out.dtype == torch.bfloat16
    bias = made.bias.double()
    exact = functional.linear(x.double(), decoded.to(device).double(), bias)
    assert out.shape == exact.shape
    if not out.numel():
        return {"native": 0.0, "decoded": 0.0}
    plain = functional.linear(x, made.weight, made.bias)
    return {"native": relative(out, exact, bias), "decoded": relative(plain, exact, bias)}


def relative(out, exact, bias):
    return float((out.double() - exact).norm() / (exact - bias).norm())


def check(result, name, tokens):
    if isinstance(result, str):
        pytest.skip(result)
    empty = 0 in tokens
    assert result["decoded"] <= 2 * OUTPUT, result  # the decoded weight is in bfloat16, too
    assert (0 if empty else 1e-3) <= result["native"] <= LARGEST[name] + OUTPUT, result


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", LARGEST)
def test_a_product_in_the_format_is_off_by_the_rounding_of_inputs(on_card, name, tokens):
    check(on_card(errors, "cuda", name, tokens), name, tokens)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", LARGEST)
def test_the_same_arithmetic_on_the_cpu(monkeypatch, name, tokens):
    """Shows on every machine that the comparison itself is right."""
    monkeypatch.setattr(native_kernels, "_has_cores", lambda stored_format, device: True)
    check(errors("cpu", name, tokens), name, tokens)
