"""Exchanges over links: who sends to whom, and which link is the slowest."""

from dataclasses import replace

import pytest

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner.communication import PATTERNS, exchanged, members
from parallel_backend.planner.hardware.description import Device, Hardware, Link
from parallel_backend.planner.models import find
from parallel_backend.planner.request import prompt
from parallel_backend.strategies import STRATEGIES
from parallel_backend.strategies.batch import BatchSplit
from parallel_backend.strategies.ring import Ring
from parallel_backend.strategies.sequence import SequenceSplit
from parallel_backend.strategies.sharded_weights import ShardedWeights
from parallel_backend.strategies.tensor import TensorParallel
from parallel_backend.strategies.ulysses import Ulysses

DEVICE = Device(name="card", matrix=1e14, attention=1e14, memory=1e11, bandwidth=1e12)
FAST, SLOW = 1e11, 1e9


def machine(*links: Link) -> Hardware:
    whole = Link(devices=(0, 1, 2, 3), bandwidth=SLOW, latency=1e-5)
    return Hardware(name="four", devices=(DEVICE,) * 4, links=(whole, *links))


@pytest.fixture(scope="module")
def wan():
    return prompt(find("wan2.1-t2v-1.3b"), "256x256x5", guided=True)


def test_every_strategy_has_a_pattern():
    assert {type(strategy) for strategy in STRATEGIES} == set(PATTERNS)


def test_members_of_axes():
    layout = ParallelLayout(cfg=2, ring=2, ulysses=2)
    assert members(layout, 5, "ulysses") == [4, 5]
    assert members(layout, 5, "ring") == [5, 7]
    assert members(layout, 5, "cfg") == [1, 5]
    assert members(layout, 5, "sequence") == [4, 5, 6, 7]


def sent(layout: ParallelLayout, wan, hardware: Hardware):
    return exchanged(layout, wan.plan(layout).workload(2, wan.layers(1).parameters), hardware)


def test_seconds_are_bytes_over_the_link(wan):
    found = sent(ParallelLayout(ulysses=4), wan, machine())[Ulysses]
    assert found.nbytes > 0
    assert found.seconds == pytest.approx(found.nbytes / SLOW)
    assert found.latency == 1e-5


def test_a_faster_link_of_two_carries_what_they_exchange(wan):
    pairs = [Link(devices=pair, bandwidth=FAST, latency=1e-6) for pair in ((0, 1), (2, 3))]
    layout = ParallelLayout(cfg=2, ulysses=2)
    found = sent(layout, wan, machine(*pairs))
    assert found[Ulysses].seconds == pytest.approx(found[Ulysses].nbytes / FAST)
    assert found[BatchSplit].seconds == pytest.approx(found[BatchSplit].nbytes / SLOW)


def test_a_measured_group_carries_all_that_it_exchanges(wan):
    """And not a faster pair its part of it."""
    pairs = [Link(devices=pair, bandwidth=FAST, latency=1e-6, together=True) for pair in ((0, 1), (2, 3))]
    group = Link(devices=(0, 1, 2, 3), bandwidth=2 * SLOW, latency=1e-4, together=True)
    hardware = Hardware(name="four", devices=(DEVICE,) * 4, links=(*pairs, group))
    found = sent(ParallelLayout(ulysses=4), wan, hardware)[Ulysses]
    assert (found.seconds, found.latency) == (pytest.approx(found.nbytes / (2 * SLOW)), 1e-4)
    found = sent(ParallelLayout(cfg=2, ulysses=2), wan, hardware)[Ulysses]
    assert (found.seconds, found.latency) == (pytest.approx(found.nbytes / FAST), 1e-6)


@pytest.mark.parametrize(
    ("layout", "strategy", "around"),
    [
        (ParallelLayout(ulysses=4), Ulysses, False), (ParallelLayout(ulysses=4), SequenceSplit, False),
        (ParallelLayout(ring=4), Ring, True), (ParallelLayout(tensor=4), TensorParallel, True),
        (ParallelLayout(ring=4, shard_weights=True), ShardedWeights, True),
    ],
)  # fmt: skip
def test_what_goes_around_is_measured_apart(wan, layout, strategy, around):
    """Over two sockets, most of what all send to each other crosses the bridge, and a ring crosses it once."""
    group = Link(devices=(0, 1, 2, 3), bandwidth=SLOW, latency=1e-5, together=True, around=3 * SLOW)
    cards = Hardware(name="four", devices=(DEVICE,) * 4, links=(group,))
    found = sent(layout, wan, cards)[strategy]
    assert found.nbytes > 0
    assert found.seconds == pytest.approx(found.nbytes / (3 * SLOW if around else SLOW))
    cores = sent(layout, wan, replace(cards, launch=0.0))[strategy]
    direct = not around or strategy is ShardedWeights
    assert cores.seconds == pytest.approx(cores.nbytes / (SLOW if direct else 3 * SLOW))


def test_a_ring_over_two_hosts_is_as_slow_as_its_slowest_link(wan):
    pairs = [Link(devices=pair, bandwidth=FAST, latency=1e-6) for pair in ((0, 1), (2, 3))]
    found = sent(ParallelLayout(ring=4), wan, machine(*pairs))[Ring]
    assert found.seconds == pytest.approx(found.nbytes / SLOW)


def test_what_all_devices_send_shares_a_total(wan):
    card = Link(devices=(0, 1, 2, 3), bandwidth=FAST, latency=1e-5, total=SLOW)
    hardware = Hardware(name="four", devices=(DEVICE,) * 4, links=(card,))
    found = sent(ParallelLayout(ulysses=4), wan, hardware)[Ulysses]
    assert found.seconds == pytest.approx(4 * found.nbytes / SLOW, rel=0.05)


def test_one_rank_sends_nothing(wan):
    assert all(each.seconds == 0 for each in sent(ParallelLayout(), wan, machine()).values())
