"""Layouts: their text form, what they refuse, and the automatic layout."""

import math
import re

import pytest

from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.choice import auto
from parallel_backend.layout.parallel_layout import ParallelLayout


def test_ranks_and_text():
    layout = ParallelLayout(data=2, cfg=2, ulysses=3)
    assert layout.ranks == 12
    assert str(layout) == "data=2 cfg=2 ulysses=3"
    assert ParallelLayout.parse(str(layout)) == layout
    assert ParallelLayout.parse("") == ParallelLayout()
    assert ParallelLayout.parse(str(ParallelLayout())) == ParallelLayout()


@pytest.mark.parametrize("degree", [0, -1, 1.5, True, "2"])
def test_degrees_are_whole_numbers_from_1(degree):
    with pytest.raises(InvalidRequest, match="whole number of at least 1"):
        ParallelLayout(ulysses=degree)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("patches=4", 'raise it, as in "pipe=2 patches=4"'),
        ("stale=previous", 'raise it, as in "ring=2 stale=previous"'),
        ("ring=2 stale=often", "use previous or none"),
        ("pipe=2 ring=2 stale=none", "leave out stale=none, or pipe=2"),
        ("pipe=2 ulysses=2 shard_weights", "leave out shard_weights"),
        ("pipe=2 warmup=0", "warmup of at least 1 would work"),
        ("pipe=2 patches=-1", "whole number of at least 0"),
        ("pipe=2 tensor=2", "use ulysses or ring beside pipe"),
        ("pipe=2 balance=2", "has 1 speeds and pipe=2"),
        ("pipe=2 balance=2:fast", "numbers above 0, such as 2:1"),
        ("pipe=2 balance=2:0", "numbers from 0.001 to 1000, such as balance=2:1"),
        ("ring=2 stale=none balance=1e308:1e308", "numbers from 0.001 to 1000"),
        ("pipe=2 balance=2:nan", "numbers from 0.001 to 1000"),
        ("cfg=2 balance=2:1", "leave it out, or raise ulysses, ring, dsp, tensor, pipe or data"),
        ("cfg=2 data=2 balance=2:1:1:1", "has 4 speeds and data=2: give one for each"),
        ("data=2 balance=2:1/3:1", "leave out what follows the slash, as in balance=2:1"),
        ("balance=2", "leave it out, or raise ulysses"),
        ("cfg=2 ulysses=2 balance=2:1:1:1", "has 4 speeds and ulysses=2: give one for each"),
        ("tensor=2 ulysses=2 balance=2:1", "has 2 speeds and ulysses*tensor=4: give one for each"),
        ("ulysses=2 balance=2:1/1:1:1", "has 3 speeds and ulysses=2"),
        ("ulysses=2 balance=2:1/fast:1", "2:1/3:1 where those of attention differ"),
        ("ulysses=2 balance=2:1/0:1", "numbers from 0.001 to 1000"),
        ("pipe=2 balance=2:1/3:1", "leave out what follows the slash, as in balance=2:1"),
        ("ring=2 balance=2:1/3:1", "leave out what follows the slash, as in balance=2:1"),
        ("ring=2 ulysses=2 stale=none balance=2:1/3:1", "leave out what follows the slash"),
        ("dsp=2 ulysses=2", "leave out pipe, ring, ulysses and tensor"),
        ("dsp=2 tensor=2", "leave out pipe, ring, ulysses and tensor"),
        ("pipe=2 dsp=2", "leave out pipe, ring, ulysses and tensor"),
    ],
)
def test_options_that_do_not_fit_together(text, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        ParallelLayout.parse(text)


@pytest.mark.parametrize(
    "text", ["pipe=2 patches=3 warmup=4", "ring=3 stale=none warmup=0", "cfg=2 pipe=2", "pipe=2 balance=2:0.5"]
)
def test_options_are_parsed_as_they_are_written(text):
    layout = ParallelLayout.parse(text)
    assert str(layout) == text
    assert layout.approximate
    assert not any(word in str(layout.cut) for word in ("patches", "warmup"))
    assert (layout.cut.degrees, layout.cut.stale, layout.cut.balance) == (layout.degrees, layout.stale, layout.balance)


@pytest.mark.parametrize(
    ("text", "algorithm"),
    [
        ("ring=2", ""),
        ("pipe=2", "PipeFusion"),
        ("pipe=2 patches=1 balance=2:1", ""),
        ("ring=2 stale=previous", "displaced patch"),
        ("ring=2 stale=none", "naive patch"),
    ],
)
def test_approximate_layouts_name_their_algorithm(text, algorithm):
    layout = ParallelLayout.parse(text)
    assert (layout.approximation, layout.approximate) == (algorithm, bool(algorithm))


@pytest.mark.parametrize("text", ["speed=2", "ulysses", "ulysses=two", "ulysses="])
def test_text_that_is_not_a_layout(text):
    with pytest.raises(InvalidRequest, match="AXIS=DEGREE"):
        ParallelLayout.parse(text)


@pytest.mark.parametrize(
    ("ranks", "branches", "text"),
    [(1, 2, ""), (2, 2, "cfg=2"), (4, 2, "cfg=2 ulysses=2"), (3, 2, "ulysses=3"), (4, 1, "ulysses=4")],
)
def test_auto(ranks, branches, text):
    assert auto((ranks,), branches=branches) == ParallelLayout.parse(text)


@pytest.mark.parametrize(
    ("hosts", "branches", "rows", "text"),
    [
        ((4,), 2, 16, "cfg=2 dsp=2"),
        ((4,), 1, 16, "dsp=4"),
        ((3,), 1, 16, "dsp=3"),
        ((4,), 1, 5, "ulysses=4"),
        ((4,), 1, 1, "ulysses=4"),
        ((4,), 1, math.inf, "dsp=4"),
        ((4, 4), 2, 16, "cfg=2 dsp=4"),
        ((4, 4), 1, 16, "ring=2 ulysses=4"),
    ],
)
def test_auto_exchanges_frames_where_they_are_shared_evenly(hosts, branches, rows, text):
    assert auto(hosts, branches=branches, rows=rows) == ParallelLayout.parse(text)


@pytest.mark.parametrize(
    ("hosts", "branches", "text"),
    [
        ((4, 4), 2, "cfg=2 ulysses=4"),
        ((4, 4), 1, "ring=2 ulysses=4"),
        ((8, 8, 8, 8), 2, "cfg=2 ring=2 ulysses=8"),
        ((2, 2, 2), 2, "ring=3 ulysses=2"),
        ((4, 2), 2, "ring=3 ulysses=2"),
        ((1, 1), 2, "cfg=2"),
        ((3, 2), 1, "ring=5"),
    ],
)
def test_auto_keeps_ulysses_inside_a_host(hosts: tuple[int, ...], branches: int, text: str) -> None:
    layout = auto(hosts, branches=branches)
    assert layout == ParallelLayout.parse(text)
    host_of = [host for host, ranks in enumerate(hosts) for _ in range(ranks)]
    for rank in range(0, sum(hosts), layout.ulysses):
        assert len(set(host_of[rank : rank + layout.ulysses])) == 1
