"""Kernels on a GPU: each agrees with plain arithmetic, and a ring's merge of blocks with one block."""

import pytest
import torch

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


def inputs(device, dtype, head_dim):
    """q, k and v as modules give them: the heads next to their values."""
    generator = torch.Generator().manual_seed(head_dim)
    shapes = ((2, tokens, 3, head_dim) for tokens in (QUERIES, sum(KEYS), sum(KEYS)))
    return [torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for shape in shapes]


def exact(query, key, value):
    """Attention and its log-sum-exp by their definition, in float64."""
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value.double(), scores.logsumexp(-1)


def relative(got, wanted):
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def errors(device, name, dtype, head_dim):
    """How far a kernel is off, alone and with the log-sum-exp, and how far a merge of blocks is from one block; or
    why it cannot run."""
    try:
        kernel = choose(name, torch.device(device), dtype, [head_dim])
    except InvalidRequest as refusal:
        return str(refusal)
    query, key, value = inputs(device, dtype, head_dim)
    wanted, wanted_lse = exact(query, key, value)
    one = kernel(query, key, value, None)
    out, lse = kernel.with_lse(query, key, value, None)
    assert lse.dtype == SINGLE
    merged = _Merge()
    for k, v in zip(key.split(KEYS, dim=2), value.split(KEYS, dim=2), strict=True):
        merged.add(*kernel.with_lse(query, k, v, None))
    return {
        "alone": relative(one, wanted),
        "with lse": relative(out, wanted),
        "lse": relative(lse, wanted_lse),
        "merged": relative(merged.result(query), one),
    }


@pytest.mark.parametrize(("name", "dtype", "head_dim"), CASES)
def test_a_kernel_is_right_and_a_merge_of_blocks_is_one_block(on_card, name, dtype, head_dim):
    found = on_card(errors, "cuda", name, dtype, head_dim)
    if isinstance(found, str) and "Ampere generation or newer" in found:
        pytest.skip(found)
    assert isinstance(found, dict), found
    assert max(found.values()) <= TOLERANCE[dtype], found


@pytest.mark.parametrize("head_dim", [64, 12])
def test_the_same_arithmetic_on_the_cpu(head_dim):
    """Which says that the measure is right, on every machine."""
    found = errors("cpu", "sdpa", SINGLE, head_dim)
    assert max(found.values()) <= TOLERANCE[SINGLE], found
    assert KERNELS["sdpa"] is choose("auto", torch.device("cpu"), SINGLE, [head_dim])
