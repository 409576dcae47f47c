"""One generation of rank processes, which are started, monitored and killed together."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from ... import last_words
from ...errors import OutOfMemory, ProtocolError
from ...progress import STARTING, RankProgress
from ...protocol import rank_control
from ...protocol.endpoint import rank_log
from ...protocol.model_spec import Devices
from ...protocol.status import RankStatus
from ..event_loop import READ, EventLoop
from ..limits import Patience
from ..log_files import LogFiles
from . import stuck_ranks
from .failures import BY_PEER, CLOSED, HUNG, OUT_OF_MEMORY, RAISED, STUCK, Failure, Failures, kind_of_exit
from .other_hosts import NoOtherHosts, OtherHosts
from .rank_output import RankOutput
from .rank_process import RankProcess
from .rank_start import NotStarted, StartedProcess
from .set_start import SetStart

log = logging.getLogger(__name__)

SUSPENDED = 2.0
"""Seconds between two checks of the ranks above which this process itself must have been suspended."""


class RankSet:
    """A set of ``len(devices.indices)`` ranks, which finds the root cause when they fail.

    Args:
        generation: the set's number.
        devices: the devices of the ranks.
        logs: take the ranks' output.
        command: starts a rank; the set appends the options.
        patience: time limits for ranks.
        events: the supervisor's event loop.
        on_finished: called with a rank's number and its ``Finished``.
        take_spares: yields spare ranks for devices. Each yielded one becomes a rank.
        hosts: the other hosts.

    Attributes:
        ranks: the ranks.
        killed_at: ``time.monotonic()`` when they were killed, None before.
        store_port: the port of the store, on this host's loopback interface; 0 until ``start``.
    """

    def __init__(
        self,
        *,
        generation: int,
        devices: Devices,
        logs: LogFiles,
        command: Sequence[str],
        patience: Patience,
        events: EventLoop,
        on_finished: Callable[[int, rank_control.Finished], None],
        take_spares: Callable[[Devices], Iterator[StartedProcess]] = lambda devices: iter(()),
        hosts: OtherHosts | None = None,
    ) -> None:
        self.generation, self.devices = generation, devices
        self._logs, self._command, self._patience = logs, tuple(command), patience
        self._events, self._on_finished, self._take_spares = events, on_finished, take_spares
        self._hosts = hosts or NoOtherHosts()
        self._started = self._last_check = time.monotonic()
        self._failures = Failures(generation=generation, patience=patience)
        self._outputs: dict[int, RankOutput] = {}
        self.ranks: list[RankProcess] = []
        self.killed_at: float | None = None
        self.store_port = 0

    def start(self) -> None:
        """Start the processes; ``ready`` tells when all have joined the process group.

        Raises:
            OSError: a process does not start. The caller must still kill the started ones.
            NotStarted: hosts are missing.
        """
        missing = self._hosts.missing(self.devices)
        if missing:
            ranks = tuple(rank for rank, host in enumerate(self.devices.hosts) if host in missing)
            raise NotStarted(" and ".join(missing.values()), ranks=ranks)
        with socket.create_server(("127.0.0.1", 0)) as store:
            self.store_port = store.getsockname()[1]
            start = SetStart(
                generation=self.generation, devices=self.devices, command=self._command, hosts=self._hosts,
                store=store, spares=self._take_spares(self.devices),
            )  # fmt: skip
            for rank in range(len(self.devices.indices)):
                output = self._outputs[rank] = self._open_output(rank)
                with output.writable() as write_end:
                    self._add(rank, *start.start(rank, write_end))

    def _open_output(self, rank: int) -> RankOutput:
        title = f"generation {self.generation}: rank {rank} on {self.devices.of_rank(rank)}"
        return RankOutput(rank, title, self._logs, self._events)

    def _log_of(self, rank: int) -> str:
        """Where a rank's log is, for the end of an error's sentence."""
        return f"(log: {self._logs.folder / rank_log(rank)})"

    def _add(self, rank: int, started: StartedProcess, how: str) -> None:
        device, progress = self.devices.of_rank(rank), RankProgress(phase=STARTING)
        process = started.process
        status = RankStatus(
            rank=rank, pid=process.pid, device=device, memory=0, progress=progress, host=process.host
        )  # fmt: skip
        added = RankProcess(
            rank=rank, process=started.process, control=started.control, pidfd=started.pidfd, status=status
        )
        fail = self._fail_on(added)
        self._events.watch(added.control.fileno(), READ, lambda: self._receive(added), discard=fail)
        self._events.watch(added.pidfd, READ, lambda: self._reap(added), discard=fail)
        self.ranks.append(added)
        log.info("generation %d: %s on %s %s", self.generation, added.name, device, how)

    def _fail_on(self, rank: RankProcess) -> Callable[[Exception], None]:
        """Return a callback that makes the set fail by an exception in a rank's event."""

        def fail(error: Exception) -> None:
            text = f"the supervisor failed on an event of {rank.name}: {type(error).__name__}: {error}"
            self._record(Failure(kind=RAISED, message=text))

        return fail

    def covers(self, devices: Devices) -> bool:
        """Whether the set can run a request for ``devices``: its first ranks use exactly these."""
        return self.devices.first(len(devices.indices)) == devices

    @property
    def ready(self) -> bool:
        """Whether every rank has joined the process group."""
        return bool(self.ranks) and all(rank.ready for rank in self.ranks)

    @property
    def uses_spares(self) -> bool:
        """Whether a rank was a spare rank."""
        return any(rank.process.was_spare for rank in self.ranks)

    @property
    def exited(self) -> bool:
        """Whether every process has exited and been reaped."""
        return all(rank.process.returncode is not None for rank in self.ranks)

    def run(self, header: bytes, connection: socket.socket) -> None:
        """Send a request and its connection to rank 0."""
        message = rank_control.Run(header=msgspec.Raw(header))
        self._send(self.ranks[0], message, [connection.fileno()])

    def cancel(self, request_id: str) -> None:
        """Tell rank 0 to cancel a request at its next step."""
        self._send(self.ranks[0], rank_control.CancelRun(request_id=request_id))

    def give_way(self, request_id: str) -> None:
        """Tell rank 0 that another request waits for the end of this one."""
        self._send(self.ranks[0], rank_control.GiveWay(request_id=request_id))

    def _send(self, rank: RankProcess, message: rank_control.ToRank, descriptors: Sequence[int] = ()) -> None:
        try:
            rank_control.send(rank.control, message, descriptors=descriptors)
        except OSError as error:
            self._record(Failure(kind=BY_PEER, message=f"{rank.name} does not accept messages: {error}"))

    def _receive(self, rank: RankProcess) -> None:
        try:
            message, _ = rank_control.receive(rank.control, rank_control.FromRank)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._events.forget(rank.control.fileno())
            self._record(Failure(kind=RAISED, message=f"{rank.name} sent what is no message: {error}"))
            return
        except ConnectionError:
            self._events.forget(rank.control.fileno())
            self._record(Failure(kind=CLOSED, message=self._with_output(rank, "closed its control socket")))
            return
        rank.heard()
        self._handle(rank, message)

    def _handle(self, rank: RankProcess, message: rank_control.FromRank) -> None:
        if isinstance(message, rank_control.Heartbeat):
            rank.report(message.status)
        elif isinstance(message, rank_control.Ready):
            rank.ready = True
        elif isinstance(message, rank_control.Finished):
            self._on_finished(rank.rank, message)

    def record_error(self, rank: int, finished: rank_control.Finished) -> None:
        """Record an error of a rank that makes the set unusable."""
        kind = BY_PEER if finished.by_peer else RAISED
        kind = OUT_OF_MEMORY if finished.code == OutOfMemory.code else kind
        text = f"{self.ranks[rank].name} on {self.devices.of_rank(rank)} {finished.message}"
        text = f"{text} {self._log_of(rank)}"
        self._record(Failure(kind=kind, code=finished.code, message=text, not_started=self._not_started(rank)))

    def _not_started(self, rank: int) -> tuple[int, ...]:
        return () if self.ranks[rank].ready else (rank,)

    def _with_output(self, rank: RankProcess, what: str) -> str:
        """Return a sentence about a rank's failure, with the last lines of its output and its log's place."""
        output = self._outputs[rank.rank]
        output.read()
        said = last_words.quoted(output.tail)
        return f"{rank.name} {what}{'; ' if said else ''}{said} {self._log_of(rank.rank)}"

    def _reap(self, rank: RankProcess) -> None:
        self._events.forget(rank.pidfd)
        os.close(rank.pidfd)
        returncode = rank.process.wait(timeout=5)
        output = self._outputs[rank.rank]
        output.finish()
        if self.killed_at is not None:
            return
        reason = last_words.of(returncode, output.tail)
        kind, code = kind_of_exit(returncode, reason)
        how = rank.process.describe_exit() + ("" if rank.ready else " while starting")
        text = f"{rank.name} {how}{': ' + reason if reason else ''} {self._log_of(rank.rank)}"
        self._record(Failure(kind=kind, code=code, message=text, not_started=self._not_started(rank.rank)))

    def _record(self, failure: Failure) -> None:
        if self.killed_at is None:
            self._failures.add(failure)

    def verdict(self) -> Failure | None:
        """The likeliest root cause, once a rank has failed and the others have had time to report."""
        self._check_for_hangs()
        return self._failures.likeliest()

    def _check_for_hangs(self) -> None:
        now = time.monotonic()
        if now - self._last_check > SUSPENDED:
            self._discount(now - self._last_check, now)
        self._last_check = now
        late = [rank for rank in self.ranks if not rank.ready]
        if late and now - self._started > self._patience.start:
            names = "".join(f"{rank.name} and " for rank in late[1:])
            text = names + self._with_output(late[0], f"did not start within {self._patience.start:g} s")
            self._record(Failure(kind=HUNG, message=text, not_started=tuple(rank.rank for rank in late)))
        for rank in self.ranks:
            if rank.process.returncode is None and rank.is_hung(self._patience, now):
                text = self._with_output(rank, f"stopped answering {now - rank.last_heard:.0f} s ago")
                self._record(Failure(kind=HUNG, message=text))
        culprits = stuck_ranks.stuck(self.ranks, self._patience)
        if culprits:
            text = stuck_ranks.describe(culprits, self.ranks, self.devices)
            logs = " and ".join(str(self._logs.folder / rank_log(rank.rank)) for rank in culprits)
            self._record(Failure(kind=STUCK, message=f"{text} (log: {logs})"))

    def _discount(self, suspended: float, now: float) -> None:
        """Do not count the time in which this process was suspended: the ranks may have been suspended with it."""
        self._started += suspended
        for rank in self.ranks:
            rank.discount(suspended, now)

    def statuses(self) -> tuple[RankStatus, ...]:
        """The last status of each rank, with its current memory from the process table."""
        return tuple(replace(rank.status, pid=rank.process.pid, memory=rank.process.memory()) for rank in self.ranks)

    def kill(self) -> None:
        """Kill every rank; ``exited`` tells when all are gone."""
        self.killed_at = time.monotonic()
        for rank in self.ranks:
            self._events.forget(rank.control.fileno())
            rank.control.close()
            if rank.process.returncode is None:
                rank.process.kill()
