"""Kernels on a GPU: each equals attention by definition, and a ring's merged blocks equal one block."""

import pytest
import torch

from parallel_backend import packages
from parallel_backend.attention.flash_package import flash_package
from parallel_backend.attention.kernels import KERNELS, choose
from parallel_backend.errors import InvalidRequest
from parallel_backend.strategies.ring import _Merge

QUERIES, KEYS = 150, (64, 33, 130)
HALF, SINGLE = torch.bfloat16, torch.float32
TOLERANCE = {HALF: 2e-2, SINGLE: 1e-4}
CASES = [
    ("sdpa", SINGLE, 64), ("sdpa", SINGLE, 12), ("sdpa", HALF, 64), ("sdpa", HALF, 12), ("sdpa", HALF, 128),
    ("flash", HALF, 64), ("flash", HALF, 128), ("flash", HALF, 72), ("cudnn", HALF, 64), ("cudnn", HALF, 128),
    ("cudnn", HALF, 72),
]  # fmt: skip


def inputs(device, dtype, head_dim, key_heads):
    """q ``[2, 6, tokens, head_dim]``, k and v, in memory ``[2, tokens, heads, head_dim]``, as modules make them."""
    generator = torch.Generator().manual_seed(head_dim)
    sizes = ((QUERIES, 6), (sum(KEYS), key_heads), (sum(KEYS), key_heads))
    shapes = ((2, tokens, heads, head_dim) for tokens, heads in sizes)
    return [torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for shape in shapes]


def exact(query, key, value):
    """Attention and its log-sum-exp by definition, in float64."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value.double(), scores.logsumexp(-1)


def relative(actual, expected):
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def errors(device, name, dtype, head_dim, key_heads=6):
    """Relative errors of a kernel, or the reason why it cannot run.

    They are the errors of its output alone, of its output and log-sum-exp together, and of merged blocks against one.
    """
    try:
        kernel = choose(name, torch.device(device), dtype, [head_dim])
    except InvalidRequest as refusal:
        return str(refusal)
    query, key, value = inputs(device, dtype, head_dim, key_heads)
    expected, expected_lse = exact(query, key, value)
    one = kernel(query, key, value, None)
    out, lse = kernel.with_lse(query, key, value, None)
    assert lse.dtype == SINGLE
    merged = _Merge()
    for k, v in zip(key.split(KEYS, dim=2), value.split(KEYS, dim=2), strict=True):
        merged.add(*kernel.with_lse(query, k, v, None))
    return {
        "alone": relative(one, expected),
        "with lse": relative(out, expected),
        "lse": relative(lse, expected_lse),
        "merged": relative(merged.result(query), one),
    }


def with_flash_3(device, head_dim, key_heads):
    """Errors of ``auto`` with FlashAttention 3, or the reason why it cannot run."""
    if not packages.is_installed("flash_attn_interface"):
        return "the package flash_attn_interface (FlashAttention 3) is not installed"
    package = flash_package(torch.device(device))
    if package is None or package.version != 3:
        return "FlashAttention 3 does not run on this GPU"
    assert choose("auto", torch.device(device), HALF, [head_dim]) is KERNELS["flash"]
    return errors(device, "auto", HALF, head_dim, key_heads)


@pytest.mark.parametrize(("head_dim", "key_heads"), [(64, 6), (128, 6), (128, 2)])
def test_flash_attention_3(on_card, head_dim, key_heads):
    result = on_card(with_flash_3, "cuda", head_dim, key_heads)
    if isinstance(result, str):
        pytest.skip(result)
    assert max(result.values()) <= TOLERANCE[HALF], result


@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize(("name", "dtype", "head_dim"), [*CASES, ("auto", HALF, 64), ("auto", HALF, 128)])
def test_a_kernel_is_right_and_a_merge_of_blocks_is_one_block(on_card, name, dtype, head_dim, key_heads):
    result = on_card(errors, "cuda", name, dtype, head_dim, key_heads)
    if isinstance(result, str) and "Ampere" in result:
        pytest.skip(result)
    assert isinstance(result, dict), result
    assert max(result.values()) <= TOLERANCE[dtype], result


@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("head_dim", [64, 12])
def test_the_same_arithmetic_on_the_cpu(head_dim, key_heads):
    """Shows on every machine that the comparison itself is right."""
    result = errors("cpu", "sdpa", SINGLE, head_dim, key_heads)
    assert max(result.values()) <= TOLERANCE[SINGLE], result
    assert KERNELS["sdpa"] is choose("auto", torch.device("cpu"), SINGLE, [head_dim])
