"""Attention of queries that every rank holds whole to keys that are split: exact, alike on all ranks, and its bytes."""

import pytest
import torch
import torch.nn.functional as F

from parallel_backend.attention.kernels import KERNELS
from parallel_backend.denoiser import attention_chain
from parallel_backend.distributed.sent_bytes import SentBytes
from parallel_backend.interfaces.geometry import AUDIO, IMAGE, AllReduce, AttentionKind, Extent, Geometry
from parallel_backend.interfaces.state import State
from parallel_backend.interfaces.strategy import Workload
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.strategies import STRATEGIES
from parallel_backend.strategies.ring import Ring
from parallel_backend.strategies.token_split import TokenSplit
from parallel_backend.strategies.ulysses import Ulysses
from parallel_backend.strategies.whole_queries import WholeQueries
from tests.ranks import driver

BATCH, HEADS, SIZE, QUERIES = 2, 3, 8, 7
LAYOUTS = ("ulysses=2", "ring=2", "ulysses=3", "ring=3", "ring=2 ulysses=2")


def attend(rank, layout, keys, dtype, masked):
    """Return a rank's result, the expected one, and the bytes that it sent."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        3 * torch.randn(BATCH, HEADS, count, SIZE, generator=generator).to(dtype) for count in (QUERIES, keys, keys)
    )
    mesh = driver.mesh(rank, layout)
    split = TokenSplit.even({IMAGE: keys, AUDIO: QUERIES}, mesh.sequence, {AUDIO})
    mask = torch.rand(BATCH, keys, generator=generator) < 0.5
    mask[:, -1] = True  # the last alone, for a sample: other ranks have no key for it
    mask[0, :-1] = False
    chain = attention_chain.whole_queries(mesh, split, (IMAGE,), {IMAGE: mask} if masked else {}, KERNELS["sdpa"])
    (part,) = split.streams[IMAGE].of(rank)
    padding = torch.full((BATCH, HEADS, part.start == part.stop, SIZE), 100.0, dtype=dtype)
    local = [torch.cat([each[:, :, part], padding], dim=2) for each in (k, v)]
    with torch.inference_mode(), SentBytes() as sent:
        out = chain(q, *local, scale=None, sample=None)
    allowed = mask[:, None, None] if masked else None
    return out, F.scaled_dot_product_attention(q.double(), k.double(), v.double(), allowed), sent.total


def formula(layout, keys, itemsize, rank):
    site = AttentionKind(streams=(IMAGE,), queries=(AUDIO,), heads=HEADS, head_dim=SIZE, count=1)
    geometry = Geometry(
        channels=4, out_channels=4, patch=(2, 2), layers=1, sites=(site,),
        all_reduces=(AllReduce(tokens=IMAGE, width=HEADS * SIZE, count=1),),
    )  # fmt: skip
    extent = Extent(streams={IMAGE: keys, AUDIO: QUERIES}, values=16, whole=frozenset({AUDIO}))
    workload = Workload(branches=((BATCH, extent),), alike=("",), geometry=geometry, itemsize=itemsize, guided=False)
    parsed = ParallelLayout.parse(layout)
    assert Ulysses().bytes_sent(parsed, workload, rank) == Ring().bytes_sent(parsed, workload, rank) == 0
    return WholeQueries().bytes_sent(parsed, workload, rank)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.daily(7)
def test_it_is_exact_and_alike_on_all_ranks(pools, layout, dtype, tolerance, masked):
    ranks = ParallelLayout.parse(layout).ranks
    for keys in (17, 4, 1):  # with 1, all other ranks have none
        results = pools(ranks).run(attend, layout, keys, dtype, masked)
        for out, expected, _ in results:
            assert out.dtype == dtype
            assert float((out.double() - expected).abs().max()) <= tolerance
            assert torch.equal(out, results[0][0])
        assert [sent for *_, sent in results] == [formula(layout, keys, dtype.itemsize, i) for i in range(ranks)]


def test_it_is_counted():
    assert any(isinstance(strategy, WholeQueries) for strategy in STRATEGIES)


def split_and_gathered(rank, ranks):
    """Return what a rank holds of each stream inside the blocks and before ``head``, and the gathered prediction."""
    lengths = {IMAGE: 10, AUDIO: 7}
    split = TokenSplit.even(lengths, driver.mesh(rank, f"ulysses={ranks}").sequence, {AUDIO})
    streams = {
        name: start + torch.arange(float(length))[None, :, None]
        for start, (name, length) in zip((0, 100), lengths.items(), strict=True)
    }
    state = State(streams=streams, tables={name: {"again": tokens} for name, tokens in streams.items()})
    inside = split.shard(state)
    before_head = split.shard_whole(inside)
    for each in (inside, before_head):
        assert all(torch.equal(each.streams[name], each.tables[name]["again"]) for name in lengths)
    assert {name: split.held(name) for name in lengths} == {n: t.shape[1] for n, t in inside.streams.items()}
    local = torch.cat([before_head.streams[name] for name in (AUDIO, IMAGE)], dim=1)
    return (
        inside.streams[AUDIO].shape[1], before_head.streams[AUDIO].shape[1], split.unshard(local, (AUDIO, IMAGE))
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_predicted_streams_are_gathered_one_after_another(pools, ranks):
    results = pools(ranks).run(split_and_gathered, ranks)
    assert [held for held, _, _ in results] == [7] * ranks
    assert sum(share for _, share, _ in results) == 7
    wanted = torch.cat([100 + torch.arange(7.0), torch.arange(10.0)])
    assert all(torch.equal(gathered[0, :, 0], wanted) for *_, gathered in results)
