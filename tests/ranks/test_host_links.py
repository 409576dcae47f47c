"""What goes from host to host is measured and counted."""

import re

import pytest

from parallel_backend.machines.ranks.crossing import HostMap
from tests.ranks import driver, requests
from tests.ranks.conftest import Pools
from tests.ranks.requests import Case

THREE = ("", "b", "b")


def test_neighbouring_hosts_measure_their_link(pools: Pools) -> None:
    first, second, third = pools(3).run(driver.link, ("", "b", "c"))
    assert first is None
    assert (second.host, third.host) == ("", "b")
    for link in (second, third):
        assert 0 < link.latency < 0.1
        assert 1e6 < link.bandwidth < 1e12
    assert [link and link.host for link in pools(3).run(driver.link, THREE)] == [None, "", None]
    assert pools(3).run(driver.link, ("", "", "")) == [None] * 3


@pytest.mark.parametrize(
    ("layout", "hosts", "what"),
    [
        ("ulysses=3", THREE, "ulysses=3"),
        ("tensor=3", THREE, "tensor=3"),
        ("ring=3 shard_weights", THREE, "shard_weights"),
        ("ring=4 shard_weights", ("", "", "b", "b"), "shard_weights"),
        ("cfg=2 ulysses=2", ("", "", "", "b"), "ulysses=2"),
    ],
)
def test_a_layout_that_crosses_badly_says_what_it_sends(pools: Pools, checkpoints, layout, hosts, what) -> None:
    pool, ranks = pools(len(hosts)), len(hosts)
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3), layout, ranks=ranks), Case())
    pool.run(driver.place_ranks, HostMap(names=hosts, bandwidth=2e6))
    answers = pool.run(driver.handle, message, tensors)
    pool.run(driver.place_ranks, HostMap())
    notes = [progress.note for progress, _ in answers[0]["reports"] if progress.phase == "sampling"]
    assert notes[0] == "", "the first step loads the weights"
    assert notes[1] == notes[2]
    found = re.fullmatch(
        rf"{what} across hosts sends about ([0-9.]+) MB between them in a step, ([0-9.]+) s at 2 MB/s; without a "
        "layout, only CFG or a ring crosses",
        notes[1],
    )
    assert found, notes[1]
    all_bytes = sum(sent(pools, checkpoints, layout, ranks)) / 3 / 1e6
    # Around a ring, two hops cross; of all pairs of ranks, two thirds have two hosts. A step may do both.
    assert 2 / ranks * all_bytes - 0.05 <= float(found[1]) <= 2 / 3 * all_bytes + 0.05
    assert float(found[2]) == pytest.approx(float(found[1]) / 2, abs=0.03)


def test_forwards_that_cross_badly_say_it_in_the_log(pools: Pools, checkpoints) -> None:
    message, tensors = requests.forward(requests.spec(checkpoints(heads=3), "ulysses=3", ranks=3), Case())
    pools(3).run(driver.place_ranks, HostMap(names=THREE, bandwidth=2e6))
    notes = []
    for _ in range(3):
        assert pools(3).run(driver.handle, message, tensors)[0]["error"] is None
        notes.append(pools(3).run(driver.forward_notes))
    pools(3).run(driver.place_ranks, HostMap())
    assert notes[0] == [[""], [], []]
    assert notes[1] == notes[2]
    assert re.match(r"ulysses=3 across hosts sends about [0-9.]+ MB between them in a forward, ", notes[1][0][0])


def sent(pools: Pools, checkpoints, layout: str, ranks: int) -> list[int]:
    """Bytes that each rank sends in three steps."""
    model = requests.spec(checkpoints(heads=3), layout, ranks=ranks)
    message, tensors = requests.sample(model, Case(), measure="bytes")
    answers = pools(ranks).run(driver.handle, message, tensors)
    return answers[0]["tensors"]["sent_bytes"].tolist()


@pytest.mark.parametrize("layout", ["ring=3", "data=3", "pipe=2"])
def test_layouts_that_cross_well_say_nothing(pools: Pools, checkpoints, layout: str) -> None:
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3), layout, ranks=3), Case(batch=3))
    pools(3).run(driver.place_ranks, HostMap(names=THREE, bandwidth=2e6))
    answers = pools(3).run(driver.handle, message, tensors)
    pools(3).run(driver.place_ranks, HostMap())
    assert answers[0]["error"] is None
    assert {progress.note for progress, _ in answers[0]["reports"]} == {""}
