"""Query heads that share key heads: ranks send each key head once, and attention stays exact."""

import pytest
import torch
import torch.nn.functional as F

from parallel_backend.attention.kernels import KERNELS
from parallel_backend.denoiser import attention_chain
from parallel_backend.distributed.sent_bytes import SentBytes
from parallel_backend.interfaces.geometry import IMAGE, TEXT, AllReduce, AttentionKind, Extent, Geometry
from parallel_backend.interfaces.strategy import Workload
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.strategies.ring import Ring
from parallel_backend.strategies.token_split import TokenSplit
from parallel_backend.strategies.ulysses import Ulysses
from tests.ranks import driver

BATCH, SIZE, STREAMS = 2, 8, {TEXT: 5, IMAGE: 17}
"""No number of tokens divides by 2, 3 or 4."""


def tokens(heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(BATCH, count, heads, SIZE, generator=generator).transpose(1, 2)
        for name, count in STREAMS.items()
    }


def attend(rank, layout, heads, key_heads, repeats, masked):
    """Return the error of a rank's attention against all of it on one process, and the bytes that it sent.

    Args:
        repeats: whether keys and values come repeated, as some modules make them.
        masked: whether some of the text may not be attended to.
    """
    mesh = driver.mesh(rank, layout)
    split = TokenSplit.even(STREAMS, mesh.sequence)
    mask = torch.tensor([[True, True, False, True, False], [True, False, False, False, False]])
    chain = attention_chain.attention(mesh, split, (TEXT, IMAGE), {TEXT: mask} if masked else {}, KERNELS["sdpa"])
    times = heads // key_heads
    if repeats:
        chain = attention_chain.without_repeats(chain, times)
    whole = [tokens(count, seed) for seed, count in enumerate((heads, key_heads, key_heads))]
    q, *kv = (
        torch.cat([each[name][:, :, part] for name in STREAMS for part in split.streams[name].of(rank)], dim=2)
        for each in whole
    )
    kv = [each.repeat_interleave(times, dim=1) if repeats else each for each in kv]
    sent = SentBytes()
    with torch.inference_mode(), sent:
        out = chain(q, *kv, scale=None, sample=None)
    key, value = (torch.cat(list(each.values()), dim=2).repeat_interleave(times, dim=1) for each in whole[1:])
    allowed = torch.cat([mask, mask.new_ones(BATCH, STREAMS[IMAGE])], dim=1)[:, None, None] if masked else None
    return float((out - F.scaled_dot_product_attention(q, key, value, allowed)).abs().max()), sent.total


def expected_bytes(layout, heads, key_heads, rank):
    site = AttentionKind(streams=(TEXT, IMAGE), heads=heads, head_dim=SIZE, count=1, key_heads=key_heads)
    geometry = Geometry(
        channels=4, out_channels=4, patch=(2, 2), layers=1, sites=(site,),
        all_reduces=(AllReduce(tokens=IMAGE, width=heads * SIZE, count=1),),
    )  # fmt: skip
    extent = Extent(streams=STREAMS, values=16)
    workload = Workload(branches=((BATCH, extent),), alike=("",), geometry=geometry, itemsize=4, guided=False)
    parsed = ParallelLayout.parse(layout)
    return sum(strategy.bytes_sent(parsed, workload, rank) for strategy in (Ulysses(), Ring()))


@pytest.mark.parametrize(
    ("layout", "heads", "key_heads"),
    [
        ("ulysses=2", 6, 3), ("ulysses=2", 8, 2), ("ring=2", 6, 3), ("ulysses=3", 8, 2), ("ulysses=3", 2, 1),
        ("ring=3", 4, 1), ("ulysses=4", 24, 6), ("ulysses=4", 6, 3), ("ring=2 ulysses=2", 6, 3), ("ulysses=4", 6, 6),
    ],
)  # fmt: skip
def test_each_key_head_is_sent_once_and_attention_is_exact(pools, layout, heads, key_heads):
    ranks = ParallelLayout.parse(layout).ranks
    expected = [expected_bytes(layout, heads, key_heads, rank) for rank in range(ranks)]
    for repeats, masked in ((False, False), (True, True)):
        results = pools(ranks).run(attend, layout, heads, key_heads, repeats, masked)
        assert max(error for error, _ in results) <= 1e-5, results
        assert [sent for _, sent in results] == expected
    repeated = [expected_bytes(layout, heads, None, rank) for rank in range(ranks)]
    assert all(once <= all_heads for once, all_heads in zip(expected, repeated, strict=True))
    assert (sum(expected) < sum(repeated)) == ((key_heads < heads and heads > ranks) or "ring" in layout)
