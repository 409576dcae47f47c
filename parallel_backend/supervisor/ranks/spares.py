"""Spare ranks: processes that have made a rank's imports, and become ranks when a set starts.

The supervisor has some, and so has the agent of each other host. They start one at a time, and only while the backend
has nothing to do, or together as soon as a request is expected. A request suspends a spare rank that still imports,
until there is nothing to do again, unless the request needs it.
"""

import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ... import last_words, processes
from ...errors import ProtocolError
from ...protocol import rank_control
from ...protocol.fingerprint import is_outdated
from ...protocol.model_spec import FIRST, Devices
from ...protocol.status import SpareStatus
from ..event_loop import READ, EventLoop
from .rank_start import CHANGEABLE, StartedProcess, common_environment, start_process

log = logging.getLogger(__name__)

MEMORY = 400 << 20
"""Bytes that one takes, a little more than measured (docs/benchmarks.md)."""
SHARE, KEPT_FREE = 1 / 16, 1 / 10
"""Of the machine's memory, unless the number of spares is given: the most that all of them may take, and what has to
stay free when one starts."""
PREPARE = 120.0
"""Seconds that one has for its imports."""
_STDERR = 2
MAX_DELAY = 300.0
"""Longest time in seconds from the death of one to the start of the next; it doubles with each death."""


@dataclass(kw_only=True, eq=False)
class _Spare:
    """One spare rank.

    Attributes:
        started: its process.
        environment: its environment at the start.
        ready: whether its imports are done.
        suspended: whether its process is stopped.
        since: ``time.monotonic()`` at its start or resumption.
        dismissed: whether it was killed here.
    """

    started: StartedProcess
    environment: Mapping[str, str]
    ready: bool = False
    suspended: bool = False
    since: float = field(default_factory=time.monotonic)
    dismissed: bool = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.started.process.pid


class Spares:
    """The spare ranks of one host.

    Args:
        command: starts a rank.
        number: target number; None for the last set's number of ranks here, as far as memory allows.
        events: the event loop of this process.
        devices: the devices to keep spares for, until ``take`` names others.
        log: the newest one's log; None for this process's stderr.

    Attributes:
        hurried: whether a request is expected, so that they need not wait until there is nothing to do for a while.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        number: int | None,
        events: EventLoop,
        devices: Devices,
        log: Path | None = None,
    ) -> None:
        self._command, self._number, self._events = tuple(command), number, events
        self._devices, self._log = devices, log
        self._spares: list[_Spare] = []
        self._leaving: list[_Spare] = []
        self._deaths, self._next_start, self.hurried = 0, 0.0, False

    # For ranks that start

    def expect(self, devices: Devices) -> None:
        """Start what ``take`` may yield for these devices, all together.

        The nodes of a prompt may name different devices, one after another in any order: until a set starts, those that
        serve fewer ranks in the same environment change nothing.
        """
        if not (self.hurried and self._serve(devices)):
            self._devices, self.hurried = devices, True
        self._adjust()

    def _serve(self, devices: Devices) -> bool:
        """Whether spares for the present devices are enough for these."""
        present, wanted = common_environment(self._devices), common_environment(devices)
        return _equal(present, wanted) and devices.on_host(FIRST) <= self._devices.on_host(FIRST)

    def take(self, devices: Devices) -> Iterator[StartedProcess]:
        """Yield at most one process for each device on this host, the readiest first.

        They are no longer watched here. From now on, spares are for ranks on ``devices``.
        """
        self._devices, self.hurried = devices, False
        if self._spares:
            self._end_if_outdated()
        wanted = common_environment(devices)
        fitting = sorted((s for s in self._spares if _fits(s, wanted)), key=lambda s: (not s.ready, s.since))
        return itertools.islice(self._hand_over(fitting), devices.on_host(FIRST))

    def _hand_over(self, spares: Sequence[_Spare]) -> Iterator[StartedProcess]:
        for spare in spares:
            if spare in self._spares and spare.started.process.poll() is None:
                self._spares.remove(spare)
                self._events.forget(spare.started.control.fileno())
                self._events.forget(spare.started.pidfd)
                processes.send_signal(spare.pid, signal.SIGCONT)
                self._deaths = 0
                yield spare.started

    # For the event loop

    def tick(self, *, idle: bool) -> None:
        """Start, suspend, resume or end spares. ``idle`` says whether the backend has nothing to do."""
        for spare in [spare for spare in self._spares if not spare.ready]:
            self._suspend(spare, not idle)
            if not spare.suspended and time.monotonic() - spare.since > PREPARE:
                self._dismiss(spare, f"was not ready after {PREPARE:g} s")
        if idle:
            self._adjust()

    def statuses(self) -> tuple[SpareStatus, ...]:
        """The status of each."""
        return tuple(
            SpareStatus(pid=spare.pid, memory=processes.resident_memory(spare.pid), ready=spare.ready)
            for spare in self._spares
        )

    def kill(self) -> None:
        """Kill all, and start no more; ``exited`` tells when all are gone."""
        self._number = 0
        self._end(self._spares)

    @property
    def exited(self) -> bool:
        """Whether every process that was killed has exited and been reaped."""
        return not self._leaving

    # One by one

    def _adjust(self) -> None:
        """End surplus or unfit spares, or start a missing one."""
        wanted = common_environment(self._devices)
        number = self._wanted()
        useless = [spare for spare in self._spares if not _fits(spare, wanted)]
        self._end(useless or self._spares[number:])
        changing = self._leaving or any(not spare.ready for spare in self._spares)
        while len(self._spares) < number and (self.hurried or not changing) and time.monotonic() >= self._next_start:
            if not self._start(wanted):
                return
            changing = True

    def _wanted(self) -> int:
        if self._number is not None:
            return self._number
        available, total = processes.machine_memory()
        ranks = self._devices.on_host(FIRST)
        if ranks * MEMORY > SHARE * total:
            return 0  # a set starts earlier only with as many spares as ranks
        needed = MEMORY * (ranks - len(self._spares))
        return ranks if available - needed >= KEPT_FREE * total else min(ranks, len(self._spares))

    def _start(self, environment: Mapping[str, str]) -> bool:
        """Start one, and return whether it has started."""
        if self._end_if_outdated():
            return False
        try:
            with self._output() as output:
                started = start_process([*self._command, "--spare"], environment=environment, output=output)
        except OSError as error:
            self._postpone(f"a spare rank does not start: {error}")
            return False
        spare = _Spare(started=started, environment=environment)
        self._spares.append(spare)
        self._events.watch(
            started.control.fileno(), READ, lambda: self._receive(spare), discard=lambda error: self._fail(spare, error)
        )
        self._events.watch(
            started.pidfd, READ, lambda: self._reap(spare), discard=lambda error: self._fail(spare, error)
        )
        log.info("spare rank (pid %d) started", spare.pid)
        return True

    @contextlib.contextmanager
    def _output(self) -> Iterator[int]:
        """The descriptor for a new spare's output."""
        if self._log is None:
            yield _STDERR
            return
        with self._log.open("wb"):
            pass
        with self._log.open("ab") as output:
            yield output.fileno()

    def _end_if_outdated(self) -> bool:
        """End all for good if the program's files have changed: ranks of one set have to run the same code."""
        outdated = is_outdated()
        if outdated:
            log.warning("the extension's files have changed: there are no spare ranks from now on")
            self.kill()
        return outdated

    def _receive(self, spare: _Spare) -> None:
        try:
            rank_control.receive(spare.started.control, rank_control.Prepared)
        except BlockingIOError:
            return
        except ConnectionError:
            self._leave(spare)  # it is exiting
        except ProtocolError as error:
            self._dismiss(spare, f"sent what cannot be read: {error}")
        else:
            spare.ready = True

    def _reap(self, spare: _Spare) -> None:
        """The process has exited."""
        if spare in self._spares:
            self._leave(spare)
        self._leaving.remove(spare)
        self._events.forget(spare.started.pidfd)
        os.close(spare.started.pidfd)
        how = processes.describe_exit(spare.started.process.wait(timeout=5.0))
        if not spare.dismissed:
            reason = last_words.last_line(last_words.tail(self._log)) if self._log and not spare.ready else ""
            self._postpone(f"spare rank (pid {spare.pid}) {how}{': ' + reason if reason else ''}")

    def _dismiss(self, spare: _Spare, why: str) -> None:
        self._postpone(f"spare rank (pid {spare.pid}) {why}")
        self._end([spare])

    def _fail(self, spare: _Spare, error: Exception) -> None:
        """Handling an event of a spare has failed."""
        if spare in self._spares:
            self._dismiss(spare, f"is ended after an event of it failed: {type(error).__name__}: {error}")

    def _postpone(self, message: str) -> None:
        delay = min(MAX_DELAY, 2.0**self._deaths)
        self._deaths += 1
        self._next_start = time.monotonic() + delay
        where = f" (log: {self._log})" if self._log else ""
        log.warning("%s%s; the next one starts in %g s or later", message, where, delay)

    def _suspend(self, spare: _Spare, suspended: bool) -> None:
        if suspended != spare.suspended and spare.started.process.returncode is None:
            processes.send_signal(spare.pid, signal.SIGSTOP if suspended else signal.SIGCONT)
            spare.suspended, spare.since = suspended, time.monotonic()

    def _end(self, spares: Sequence[_Spare]) -> None:
        for spare in list(spares):
            spare.dismissed = True
            spare.started.process.kill()
            self._leave(spare)

    def _leave(self, spare: _Spare) -> None:
        """Forget a spare. Its process is ending, and is reaped afterwards."""
        self._spares.remove(spare)
        self._leaving.append(spare)
        self._events.forget(spare.started.control.fileno())
        spare.started.control.close()


def _fits(spare: _Spare, environment: Mapping[str, str]) -> bool:
    """Whether a spare's environment can become a rank's."""
    return _equal(spare.environment, environment)


def _equal(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two environments are equal, except for variables that a spare rank can change."""
    return all(name in CHANGEABLE or one.get(name) == other.get(name) for name in one.keys() | other.keys())
