"""Masked keys are left out exactly, and a kernel gets views of the keys that it was given."""

import pytest
import torch
from torch import Tensor

from parallel_backend.attention.kernels import KERNELS
from parallel_backend.attention.key_masks import EMPTY_LSE, KeyMask, attend, attend_with_lse
from parallel_backend.denoiser.attention_chain import LocalAttention

BATCH, HEADS, QUERIES, KEYS, SIZE = 2, 3, 5, 11, 4
CPU, SDPA = torch.device("cpu"), KERNELS["sdpa"]
PREFIX = [True] * 7 + [False] * 4
TEXT_FIRST = [True] * 2 + [False] * 3 + [True] * 6
SCATTERED = [False, True, True, False, True, False, False, True, True, False, True]
LAST = [False] * 10 + [True]
CASES = [
    [PREFIX, PREFIX], [TEXT_FIRST, TEXT_FIRST], [SCATTERED, LAST], [[True] * KEYS, PREFIX], [LAST, TEXT_FIRST],
]  # fmt: skip


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    """As modules make them: ``[B, heads, tokens, size]``, in memory ``[B, tokens, heads, size]``."""
    generator = torch.Generator().manual_seed(0)
    tokens = (QUERIES, KEYS, KEYS)
    q, k, v = (torch.randn(BATCH, each, HEADS, SIZE, generator=generator).transpose(1, 2) for each in tokens)
    return q, k, v


def masked(rows) -> KeyMask:
    mask = KeyMask.of(torch.tensor(rows), CPU)
    assert mask is not None
    return mask


def by_definition(query, key, value, mask):
    scores = query.double() @ key.double().mT * SIZE**-0.5
    scores = scores.masked_fill(~torch.tensor(mask)[:, None, None], -torch.inf)
    return scores.softmax(-1) @ value.double(), scores.logsumexp(-1)


class Watched:
    """A kernel that notes the memory of its keys and values."""

    stock, head_sizes = False, None

    def __init__(self):
        self.seen = []

    def unavailable(self, device, dtype):
        """It runs here."""

    def __call__(self, query, key, value, scale):
        return self.with_lse(query, key, value, scale)[0]

    def with_lse(self, query, key, value, scale):
        self.seen += [each.untyped_storage().data_ptr() for each in (key, value)]
        return SDPA.with_lse(query, key, value, scale)


@pytest.mark.parametrize("mask", CASES)
@pytest.mark.parametrize("moved", [False, True])
@torch.no_grad()
def test_masked_keys_are_left_out_exactly(mask, moved):
    tensors, key_mask = qkv(), masked(mask)
    expected, expected_lse = by_definition(*tensors, mask)
    before = [tensor.clone() for tensor in tensors]
    if moved:
        key_mask.move(*tensors[1:], None)
    options = {"scale": None, "key_mask": key_mask, "sample": None, "moved": moved}
    out = attend(SDPA, tensors, **options)
    with_lse, lse = attend_with_lse(SDPA, tensors, **options)
    for found, wanted in ((out, expected), (with_lse, expected), (lse, expected_lse)):
        assert (found - wanted).abs().max() <= 1e-5
    if not moved:
        assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


@pytest.mark.parametrize("mask", CASES)
@torch.no_grad()
def test_attention_of_one_rank_copies_only_the_keys_that_move(mask):
    tensors, kernel = qkv(), Watched()
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors[1:]]
    out = LocalAttention(kernel, masked(mask))(*tensors, scale=None, sample=None)
    assert (out - by_definition(*qkv(), mask)[0]).abs().max() <= 1e-5
    assert kernel.seen == memory * (len(kernel.seen) // 2)


@torch.no_grad()
def test_a_prefix_is_a_view_even_where_keys_must_stay():
    tensors, kernel = qkv(), Watched()
    attend(kernel, tensors, scale=None, key_mask=masked([PREFIX] * 2), sample=None)
    assert kernel.seen == [tensor.untyped_storage().data_ptr() for tensor in tensors[1:]]


def test_a_row_moves_no_more_keys_than_are_masked():
    (row,) = masked([TEXT_FIRST] * 2).rows
    assert (row.count, [indices.tolist() for indices in row.moves or ()]) == (8, [[2, 3, 4], [8, 9, 10]])
    (row,) = masked([PREFIX] * 2).rows
    assert (row.count, row.moves) == (7, None)
    assert KeyMask.of(torch.ones(2, KEYS, dtype=torch.bool), CPU) is None


@torch.no_grad()
def test_one_sample_takes_its_own_row():
    tensors, key_mask = qkv(), masked([SCATTERED, LAST])
    expected, _ = by_definition(*tensors, [SCATTERED, LAST])
    attention = LocalAttention(SDPA, key_mask)
    for sample in range(BATCH):
        out = attention(*(tensor[sample : sample + 1] for tensor in tensors), scale=None, sample=sample)
        assert (out - expected[sample : sample + 1]).abs().max() <= 1e-5


@torch.no_grad()
def test_a_sample_without_any_key_has_an_empty_log_sum_exp():
    tensors, key_mask = qkv(), masked([[False] * KEYS, PREFIX])
    out, lse = attend_with_lse(SDPA, tensors, scale=None, key_mask=key_mask, sample=None)
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == EMPTY_LSE).all())
    assert bool((lse[1].abs() < 100).all())
