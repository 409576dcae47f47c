"""``bench relayout``: what it refuses before it starts anything, and what counts as a failure."""

import argparse
import re

import pytest

from lab.bench import relayout
from parallel_backend.errors import InvalidRequest


def options(*words):
    parser = argparse.ArgumentParser()
    relayout.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rounds", "0"), "--rounds 0: at least 1 is needed"),
        (("--gigabytes", "0"), "--gigabytes 0: more than 0 is needed"),
        (("--layout", "ring=2"), "--layout ring=2: two different ones are needed"),
        (("--layout", "ring=2", "--layout", "ring=2"), "--layout ring=2: two different ones are needed"),
        (("--layout", "rings=2", "--layout", "ring=2"), "rings"),
    ],
)
def test_what_it_cannot_measure_is_refused(words, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        relayout.run(options(*words))


@pytest.mark.parametrize(
    ("ratio", "error", "held", "failed"),
    [
        (0.3, 0.0, True, False), (0.4, 0.0, True, True), (0.9, 0.0, False, False), (0.3, 1e-4, True, True),
        (0.3, float("nan"), False, True),
    ],
)  # fmt: skip
def test_what_takes_too_long_or_differs_fails(ratio, error, held, failed):
    found = relayout.Change(
        before="ring=2",
        after="cfg=2",
        change=ratio,
        load=1.0,
        back=0.1,
        ratio=ratio,
        error=error,
        held=held,
    )
    assert found.failed == failed
    assert found.describe().startswith("FAILED" if failed else "passed")
