"""``Split``: shares in proportion to speeds, and equal ones without speeds."""

import pytest

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.partition import Partition
from parallel_backend.layout.split import Split


def split(layout):
    return Split.of(ParallelLayout.parse(layout))


@pytest.mark.parametrize("count", [0, 1, 7, 29, 4097])
@pytest.mark.parametrize("layout", ["ulysses=3", "ring=3", "dsp=3", "tensor=3", "ring=3 stale=previous", "pipe=3"])
def test_shares_are_even_without_speeds(layout, count):
    even, found = Partition.even(count, 3), split(layout)
    if found.layout.sequence == 3:
        assert found.tokens(count) == even
    if "ulysses" in layout:
        assert found.heads(count, count).queries == even
    if "dsp" in layout:
        assert found.frames(count) == even
    if "tensor" in layout:
        assert found.columns(count) == found.cut_heads(count) == even


def test_speeds_of_attention_share_heads_and_frames_and_the_others_tokens_and_columns():
    found = split("ulysses=2 balance=2:1/3:1")
    assert found.tokens(12).sizes == (8, 4)
    assert found.heads(12, 12).queries.sizes == (9, 3)
    found = split("dsp=2 balance=2:1/3:1")
    assert (found.tokens(12).sizes, found.frames(12).sizes) == ((8, 4), (9, 3))
    found = split("tensor=2 balance=2:1/3:1")
    assert (found.columns(12).sizes, found.cut_heads(12).sizes) == ((8, 4), (9, 3))
    assert [found.cut_share(place) for place in range(2)] == [2 / 3, 1 / 3]


def test_groups_of_data_share_samples():
    found = split("cfg=2 data=3 balance=2:1:1")
    assert [found.samples(count).sizes for count in (1, 3, 8)] == [(1, 0, 0), (1, 1, 1), (4, 2, 2)]
    assert found.speeds == (2, 2, 1, 1, 1, 1)
    assert [split("data=2 balance=1:4").samples(count).sizes for count in (0, 1, 2, 5)] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (1, 4),
    ]
    assert found.tokens(7).sizes == (7,)
    assert found.note == "less than an even share of 33% for ranks 2 and 3 and 4 and 5: 25%, by balance"
    for layout in ("data=3", "data=3 ulysses=2 balance=2:1"):
        assert split(layout).samples(7) == Partition.even(7, 3)


def test_a_grid_shares_by_the_product_of_its_axes_where_speeds_allow():
    found = split("ring=2 ulysses=2 balance=4:2:2:1")
    assert found.tokens(9).sizes == (4, 2, 2, 1)
    assert found.heads(9, 9).queries.sizes == (6, 3)
    found = split("ulysses=2 tensor=2 balance=4:2:2:1")
    assert found.tokens(9).sizes == (6, 3)
    assert found.columns(9).sizes == found.cut_heads(9).sizes == (6, 3)
    assert found.heads(6, 6).queries.sizes == (4, 2)


def test_the_slowest_rank_of_a_grid_decides_for_its_row_and_column():
    """Heads are the same all around a ring, and columns those of all tokens. Even shares take until 500 and 500,000."""
    found, speeds = split("ring=2 ulysses=2 balance=1:1:1:0.5"), (1, 1, 1, 0.5)
    tokens, heads = found.tokens(1000).sizes, found.heads(1000, 1000).queries.sizes
    blocks = sum(tokens[:2]), sum(tokens[2:])
    assert max(size / speed for size, speed in zip(tokens, speeds, strict=True)) < 290
    assert max(blocks[i // 2] * heads[i % 2] / speeds[i] for i in range(4)) < 350_000
    found = split("ulysses=2 tensor=2 balance=1:1:1:0.5")
    tokens, columns = found.tokens(1000).sizes, found.columns(1000).sizes
    assert max(tokens[i // 2] * columns[i % 2] / speeds[i] for i in range(4)) < 350_000


def test_stages_patches_and_groups_of_branches_keep_equal_tokens_within():
    assert split("pipe=2 ulysses=2 balance=3:1").tokens(8).sizes == (4, 4)
    assert split("pipe=2 balance=3:1").stages == (3, 1)
    assert split("pipe=2").stages == (1, 1)
    stale = split("ring=2 ulysses=2 stale=previous balance=3:1")
    assert stale.tokens(8).sizes == (3, 3, 1, 1)
    assert stale.heads(8, 8).queries.sizes == (4, 4)
    assert split("cfg=2 ulysses=2 balance=3:1").tokens(8).sizes == (6, 2)


@pytest.mark.parametrize(
    ("layout", "ranks", "rows"),
    [
        ("ulysses=2 balance=2:1", 2, (6, 3)),
        ("cfg=2 ulysses=2 balance=2:1", 4, (3, 1, 3, 2)),
        ("cfg=2 ulysses=2 balance=2:1", 3, (4, 2, 3)),
        ("pipe=2 balance=2:1", 2, (6, 3)),
        ("ring=2 ulysses=2 stale=none balance=2:1", 4, (3, 3, 2, 1)),
        ("tensor=2 ulysses=2 balance=1000:1:1:1", 4, (6, 1, 1, 1)),
        ("cfg=2", 2, (5, 4)),
    ],
)  # fmt: skip
def test_rows_of_a_picture_follow_the_speed_of_each_rank(layout, ranks, rows):
    assert sorted(split(layout).rows(9, ranks).sizes, reverse=True) == sorted(rows, reverse=True)
    assert split(layout).rows(9, ranks).total == 9


def test_each_rank_of_tensor_has_a_head_and_a_column():
    found = split("tensor=3 balance=1000:1000:1")
    assert found.cut_heads(3).sizes == (1, 1, 1)
    assert found.columns(64).sizes == (31, 32, 1)


def test_measured_speeds_balance_what_adapts_to_them():
    speeds = (1.0, 0.5, 0.8, 0.9)
    adapted = ParallelLayout.parse("pipe=2 ulysses=2").at(speeds)
    assert adapted.balance == (0.5, 0.8)
    assert ParallelLayout.parse("ring=2 ulysses=2 stale=none").at(speeds).balance == (0.5, 0.8)
    for same in ("ulysses=4", "pipe=2 balance=3:1", "tensor=4"):
        assert ParallelLayout.parse(same).at(speeds) == ParallelLayout.parse(same)
    assert ParallelLayout(pipe=2).at((0.7, 0.7)) == ParallelLayout(pipe=2).at(()) == ParallelLayout(pipe=2)


def test_a_layout_has_one_split():
    assert split("ring=2 balance=2:1") is split("ring=2 balance=2:1")
    assert str(split("ulysses=2 balance=2:1/3:1").layout) == "ulysses=2 balance=2:1/3:1"


@pytest.mark.parametrize(
    ("layout", "note"),
    [
        ("ring=3 balance=1:1:0.5", "less than an even share of 33% for rank 2: 20%, by balance"),
        ("cfg=2 ulysses=2 balance=3:1", "less than an even share of 50% for ranks 1 and 3: 25%, by balance"),
        ("ulysses=2 tensor=2 balance=4:2:2:1",
         "less than an even share of 25% for ranks 1 and 2: 22%, rank 3: 11%, by balance"),
        ("ring=2 stale=none balance=1:3", "less than an even share of 50% for rank 0: 25%, by balance"),
        ("ulysses=2 balance=2:2", ""),
        ("cfg=2 ulysses=2", ""),
        ("pipe=2 balance=2:1", ""),
    ],
)  # fmt: skip
def test_it_says_who_gets_less_than_an_even_share(layout, note):
    assert split(layout).note == note
