"""``bench unequal``: what it refuses before it starts anything, and what counts as a failure."""

import argparse
import re

import pytest

from lab.bench import unequal
from parallel_backend.errors import InvalidRequest


def options(*words):
    parser = argparse.ArgumentParser()
    unequal.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "1"), "--ranks 1: at least 2 is needed"),
        (("--factor", "0.5"), "--factor 0.5: at least 1 is needed"),
        (("--all-slower", "0"), "--all-slower 0: at least 1 is needed"),
        (("--layout", "ring=3"), "a layout is needed whose 2 ranks share a row"),
        (("--layout", "cfg=2"), "whose 2 ranks share a row"),
        (("--layout", "pipe=2"), "whose 2 ranks share a row"),
    ],
)
def test_what_it_cannot_measure_is_refused(words, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        unequal.run(options(*words))


@pytest.mark.parametrize(
    ("gain", "of_sum", "error", "ranks", "failed"),
    [
        (1.3, 0.8, 1e-6, 2, False), (1.2, 1.0, 1e-6, 2, True), (1.3, 0.8, 1e-6, 3, True), (1.3, 0.95, 1e-6, 3, False),
        (1.3, 1.0, 2e-5, 2, True), (1.3, 1.0, float("nan"), 2, True),
    ],
)  # fmt: skip
def test_what_gains_too_little_or_differs_fails(gain, of_sum, error, ranks, failed):
    found = unequal.Gain(
        layout="ring=2 balance=1:0.5", even=2.0, balanced=1.5, alone=2.1, gain=gain, of_sum=of_sum, error=error,
        ranks=ranks,
    )  # fmt: skip
    assert found.failed == failed
    assert found.describe().startswith("FAILED" if failed else "passed")
