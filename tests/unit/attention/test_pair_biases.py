"""Attention with a bias for each pair of a query and a key."""

import pytest
import torch
import torch.nn.functional as F

from parallel_backend.attention.kernels import KERNELS, Flash, for_biases
from parallel_backend.attention.pair_biases import PairBiases


def inner(query, key, value, *, scale, sample):
    return KERNELS["sdpa"](query, key, value, scale)


def tensors(tokens=7, batch=2, heads=3, width=16):
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(batch, heads, tokens, width, generator=generator) for _ in range(3)]
    return qkv, [torch.randn(batch, tokens, 8, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_products_are_added_to_the_scores(scale):
    qkv, (queries, keys) = tensors()
    query, key, value = qkv
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=(queries @ keys.mT)[:, None], scale=scale)
    before = [each.clone() for each in qkv]
    ours = PairBiases(inner, queries, keys)(*qkv, scale=scale, sample=None)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, qkv, before))
    assert (F.scaled_dot_product_attention(query, key, value, scale=scale) - wanted).abs().max() > 0.1


def test_one_sample_gets_its_own_biases():
    qkv, (queries, keys) = tensors()
    whole = PairBiases(inner, queries, keys)(*qkv, scale=None, sample=None)
    for i in range(2):
        one = PairBiases(inner, queries, keys)(*(each[i : i + 1] for each in qkv), scale=None, sample=i)
        torch.testing.assert_close(one, whole[i : i + 1])


def test_rows_of_padding_have_no_biases():
    qkv, (queries, keys) = tensors(tokens=1)
    padded = PairBiases(inner, queries[:, :0], keys[:, :0])(*qkv, scale=None, sample=None)
    torch.testing.assert_close(padded, F.scaled_dot_product_attention(*qkv))


@pytest.mark.parametrize(
    ("kernel", "width", "kept"),
    [("sdpa", 136, True), ("flash", 136, True), ("flash", 264, False), ("cudnn", 72, False), ("sage", 72, False)],
)
def test_a_kernel_that_rounds_biases_or_cannot_take_them_makes_way(kernel, width, kept):
    chosen = for_biases(KERNELS[kernel], width)
    assert chosen is (KERNELS[kernel] if kept else KERNELS["sdpa"])
    assert isinstance(KERNELS["flash"], Flash)
