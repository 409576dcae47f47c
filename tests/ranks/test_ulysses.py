"""Ulysses' exchange in one operation (NCCL) or by halves of the heads gives what its exchange in parts gives (gloo)."""

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from parallel_backend.attention.kernels import Sdpa
from parallel_backend.denoiser import attention_chain
from parallel_backend.distributed import trials
from parallel_backend.distributed.collectives import start_all_to_all
from parallel_backend.distributed.sent_bytes import SentBytes
from parallel_backend.layout.partition import Partition
from parallel_backend.strategies import ulysses
from parallel_backend.strategies.token_split import TokenSplit
from parallel_backend.strategies.ulysses import UlyssesAttention
from tests.ranks import driver


def decided(halved):
    """Trials that have been decided."""
    return SimpleNamespace(of=lambda *_: SimpleNamespace(second=halved))


def attended(rank, heads, tokens, batch, key_heads=None):
    """Attend with both exchanges, whole and by halves; return the results, and the bytes that each sent."""
    mesh, found = driver.mesh(rank, f"ulysses={len(tokens)}"), []
    axis = mesh.axes["ulysses"]
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
        attend = UlyssesAttention(replace(axis, gloo=gloo), Partition(tokens), mesh.split, inner, decided(halved))
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


def tried_on_a_grid(rank, tokens):
    """Attend until a way is taken, where halves are faster on ranks 0 and 1 alone; return the way and the error."""
    mesh, tried = driver.mesh(rank, "ring=2 ulysses=2"), trials.Trials()
    split, place = TokenSplit.even({"image": tokens}, mesh.sequence), Partition.even(tokens, 4).slice(rank)
    attend = attention_chain.attention(mesh, split, ["image"], {}, Sdpa(), tried)
    qkv = torch.randn(3, 1, 4, tokens, 8, generator=torch.Generator().manual_seed(0))
    expected, error = torch.nn.functional.scaled_dot_product_attention(*qkv)[:, :, place], 0.0
    of_halves = 0.5 if rank < 2 else 2.0
    spans = (mock.Mock(seconds=lambda each=each: each) for each in cycle([1.0, of_halves, of_halves, 1.0]))  # by turn
    with mock.patch.object(trials, "_Span", side_effect=spans):
        for _ in range(2 * trials.TURNS + 2):
            out = attend(*(each[:, :, place].clone() for each in qkv), scale=None, sample=None)
            error = max(error, float((out - expected).abs().max()))
    return [trial.second for trial in tried._trials.values()], error


def test_ranks_of_a_ring_that_exchange_heads_apart_go_the_same_way(pools):
    """Were the ways of two groups to differ, one would send the other parts of keys where it expects whole ones."""
    for ways, error in pools(4).run(tried_on_a_grid, 33):
        assert ways == [False]
        assert error < 1e-5


def kept_during_attention(rank, tokens):
    """Whether the packed queries, keys and values that a rank sends take memory while it attends."""
    mesh, sent = driver.mesh(rank, "ulysses=2"), []

    def start(values, *others):
        sent.append(StorageWeakRef(values.untyped_storage()))
        return start_all_to_all(values, *others)

    def inner(query, key, value, *, scale, sample):
        alive.append(not sent[0].expired())
        return query

    alive: list[bool] = []
    attend = UlyssesAttention(mesh.axes["ulysses"], Partition.even(tokens, 2), mesh.split, inner)
    local = Partition.even(tokens, 2).sizes[rank]
    with mock.patch.object(ulysses, "start_all_to_all", start):
        attend(*(torch.zeros(1, 4, local, 8) for _ in range(3)), scale=None, sample=None)
    return alive


def test_what_was_sent_takes_no_memory_during_attention(pools):
    assert pools(2).run(kept_during_attention, 9) == [[False], [False]]
