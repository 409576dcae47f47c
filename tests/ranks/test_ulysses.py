"""Ulysses' exchange in one operation, as for NCCL, gives what the exchange in parts gives, which gloo takes."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.distributed.sent_bytes import SentBytes
from parallel_backend.layout.partition import Partition
from parallel_backend.strategies.ulysses import UlyssesAttention
from tests.ranks import driver


def attended(rank, heads, tokens, batch):
    """Attend with both exchanges; return both results, and the bytes that both sent."""
    ulysses, found = driver.mesh(rank, f"ulysses={len(tokens)}").axes["ulysses"], []
    generator = torch.Generator().manual_seed(rank)
    qkv = [torch.randn(batch, tokens[rank], heads, 4, generator=generator).transpose(1, 2) for _ in range(3)]

    def inner(query, key, value, *, scale, sample):
        """Mix the tokens of each head; the order of tokens and heads counts."""
        weight = torch.arange(1.0, query.shape[2] + 1)[:, None]
        return (query * weight).cumsum(2) + key.flip(2) * value

    for gloo in (True, False):
        attend = UlyssesAttention(replace(ulysses, gloo=gloo), Partition(tokens), inner)
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
    for parts, whole in pools(len(tokens)).run(attended, heads, tokens, batch):
        assert torch.equal(parts[0], whole[0])
        assert parts[1] == whole[1]
        assert whole[0].transpose(1, 2).is_contiguous(), "as modules expect it"
