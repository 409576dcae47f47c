"""Pieces of work that ranks take in rounds by their speeds."""

import pytest

from parallel_backend.autoencoder.turns import rounds


@pytest.mark.parametrize(
    ("count", "speeds", "expected"),
    [
        (7, (1, 1, 1), [(1, 1, 1), (1, 1, 1), (1, 0, 0)]),
        (2, (1, 1, 1), [(1, 1, 0)]),
        (8, (1, 0.5), [(2, 1), (2, 1), (2, 0)]),
        (8, (0.5, 1), [(1, 2), (1, 2), (1, 1)]),
        (1, (0.5, 1), [(0, 1)]),
        (5, (1, 1, 0.5), [(2, 2, 1)]),
        (9, (1, 0.01), [(2, 0)] * 4 + [(1, 0)]),  # what would make the others wait has none
        (3, (1,), [(1,)] * 3),
    ],
)
def test_a_faster_rank_takes_more_at_a_time(count, speeds, expected):
    assert rounds(count, speeds) == expected


@pytest.mark.parametrize("speeds", [(1, 0.45), (1, 0.9, 0.37), (0.3, 1, 1, 0.7)])
def test_ranks_together_are_nearly_as_fast_as_their_speeds(speeds):
    seconds = sum(max(taken / speed for taken, speed in zip(each, speeds, strict=True)) for each in rounds(120, speeds))
    assert seconds < 1.12 * 120 / sum(speeds)
