"""Tensor parallelism keeps query heads that share a key head on one rank."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.distributed.mesh import Axis
from parallel_backend.errors import InvalidRequest
from parallel_backend.interfaces.geometry import IMAGE, AllReduce, AttentionKind, Extent, Geometry
from parallel_backend.interfaces.strategy import Workload
from parallel_backend.interfaces.tensor_cuts import attention_cuts
from parallel_backend.layout.head_split import HeadSplit
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.split import Split
from parallel_backend.strategies import tensor
from parallel_backend.strategies.ring import Ring
from parallel_backend.strategies.ulysses import Ulysses

HEADS, KEY_HEADS, HEAD_DIM, WIDTH = 6, 3, 4, 10


class Attention(nn.Module):
    """Attention as diffusers writes it: the module repeats keys and values, and calls attention with equal heads."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.to_q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.to_k, self.to_v = (nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(HEADS * HEAD_DIM, WIDTH)])

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v)
        )
        assert query.shape[1] == self.heads
        key, value = (each.repeat_interleave(self.heads // each.shape[1], dim=1) for each in (key, value))
        return self.to_out[0](F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return self.attn(x)


def part(whole, ranks, index):
    """What one of the ranks holds of a transformer."""
    with torch.device("meta"):
        module = Transformer()
    axis = Axis(name="tensor", ranks=tuple(range(ranks)), index=index, group=None, gloo=True)
    cuts = attention_cuts("attn", HEADS, HEAD_DIM, key_heads=KEY_HEADS)
    slices = tensor.cut(module, cuts, axis, Split.of(ParallelLayout(tensor=ranks)), {KEY_HEADS})
    weights = {}
    for name, weight in whole.state_dict().items():
        dim, parts = slices.get(name, (0, (slice(None),)))
        pieces = [weight[(slice(None),) * dim + (each,)] for each in parts]
        weights[name] = torch.cat(pieces, dim) if pieces else torch.zeros_like(weight)
    module.load_state_dict(weights, assign=True)
    return module


@pytest.mark.parametrize(("ranks", "heads"), [(2, [4, 2]), (3, [2, 2, 2])])
@torch.no_grad()
def test_the_ranks_compute_the_whole_attention(ranks, heads):
    torch.manual_seed(0)
    whole, x = Transformer(), torch.randn(2, 7, WIDTH)
    parts = [part(whole, ranks, index) for index in range(ranks)]
    assert [each.attn.heads for each in parts] == heads
    with mock.patch("parallel_backend.operators._sum") as summed:
        total = sum(each(x) for each in parts)
    assert summed.call_count == ranks
    wanted = whole(x)
    assert (total - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def workload(key_heads):
    site = AttentionKind(streams=(IMAGE,), heads=24, head_dim=5, count=2, key_heads=key_heads)
    geometry = Geometry(
        channels=4, out_channels=4, patch=(2, 2), layers=2, sites=(site,),
        all_reduces=(AllReduce(tokens=IMAGE, width=120, count=2),),
    )  # fmt: skip
    extent = Extent(streams={IMAGE: 10}, values=16)
    return Workload(branches=((2, extent),), alike=("",), geometry=geometry, itemsize=4, guided=False)


def heads(layout, key_heads):
    """Each rank's heads outside and inside Ulysses' attention."""
    wanted = workload(key_heads)
    (site,) = wanted.geometry.sites
    found = []
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        split = wanted.heads(layout, site, place)
        found.append((split.queries.total, split.queries.sizes[place["ulysses"]]))
    return found


def test_ranks_have_whole_groups_of_heads():
    three = ParallelLayout(tensor=3)
    assert heads(three, 8) == [(9, 9), (9, 9), (6, 6)]
    assert heads(three, None) == [(8, 8)] * 3
    assert heads(ParallelLayout(tensor=3, ulysses=2), 8) == [(9, 5), (9, 5), (6, 3), (9, 4), (9, 4), (6, 3)]


def test_bytes_follow_the_ranks_heads():
    each = 2 * 2 * 5 * 4  # samples, layers, features of a head, bytes of a value
    layout = ParallelLayout(tensor=3, ulysses=2)
    sent = [Ulysses().bytes_sent(layout, workload(8), rank) for rank in range(6)]
    # 5 tokens' q for the other rank's heads, k and v of the key heads that these need (3 query heads share one), and
    # the own heads' results for the other rank's 5 tokens
    five_heads, four_heads, three_heads = 5 * (4 + 2 * 2) + 5 * 5, 5 * (5 + 2 * 2) + 5 * 4, 5 * (3 + 2 * 1) + 5 * 3
    wanted = [five_heads, five_heads, three_heads, four_heads, four_heads, three_heads]
    assert sent == [each * values for values in wanted]
    layout = ParallelLayout(tensor=3, ring=2)
    sent = [Ring().bytes_sent(layout, workload(8), rank) for rank in range(6)]
    assert sent == [each * 2 * 5 * count for count in (3, 3, 2, 3, 3, 2)]


def test_each_rank_needs_a_key_head():
    parallel = tensor.TensorParallel()
    parallel.check(ParallelLayout(tensor=8), workload(8))
    with pytest.raises(InvalidRequest, match=r"tensor=9: this model has 8 key heads .* so tensor is at most 8"):
        parallel.check(ParallelLayout(tensor=9), workload(8))
    parallel.check(ParallelLayout(tensor=24), workload(None))
    with pytest.raises(InvalidRequest, match=r"tensor=25: this model has 24 attention heads"):
        parallel.check(ParallelLayout(tensor=25), workload(None))


@pytest.mark.parametrize(
    ("sizes", "ranks", "keys", "repeats"),
    [
        ((6, 3), 2, [(0, 2), (1, 3)], [[2, 1], [1, 2]]),
        ((6, 3), 3, [(0, 1), (1, 2), (2, 3)], [[1], [1], [1]]),
        ((6, 3), 4, [(0, 1), (1, 2), (2, 3), (2, 3)], [[1]] * 4),
        ((24, 6), 4, [(0, 2), (1, 3), (3, 5), (4, 6)], [[2, 1], [1, 2]] * 2),
        ((8, 2), 3, [(0, 1), (0, 2), (1, 2)], [[1], [1, 2], [1]]),
        ((4, 4), 3, [(0, 2), (2, 3), (3, 4)], [[1, 1], [1], [1]]),
        ((2, 1), 3, [(0, 1), (0, 1), (1, 1)], [[1], [1], []]),
    ],
)
def test_ulysses_sends_the_key_heads_that_a_rank_needs(sizes, ranks, keys, repeats):
    heads, key_heads = sizes
    split = HeadSplit.even(heads, key_heads, ranks)
    assert [(split.keys(rank).start, split.keys(rank).stop) for rank in range(ranks)] == keys
    assert split.repeats == repeats


@pytest.mark.parametrize(
    ("heads", "ranks", "halves"), [(6, 2, ([2, 2], [1, 1])), (7, 3, ([2, 1, 1], [1, 1, 1])), (1, 2, ([1, 0], [0, 0]))]
)
def test_halves_of_the_heads_are_those_of_each_rank(heads, ranks, halves):
    split = HeadSplit.even(heads, heads, ranks)
    parts = split.halves
    assert tuple(part.sizes for part in parts) == halves
    found = [
        list(range(heads))[run.heads][rank * (run.heads.stop - run.heads.start) // run.ranks :][run.taken]
        for part in parts
        for run in part.runs
        for rank in range(run.ranks)
    ]
    assert sorted(head for each in found for head in each) == list(range(heads))
    assert [sum(part.counts[rank][0] for part in parts) for rank in range(ranks)] == list(split.queries.sizes)
