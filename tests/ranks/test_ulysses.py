"""Ulysses' exchange in one operation (NCCL) or by halves of the heads gives what its exchange in parts gives (gloo)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.distributed.sent_bytes import SentBytes
from parallel_backend.layout.partition import Partition
from parallel_backend.strategies.ulysses import UlyssesAttention
from tests.ranks import driver


def decided(halved):
    """Trials that have been decided."""
    return SimpleNamespace(of=lambda *_: SimpleNamespace(second=halved))


def attended(rank, heads, tokens, batch, key_heads=None):
    """Attend with both exchanges, whole and by halves; return the results, and the bytes that each sent."""
    ulysses, found = driver.mesh(rank, f"ulysses={len(tokens)}").axes["ulysses"], []
    generator = torch.Generator().manual_seed(rank)
    counts = (heads, key_heads or heads, key_heads or heads)
    qkv = [torch.randn(batch, tokens[rank], count, 4, generator=generator).transpose(1, 2) for count in counts]

    def inner(query, key, value, *, scale, sample):
        """Mix the tokens of each head; the order of tokens and heads counts."""
        weight = torch.arange(1.0, query.shape[2] + 1)[:, None]
        shared = query.shape[1] // max(1, key.shape[1])
        key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
        return (query * weight).cumsum(2) + key.flip(2) * value

    for gloo, halved in ((True, False), (False, False), (True, True), (False, True)):
        attend = UlyssesAttention(replace(ulysses, gloo=gloo), Partition(tokens), inner, decided(halved))
        with SentBytes() as sent:
            out = attend(*qkv, scale=None, sample=None)
        found.append((out, sent.total))
    return found


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("heads", "tokens"),
    [(6, (4, 4, 4)), (7, (5, 4, 4)), (5, (3, 0, 2)), (2, (2, 1, 3)), (1, (1, 1, 0)), (8, (6, 5)), (3, (1, 2))],
)
def test_one_operation_gives_what_parts_give(pools, heads, tokens, batch):
    for parts, *others in pools(len(tokens)).run(attended, heads, tokens, batch):
        for other in others:
            assert torch.equal(parts[0], other[0])
            assert parts[1] == other[1]
            assert other[0].transpose(1, 2).is_contiguous(), "as modules expect it"


@pytest.mark.parametrize(
    ("heads", "key_heads", "tokens"), [(6, 3, (4, 3, 5)), (6, 2, (4, 4, 4)), (8, 2, (5, 0, 3)), (9, 3, (6, 5))]
)
def test_so_it_does_where_query_heads_share_key_heads(pools, heads, key_heads, tokens):
    for parts, *others in pools(len(tokens)).run(attended, heads, tokens, 2, key_heads):
        for other in others:
            assert torch.equal(parts[0], other[0])
            assert parts[1] == other[1]
