"""A log that strangers cause says what it leaves out."""

import logging
import time

import pytest

from parallel_backend.machines.gateway.sparing_log import SparingFilter


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("gateway", logging.WARNING, __file__, 1, "%s", (text,), None)


def test_the_next_line_says_how_many_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sparing = SparingFilter(lines=3)
    assert [sparing.filter(record("refused")) for _ in range(8)] == [True] * 3 + [False] * 5
    now = 101.0
    first, second = record("refused"), record("refused")
    assert sparing.filter(first)
    assert sparing.filter(second)
    assert first.getMessage() == "refused (5 lines were left out before)"
    assert second.getMessage() == "refused"
