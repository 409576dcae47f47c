"""A set of ranks that was killed says nothing to the next one, and does not hold it up for ever."""

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_backend.protocol import rank_control
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.protocol.rank_control import DONE, Finished
from parallel_backend.supervisor.event_loop import EventLoop
from parallel_backend.supervisor.limits import Patience
from parallel_backend.supervisor.log_files import LogFiles
from parallel_backend.supervisor.ranks.generations import Generations

DEVICES = Devices(kind="cpu", indices=(0,))
EXIT = 1.0
"""Seconds that killed ranks have to exit."""


class Sets:
    """Sets of one rank that does nothing.

    Attributes:
        generations: the sets.
        finished: the requests that ranks reported as finished.
    """

    def __init__(self, folder: Path) -> None:
        self.events, self.finished = EventLoop(), list[tuple[int, str]]()
        self.logs = LogFiles(folder / "logs")
        self.generations = Generations(
            logs=self.logs,
            command=(sys.executable, "-c", "import time; time.sleep(60)"),
            patience=Patience(),
            exit_patience=EXIT,
            events=self.events,
            on_finished=lambda rank, finished: self.finished.append((rank, finished.request_id)),
            take_spares=lambda devices: iter(()),
        )

    def forget(self) -> float:
        """Run until killed sets are forgotten; return how many seconds it took."""
        start = time.monotonic()
        while self.generations.forget_exited():
            self.events.run_once(0.05)
            assert time.monotonic() < start + 20.0
        return time.monotonic() - start


@pytest.fixture
def sets() -> Iterator[Sets]:
    folder = Path(tempfile.mkdtemp(prefix="pdit"))
    sets = Sets(folder)
    yield sets
    sets.generations.kill()
    sets.forget()
    sets.logs.close()
    shutil.rmtree(folder)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The ranks' ends of the control sockets of all sets, which stay open when the ranks are gone."""
    kept, pair = list[socket.socket](), rank_control.pair

    def keeping() -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        kept.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr(rank_control, "pair", keeping)
    yield kept
    for link in kept:
        link.close()


def test_a_late_message_of_a_killed_set_reaches_nobody(sets: Sets, links: list[socket.socket]) -> None:
    """Neither one that was sent before the set was killed and not read yet, nor one that is sent later."""
    sets.generations.start(DEVICES)
    rank_control.send(links[0], Finished(request_id="early", code="rank_failed", message="a fault"))
    sets.generations.kill()
    sets.forget()
    sets.generations.start(DEVICES)
    with pytest.raises(ConnectionError):
        rank_control.send(links[0], Finished(request_id="late", code=DONE))
    rank_control.send(links[1], Finished(request_id="of the new set", code=DONE))
    while not sets.finished:
        sets.events.run_once(5.0)
    assert sets.finished == [(0, "of the new set")]
    assert sets.events.internal_errors == 0
    assert sets.generations.current
    assert sets.generations.current.generation == 2
    assert sets.generations.current.verdict() is None


def test_ranks_that_cannot_be_killed_are_waited_for_and_then_left(
    sets: Sets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that waits for a driver may not exit before the driver answers."""
    sets.generations.start(DEVICES)
    assert sets.generations.current
    (rank,) = sets.generations.current.ranks
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        sets.generations.kill()
        sets.generations.start(DEVICES)
        assert sets.generations.number == 1, "its devices are not free yet"
        assert sets.forget() >= EXIT / 2
        assert "the ranks of generation 1 were killed but do not exit" in caplog.text
        sets.generations.start(DEVICES)
        assert sets.generations.number == 2
    rank.process.kill()
    while rank.process.returncode is None:
        sets.events.run_once(5.0)
