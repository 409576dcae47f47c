"""Float32 on a GPU is not rounded to TensorFloat-32 where results are compared."""

import pytest
import torch
from torch.nn import functional

LARGEST = 1e-5
"""TensorFloat-32 has ten bits after the first, and is off by about 3e-4 in such sums."""


def errors(device):
    """Relative errors of a matrix product and of a convolution in float32."""
    generator = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(512, 512, generator=generator) for _ in range(2))
    image, kernel = torch.randn(1, 64, 32, 32, generator=generator), torch.randn(64, 64, 3, 3, generator=generator)
    results = {}
    for name, function, (one, other) in (
        ("matmul", torch.matmul, (x, matrix)), ("convolution", functional.conv2d, (image, kernel)),
    ):  # fmt: skip
        exact = function(one.double(), other.double())
        out = function(one.to(device), other.to(device)).cpu().double()
        results[name] = float((out - exact).norm() / exact.norm())
    return results


def test_a_gpu_computes_float32_in_full(on_card):
    result = on_card(errors, "cuda")
    assert max(result.values()) <= LARGEST, result


@pytest.mark.parametrize("name", ["matmul", "convolution"])
def test_the_same_arithmetic_on_the_cpu(name):
    """Shows on every machine that the comparison itself is right."""
    assert errors("cpu")[name] <= LARGEST
