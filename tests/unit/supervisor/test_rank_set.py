"""A rank that sends what is no message, or that cannot be watched, fails its set and nothing else."""

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from parallel_backend.errors import RankFailed
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.protocol.rank_control import Finished
from parallel_backend.supervisor.event_loop import EventLoop
from parallel_backend.supervisor.limits import Patience
from parallel_backend.supervisor.log_files import LogFiles
from parallel_backend.supervisor.ranks.failures import Failure
from parallel_backend.supervisor.ranks.rank_set import RankSet

SENDS = "import os, sys, time; os.write(int(sys.argv[sys.argv.index('--control-fd') + 1]), {!r}); time.sleep(60)"
"""The program of a rank that sends a datagram to its supervisor."""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pdit"))
    yield path
    shutil.rmtree(path)


def rank_set(folder: Path, data: bytes, events: EventLoop, on_finished: Callable[..., None]) -> RankSet:
    return RankSet(
        generation=1,
        devices=Devices(kind="cpu", indices=(0,)),
        logs=LogFiles(folder / "logs"),
        command=(sys.executable, "-c", SENDS.format(data)),
        patience=Patience(),
        events=events,
        on_finished=on_finished,
    )


def verdict(folder: Path, data: bytes, events: EventLoop, on_finished: Callable[..., None]) -> Failure:
    """Return why a set fails whose rank sends this."""
    ranks = rank_set(folder, data, events, on_finished)
    try:
        ranks.start()
        end, failure = time.monotonic() + 10.0, None
        while failure is None:
            assert time.monotonic() < end
            events.run_once(0.1)
            failure = ranks.verdict()
        return failure
    finally:
        ranks.kill()
        while not ranks.exited:
            events.run_once(0.1)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 20_000,
        b'{"type":"Heartbeat","status":{"x":' + b"[" * 20_000,
        b"\xff",
        b"{}",
        b'{"type":"Run"}',
        b"x" * 99999,
    ],
    ids=["nested", "nested-status", "no-json", "no-type", "another", "too-long"],
)
def test_what_is_no_message_fails_the_set(folder: Path, data: bytes) -> None:
    events = EventLoop()
    failure = verdict(folder, data, events, lambda *_: None)
    assert failure.code == RankFailed.code
    assert failure.message.startswith("rank 0 (pid ")
    assert "sent what is no message: a message does not decode" in failure.message
    assert events.internal_errors == 0


def test_a_bug_in_handling_a_message_fails_the_set(folder: Path) -> None:
    def fail(*_: object) -> None:
        raise LookupError("a bug")

    events = EventLoop()
    failure = verdict(folder, msgspec.json.encode(Finished(request_id="a", code="done")), events, fail)
    assert "the supervisor failed on an event of rank 0" in failure.message
    assert "LookupError: a bug" in failure.message
    assert events.internal_errors == 1


def test_a_rank_that_cannot_be_watched_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor for its exit, nothing would end it later."""

    def fail(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    pids: list[int] = []
    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        rank_set(folder, b"", EventLoop(), lambda *_: None).start()
    assert len(pids) == 1
    assert not Path(f"/proc/{pids[0]}").exists()
