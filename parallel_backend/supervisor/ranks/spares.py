"""Spare ranks: processes that have made the imports of a rank, and take the places of ranks that start.

They are started one at a time, and only while the backend has nothing to do. One that is still importing when a request
arrives is suspended until there is nothing to do again, unless the request needs it.
"""

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ... import last_words, processes
from ...errors import ProtocolError
from ...protocol import rank_control
from ...protocol.endpoint import Endpoint
from ...protocol.fingerprint import is_outdated
from ...protocol.model_spec import FIRST, Devices
from ...protocol.status import SpareStatus
from ..event_loop import READ, EventLoop
from .expected_devices import expected_devices
from .other_hosts import NoOtherHosts, OtherHosts
from .rank_start import THREADS, StartedProcess, common_environment, start_process

log = logging.getLogger(__name__)

MEMORY = 400 << 20
"""Bytes that one takes, a little more than measured (docs/benchmarks.md)."""
SHARE, KEPT_FREE = 1 / 16, 1 / 10
"""Of the machine's memory, unless the number of spares is given: the most that all of them may take, and what has to
stay free when one starts."""
PREPARE = 120.0
"""Seconds that one has for its imports."""
MAX_DELAY = 300.0
"""Longest time in seconds from the death of one to the start of the next; it doubles with each death."""


@dataclass(kw_only=True, eq=False)
class _Spare:
    """One spare rank.

    Attributes:
        started: its process.
        environment: the one that it was started with.
        ready: whether its imports are done.
        suspended: whether its process is stopped.
        since: ``time.monotonic()`` when it was started or resumed.
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
    """The spare ranks of one supervisor.

    Args:
        endpoint: has the folder of the log.
        command: starts a rank.
        number: how many there are to be; None for as many as the last set had ranks and memory allows.
        events: the supervisor's event loop.
        hosts: the other hosts.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        command: Sequence[str],
        number: int | None,
        events: EventLoop,
        hosts: OtherHosts | None = None,
    ) -> None:
        self._endpoint, self._command, self._number, self._events = endpoint, tuple(command), number, events
        self._hosts = hosts or NoOtherHosts()
        self._spares: list[_Spare] = []
        self._leaving: list[_Spare] = []
        self._deaths, self._next_start = 0, 0.0
        self._devices = expected_devices()

    # For ranks that start

    def take(self, devices: Devices) -> list[StartedProcess]:
        """Hand over at most as many processes as there are devices, the readiest first.

        They are no longer watched here. From now on, the ranks on ``devices`` are those that are to be replaced.
        """
        self._devices = devices
        if self._spares:
            self._end_if_outdated()
        wanted = common_environment(devices, interface=self._hosts.interface(devices))
        alive = [spare for spare in self._spares if spare.started.process.poll() is None]
        fitting = sorted((s for s in alive if _fits(s, wanted)), key=lambda s: (not s.ready, s.since))
        taken = fitting[: devices.on_host(FIRST)]
        for spare in taken:
            self._spares.remove(spare)
            self._events.forget(spare.started.control.fileno())
            self._events.forget(spare.started.pidfd)
            processes.send_signal(spare.pid, signal.SIGCONT)
            self._deaths = 0
        return [spare.started for spare in taken]

    # For the supervisor

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
        """End those that are too many or do not fit, or start one that is missing."""
        wanted = common_environment(self._devices, interface=self._hosts.interface(self._devices))
        number = self._wanted()
        useless = [spare for spare in self._spares if not _fits(spare, wanted)]
        self._end(useless or self._spares[number:])
        changing = self._leaving or any(not spare.ready for spare in self._spares)
        if len(self._spares) < number and not changing and time.monotonic() >= self._next_start:
            self._start(wanted)

    def _wanted(self) -> int:
        if self._number is not None:
            return self._number
        available, total = processes.machine_memory()
        ranks = self._devices.on_host(FIRST)
        if ranks * MEMORY > SHARE * total:
            return 0  # fewer spares than ranks would make no set start earlier
        return ranks if available - MEMORY >= KEPT_FREE * total else min(ranks, len(self._spares))

    def _start(self, environment: Mapping[str, str]) -> None:
        if self._end_if_outdated():
            return
        try:
            with self._endpoint.spare_log.open("wb"):
                pass
            with self._endpoint.spare_log.open("ab") as output:
                started = start_process([*self._command, "--spare"], environment=environment, output=output.fileno())
        except OSError as error:
            self._postpone(f"a spare rank does not start: {error}")
            return
        spare = _Spare(started=started, environment=environment)
        self._spares.append(spare)
        self._events.watch(
            started.control.fileno(), READ, lambda: self._receive(spare), discard=lambda error: self._fail(spare, error)
        )
        self._events.watch(
            started.pidfd, READ, lambda: self._reap(spare), discard=lambda error: self._fail(spare, error)
        )
        log.info("spare rank (pid %d) started", spare.pid)

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
            reason = "" if spare.ready else last_words.last_line(last_words.tail(self._endpoint.spare_log))
            self._postpone(f"spare rank (pid {spare.pid}) {how}{': ' + reason if reason else ''}")

    def _dismiss(self, spare: _Spare, why: str) -> None:
        self._postpone(f"spare rank (pid {spare.pid}) {why}")
        self._end([spare])

    def _fail(self, spare: _Spare, error: Exception) -> None:
        """Handling an event of a spare has failed."""
        if spare in self._spares:
            self._dismiss(spare, f"is ended, since the supervisor failed on it: {type(error).__name__}: {error}")

    def _postpone(self, message: str) -> None:
        delay = min(MAX_DELAY, 2.0**self._deaths)
        self._deaths += 1
        self._next_start = time.monotonic() + delay
        log.warning("%s (log: %s); the next one starts in %g s or later", message, self._endpoint.spare_log, delay)

    def _suspend(self, spare: _Spare, suspended: bool) -> None:
        if suspended != spare.suspended:
            processes.send_signal(spare.pid, signal.SIGSTOP if suspended else signal.SIGCONT)
            spare.suspended, spare.since = suspended, time.monotonic()

    def _end(self, spares: Sequence[_Spare]) -> None:
        for spare in list(spares):
            spare.dismissed = True
            spare.started.process.kill()
            self._leave(spare)

    def _leave(self, spare: _Spare) -> None:
        """Count a spare no longer. Its process is ending, and is reaped when it has."""
        self._spares.remove(spare)
        self._leaving.append(spare)
        self._events.forget(spare.started.control.fileno())
        spare.started.control.close()


def _fits(spare: _Spare, environment: Mapping[str, str]) -> bool:
    """Whether a spare's environment is that of a rank, except for the number of threads, which it can change."""
    return {**spare.environment, THREADS: ""} == {**environment, THREADS: ""}
