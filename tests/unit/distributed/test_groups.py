"""Which process groups a layout needs, and for how many a rank has room. There is no GPU here: its memory is a fake."""

import resource
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_backend.distributed import groups
from parallel_backend.distributed.groups import GroupKey, GroupPool
from parallel_backend.distributed.mesh import groups_of
from parallel_backend.layout.parallel_layout import ParallelLayout

MB = 10**6
COST, TOTAL = 400 * MB, 80_000 * MB
PAIR = GroupKey(ranks=(0, 1))


@dataclass
class Card:
    """A GPU on which each group takes ``costs``, in turn, and then as much as the last one."""

    free: int = TOTAL
    costs: list[int] = field(default_factory=lambda: [COST])
    options: list[Any] = field(default_factory=list)

    def new_group(self, ranks: list[int], timeout: timedelta, pg_options: Any) -> Any:
        self.options.append(pg_options)
        self.free -= self.costs[0] if 0 in ranks else 0
        self.costs = self.costs[1:] or self.costs
        return tuple(ranks) if 0 in ranks else None

    def destroy(self, group: Any) -> None:
        self.free += COST


@pytest.fixture
def card(monkeypatch):
    """A fake GPU of rank 0."""
    fake = Card()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (fake.free, TOTAL))
    monkeypatch.setattr(dist, "new_group", fake.new_group)
    monkeypatch.setattr(dist, "destroy_process_group", fake.destroy)
    monkeypatch.setattr(dist, "get_backend", lambda _: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(groups, "connect", lambda _: None)
    return fake


def pool(world_size: int = 4) -> GroupPool:
    return GroupPool(0, world_size, torch.device("cuda", 0), timedelta(seconds=1))


def make(made: GroupPool, *keys: GroupKey) -> None:
    made.make(made.hold(keys))


@pytest.mark.parametrize(
    ("layout", "mine", "all_groups"),
    [
        ("one rank", 0, 0), ("ulysses=4", 0, 0), ("ring=4", 0, 0), ("cfg=4", 0, 0), ("tensor=4", 0, 0),
        ("ulysses=2", 1, 1), ("ring=3", 1, 1), ("cfg=2 ulysses=2", 2, 4), ("ring=2 ulysses=2", 2, 4),
        ("ulysses=4 shard_weights", 1, 1), ("ulysses=2 shard_weights", 2, 2), ("ring=2 ulysses=2 shard_weights", 3, 5),
        ("cfg=2 ulysses=2 shard_weights", 3, 6), ("pipe=2", 3, 3), ("pipe=4", 3, 3), ("cfg=2 pipe=2", 3, 6),
        ("pipe=2 ulysses=2", 3, 6),
        ("ring=4 stale=previous", 1, 1), ("ring=4 stale=none", 0, 0), ("ring=2 ulysses=2 stale=previous", 3, 6),
    ],
)  # fmt: skip
def test_a_layout_needs_few_groups(layout, mine, all_groups):
    """Beside the one of all 4 ranks: on rank 0, and on any rank."""
    keys = [key for key in groups_of(ParallelLayout.parse(layout)) if key.purpose or len(key.ranks) < 4]
    assert (sum(0 in key.ranks for key in keys), len(keys)) == (mine, all_groups)


def test_the_last_user_frees_a_group_and_none_frees_the_one_of_all_ranks(card):
    made, world = pool(), GroupKey(ranks=(0, 1, 2, 3))
    make(made, PAIR, world)
    assert card.free == TOTAL - COST
    assert made.hold([PAIR]) == []
    made.release([PAIR, world])
    assert card.free == TOTAL - COST
    assert made.group(PAIR) is not None
    made.release([PAIR])
    assert card.free == TOTAL


@pytest.mark.parametrize(("backend", "limits"), [("cpu:gloo,cuda:nccl", [4, 4, 4, None]), ("gloo", [None] * 4)])
def test_only_receives_that_wait_have_few_channels(card, monkeypatch, backend, limits):
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None)))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)  # which a torch without CUDA does not have
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    make(pool(), *groups_of(ParallelLayout(pipe=4)), PAIR)
    assert [options and options.config.max_ctas for options in card.options] == limits


def test_an_idle_rank_counts_groups_too(card):
    made, others = pool(), GroupKey(ranks=(2, 3))
    make(made, others)
    assert made.group(others) is None
    assert made.hold([others]) == []
    assert [made.fit(affordable) for affordable in ([0, 0, 1, 1], [9, 9, 1, 0])] == [True, False]


def test_groups_take_a_twentieth_of_a_card_at_most(card):
    made = pool()
    make(made, PAIR)
    assert made.affordable() == TOTAL // 20 // COST == 10


def test_groups_take_half_of_what_is_free_at_most(card):
    made = pool()
    make(made, PAIR, GroupKey(ranks=(0, 2)))
    card.free = 5 * COST
    assert made.affordable() == 2 + 2
    card.free = COST
    assert made.affordable() == 2


def test_the_largest_group_counts(card):
    card.costs = [COST // 4, COST, COST // 4]
    made = pool()
    make(made, *(GroupKey(ranks=(0, other)) for other in (1, 2, 3)))
    assert made.affordable() == TOTAL // 20 // COST


def test_descriptors_limit_groups_unless_they_are_unlimited(card, monkeypatch):
    card.costs = [0]
    made = pool()
    monkeypatch.setattr(groups, "_open_descriptors", iter([10, 15, 700, 800]).__next__)
    make(made, PAIR)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    assert [made.affordable(), made.affordable()] == [1 + 10, 1 - 10]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert made.affordable() > 10**6
