"""How many spare ranks there are, which of them are used, and when one starts after another died."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from parallel_backend import processes
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.supervisor.event_loop import EventLoop
from parallel_backend.supervisor.ranks import spares as pool
from parallel_backend.supervisor.ranks.expected_devices import expected_devices
from parallel_backend.supervisor.ranks.rank_start import StartedProcess
from parallel_backend.supervisor.ranks.spares import Spares

PROGRAM = """
import os, socket, sys
control = socket.socket(fileno=int(sys.argv[-1]))
if os.path.exists("slow"):
    open("seen", "w").close()
else:
    control.send(b'{"type":"Prepared"}')
control.recv(1)
"""
"""A process that is ready at once, unless there is a file ``slow``."""
TWO = Devices(kind="cpu", indices=(0, 1))
GPUS = Devices(kind="cuda", indices=(0, 1), visible=(("CUDA_VISIBLE_DEVICES", "3,4"),))


class Pool:
    """A pool with its event loop."""

    def __init__(self, folder: Path, number: int | None) -> None:
        self.events = EventLoop()
        command = (sys.executable, "-c", PROGRAM)
        (folder / "logs").mkdir(exist_ok=True)
        self.spares = Spares(
            command=command, number=number, events=self.events, devices=expected_devices(),
            log=Endpoint(folder=folder).spare_log,
        )  # fmt: skip

    def run_until(self, condition: Callable[[], bool], *, idle: bool = True, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.spares.statuses()
            self.events.run_once(0.02)
            self.spares.tick(idle=idle)

    def run_for(self, seconds: float, *, idle: bool = True) -> None:
        end = time.monotonic() + seconds
        self.run_until(lambda: time.monotonic() > end, idle=idle)

    def pids(self) -> list[int]:
        return [spare.pid for spare in self.spares.statuses()]

    def ready(self, count: int) -> list[int]:
        self.run_until(lambda: [spare.ready for spare in self.spares.statuses()] == [True] * count)
        return self.pids()


@pytest.fixture
def new_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pool]]:
    monkeypatch.chdir(tmp_path)
    pools: list[Pool] = []
    before = {child.pid for child in psutil.Process().children()}  # of other tests' fixtures

    def make(number: int | None = 2) -> Pool:
        pools.append(Pool(tmp_path, number))
        return pools[-1]

    yield make
    for each in pools:
        each.spares.kill()
        each.run_until(lambda each=each: each.spares.exited)  # type: ignore[misc]
    assert not {child.pid for child in psutil.Process().children()} - before


def end(pool: Pool, taken: list[StartedProcess]) -> None:
    for started in taken:
        started.process.kill()
        started.process.wait(5)
        started.control.close()
        os.close(started.pidfd)


@pytest.mark.parametrize(
    ("ranks", "available", "total", "number"),
    [
        (2, 20, 24, 2),
        (8, 200, 256, 8),
        (8, 20, 24, 0),  # a part of them would not help
        (2, 2.5, 24, 0),  # the machine is full
        (1, 7, 8, 1),
    ],
)
def test_without_a_number_it_is_that_of_the_ranks_if_memory_allows(
    monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., Pool], ranks: int, available: float, total: float,
    number: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(processes, "machine_memory", lambda: (int(available * 2**30), int(total * 2**30)))
    spares = new_pool(None).spares
    assert list(spares.take(Devices(kind="cpu", indices=tuple(range(ranks))))) == []
    assert spares._wanted() == number


def test_the_readiest_are_used_and_only_as_many_as_there_are_ranks(new_pool: Callable[..., Pool]) -> None:
    three = new_pool(3)
    first, second, third = three.ready(3)
    taken = list(three.spares.take(TWO))
    assert [started.process.pid for started in taken] == [first, second]
    assert three.pids() == [third]
    end(three, taken)


def test_one_that_is_not_ready_is_the_last_choice(new_pool: Callable[..., Pool]) -> None:
    two = new_pool(1)
    Path("slow").touch()
    two.run_until(Path("seen").exists)
    Path("slow").unlink()
    two.spares._spares[0].since -= 100.0
    (slow,) = two.pids()
    two.spares._start(two.spares._spares[0].environment)
    while not any(spare.ready for spare in two.spares.statuses()):
        two.events.run_once(10.0)
    taken = list(two.spares.take(TWO))
    assert [started.process.pid for started in taken][1] == slow
    end(two, taken)


def test_ranks_that_see_other_gpus_do_not_use_them_and_get_their_own(new_pool: Callable[..., Pool]) -> None:
    two = new_pool()
    before = two.ready(2)
    assert list(two.spares.take(GPUS)) == []
    assert two.pids() == before
    two.run_until(lambda: not set(two.pids()) & set(before))
    after = two.ready(2)
    for pid in after:
        assert psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] == "3,4"
    taken = list(two.spares.take(replace(GPUS, indices=(0,))))
    assert [started.process.pid for started in taken] == after[:1]
    end(two, taken)


def test_those_that_are_too_many_end(monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., Pool]) -> None:
    monkeypatch.setattr(processes, "machine_memory", lambda: (20 << 30, 24 << 30))
    auto = new_pool(None)
    auto.spares.take(TWO)
    auto.ready(2)
    auto.spares._devices = replace(TWO, indices=(0,))
    auto.ready(1)


def test_none_starts_while_the_backend_is_busy(new_pool: Callable[..., Pool]) -> None:
    two = new_pool()
    two.run_for(0.5, idle=False)
    assert two.pids() == []
    two.run_until(lambda: len(two.pids()) == 1)
    two.run_for(0.5, idle=False)
    assert len(two.pids()) == 1


def test_they_start_one_at_a_time(new_pool: Callable[..., Pool]) -> None:
    Path("slow").touch()
    two = new_pool()
    two.run_for(1.0)
    assert len(two.pids()) == 1


def test_they_start_together_for_a_request_that_is_expected(new_pool: Callable[..., Pool]) -> None:
    Path("slow").touch()
    two = new_pool()
    two.spares.expect(GPUS)
    pids = two.pids()
    assert len(pids) == 2
    for pid in pids:
        assert psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] == "3,4"
    taken = list(two.spares.take(GPUS))
    assert sorted(started.process.pid for started in taken) == sorted(pids)
    assert not two.spares.hurried
    end(two, taken)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_largest_of_the_sets_that_are_expected_counts(
    monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., Pool], order: tuple[int, int]
) -> None:
    monkeypatch.setattr(processes, "machine_memory", lambda: (20 << 30, 24 << 30))
    auto, devices = new_pool(None), (TWO, replace(TWO, indices=(0,)))
    started = set[int]()
    for each in order:
        auto.spares.expect(devices[each])
        started |= set(auto.pids())
    assert len(auto.pids()) == len(started) == 2
    taken = list(auto.spares.take(devices[1]))
    auto.spares.expect(devices[1])
    assert len(auto.pids()) == 1, "the largest of the sets that are expected now"
    end(auto, taken)


@pytest.mark.parametrize(("number", "available"), [(0, 20.0), (None, 2.5), (None, 3.1)])
def test_none_is_expected_where_none_may_start(
    monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., Pool], number: int | None, available: float
) -> None:
    """The last of them has room for one alone, and both would start before either takes its memory."""
    monkeypatch.setattr(processes, "machine_memory", lambda: (int(available * 2**30), 24 << 30))
    pool = new_pool(number)
    pool.spares.expect(TWO)
    pool.run_for(0.2)
    assert pool.pids() == []


def test_after_the_files_have_changed_none_is_used_and_none_starts(
    monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., Pool]
) -> None:
    two = new_pool()
    two.ready(2)
    monkeypatch.setattr(pool, "is_outdated", lambda: True)
    assert list(two.spares.take(TWO)) == []
    two.run_for(0.5)
    assert two.pids() == []
    other = new_pool()
    other.run_for(0.5)
    assert other.pids() == []


def test_after_the_files_have_changed_a_request_may_be_expected(
    monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., Pool], caplog: pytest.LogCaptureFixture
) -> None:
    """None starts for it, and the event loop goes on."""
    two = new_pool()
    monkeypatch.setattr(pool, "is_outdated", iter([True]).__next__)
    two.spares.expect(TWO)
    assert two.pids() == []
    assert caplog.text.count("there are no spare ranks from now on") == 1


def test_one_that_never_gets_ready_ends(
    monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., Pool], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "PREPARE", 0.5)
    Path("slow").touch()
    one = new_pool(1)
    one.run_until(lambda: "was not ready after 0.5 s" in caplog.text)
    assert one.pids() == []


def test_the_time_in_which_one_is_suspended_does_not_count(
    monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., Pool]
) -> None:
    monkeypatch.setattr(pool, "PREPARE", 0.5)
    Path("slow").touch()
    one = new_pool(1)
    one.run_until(lambda: len(one.pids()) == 1)
    one.run_for(1.0, idle=False)
    assert psutil.Process(one.pids()[0]).status() == psutil.STATUS_STOPPED


def test_the_more_die_the_rarer_they_start(new_pool: Callable[..., Pool], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    spares = new_pool(0).spares
    for _ in range(11):
        spares._postpone("it died")
    delays = [record.args[2] for record in caplog.records]  # type: ignore[index]
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_a_program_that_is_not_there_is_tried_again_later(
    new_pool: Callable[..., Pool], caplog: pytest.LogCaptureFixture
) -> None:
    one = new_pool(1)
    one.spares._command = ("/no/such/program",)
    one.run_for(1.0)
    assert caplog.text.count("a spare rank does not start") == 1
    assert one.pids() == []
