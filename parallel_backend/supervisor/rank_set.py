"""One generation of rank processes, which are started, monitored and killed together."""

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from .. import processes
from ..error_texts import Cause, cause
from ..errors import OutOfMemory, ProtocolError, RankFailed
from ..progress import STARTING, RankProgress
from ..protocol import rank_control
from ..protocol.endpoint import Endpoint
from ..protocol.model_spec import VISIBLE, Devices
from ..protocol.status import RankStatus
from . import stuck_ranks
from .event_loop import READ, EventLoop
from .limits import Patience
from .rank_process import RankProcess

log = logging.getLogger(__name__)

DIED, HUNG, OUT_OF_MEMORY, RAISED, STUCK, BY_PEER, CLOSED = range(7)
"""Kinds of failure, the likeliest root cause first: when a rank dies, the others soon raise because it is missing."""


_BY_CAUSE = {Cause.FULL: (OUT_OF_MEMORY, OutOfMemory.code), Cause.PEER: (BY_PEER, RankFailed.code)}
"""Kind and code of the failure of a process whose log says why it ended itself: NCCL's watchdog ends the processes of
all ranks that wait for one."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a set must be killed. ``kind`` is one of the constants above, ``code`` one of ``errors``."""

    message: str
    kind: int = RAISED
    code: str = RankFailed.code


SUSPENDED = 2.0
"""Seconds between two checks of the ranks above which this process itself must have been suspended."""


class RankSet:
    """A set of ``len(devices.indices)`` ranks, which finds the root cause when they fail.

    Args:
        generation: the set's number.
        devices: the devices of the ranks.
        endpoint: has the folder of the logs.
        command: starts a rank; the set appends the options.
        patience: how long to wait for ranks.
        events: the supervisor's event loop.
        on_finished: called with a rank's number and its ``Finished``.
    """

    def __init__(
        self,
        *,
        generation: int,
        devices: Devices,
        endpoint: Endpoint,
        command: Sequence[str],
        patience: Patience,
        events: EventLoop,
        on_finished: Callable[[int, rank_control.Finished], None],
    ) -> None:
        self.generation, self.devices = generation, devices
        self._endpoint, self._command, self._patience = endpoint, tuple(command), patience
        self._events, self._on_finished = events, on_finished
        self._started = self._last_check = time.monotonic()
        self._failures: list[tuple[float, Failure]] = []
        self.ranks: list[RankProcess] = []
        self.killed_at: float | None = None

    def start(self) -> None:
        """Start the processes; ``ready`` tells when all have joined the process group.

        Raises:
            OSError: a process does not start. The caller must still kill those that did.
        """
        with socket.create_server(("127.0.0.1", 0)) as store:
            port = store.getsockname()[1]
            for rank in range(len(self.devices.indices)):
                self.ranks.append(self._start_rank(rank, port, store.fileno()))

    def _start_rank(self, rank: int, port: int, store: int) -> RankProcess:
        ours, theirs = rank_control.pair()
        pass_fds = [theirs.fileno()] + ([store] if rank == 0 else [])
        command = [*self._command, "--control-fd", str(theirs.fileno()), "--device", self.devices.of_rank(rank)]
        command += ["--collectives", self.devices.collectives]
        command += ["--store-fd", str(store)] if rank == 0 else []
        log_file = self._endpoint.rank_log(rank)
        if log_file.exists():
            log_file.replace(log_file.with_suffix(".log.1"))
        with theirs, log_file.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                env=self._environment(rank, port),
            )
        return self._watch(rank, process, ours)

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]", control: socket.socket) -> RankProcess:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:  # no descriptor is left: nothing would end this process later
            process.kill()
            process.wait()
            raise
        device, progress = self.devices.of_rank(rank), RankProgress(phase=STARTING)
        status = RankStatus(rank=rank, pid=process.pid, device=device, memory=0, progress=progress)
        started = RankProcess(rank=rank, process=process, control=control, pidfd=pidfd, status=status)
        self._events.watch(control.fileno(), READ, lambda: self._receive(started), discard=self._fail_on(started))
        self._events.watch(pidfd, READ, lambda: self._reap(started), discard=self._fail_on(started))
        log.info("generation %d: %s on %s started", self.generation, started.name, status.device)
        return started

    def _fail_on(self, rank: RankProcess) -> Callable[[Exception], None]:
        """Return what takes an exception from handling a rank's event: the set fails by it."""

        def fail(error: Exception) -> None:
            text = f"the supervisor failed on an event of {rank.name}: {type(error).__name__}: {error}"
            self._record(Failure(kind=RAISED, message=text))

        return fail

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        world_size = len(self.devices.indices)
        environment = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world_size)),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if self.devices.kind == "cuda":
            for name in VISIBLE:
                _set_or_remove(environment, name, dict(self.devices.visible).get(name))
        # ComfyUI selects this allocator for its own process; ranks that inherit it run out of memory under NCCL.
        for name in environment.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
            options = [option for option in environment[name].split(",") if option.strip() != "backend:cudaMallocAsync"]
            _set_or_remove(environment, name, ",".join(options) or None)
        return environment

    def covers(self, devices: Devices) -> bool:
        """Whether the set can run a request for ``devices``: its first ranks use exactly these."""
        return self.devices.first(len(devices.indices)) == devices

    @property
    def ready(self) -> bool:
        """Whether every rank has joined the process group."""
        return bool(self.ranks) and all(rank.ready for rank in self.ranks)

    @property
    def exited(self) -> bool:
        """Whether every process has exited and been reaped."""
        return all(rank.process.returncode is not None for rank in self.ranks)

    def run(self, header: bytes, connection: socket.socket) -> None:
        """Send a request and its connection to rank 0."""
        message = rank_control.Run(header=msgspec.Raw(header))
        self._send_to_rank_0(message, descriptor=connection.fileno())

    def cancel(self, request_id: str) -> None:
        """Tell rank 0 to cancel a request at its next step."""
        self._send_to_rank_0(rank_control.CancelRun(request_id=request_id))

    def _send_to_rank_0(self, message: rank_control.ToRank, *, descriptor: int | None = None) -> None:
        rank_0 = self.ranks[0]
        try:
            rank_control.send(rank_0.control, message, descriptor=descriptor)
        except OSError as error:
            self._record(Failure(kind=BY_PEER, message=f"{rank_0.name} does not accept messages: {error}"))

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
            self._record(Failure(kind=CLOSED, message=f"{rank.name} closed its control socket"))
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
        text = f"{text} (log: {self._endpoint.rank_log(rank)})"
        self._record(Failure(kind=kind, code=finished.code, message=text))

    def _reap(self, rank: RankProcess) -> None:
        self._events.forget(rank.pidfd)
        os.close(rank.pidfd)
        returncode = rank.process.wait(timeout=5)
        how = processes.describe_exit(returncode)
        if self.killed_at is not None:
            return
        path = self._endpoint.rank_log(rank.rank)
        reason = processes.last_line(path) if returncode > 0 else ""
        reason = processes.abort_reason(path) if returncode == -signal.SIGABRT else reason
        kind, code = _BY_CAUSE.get(cause(reason), (DIED, RankFailed.code))
        when = "" if rank.ready else " while starting"
        text = f"{rank.name} {how}{when}{': ' + reason if reason else ''} (log: {path})"
        self._record(Failure(kind=kind, code=code, message=text))

    def _record(self, failure: Failure) -> None:
        if self.killed_at is None:
            log.error("generation %d: %s", self.generation, failure.message)
            self._failures.append((time.monotonic(), failure))

    def verdict(self) -> Failure | None:
        """The likeliest root cause, once a rank has failed and the others have had time to report."""
        self._check_for_hangs()
        if not self._failures:
            return None
        waited = time.monotonic() - self._failures[0][0]
        likeliest = min((failure for _, failure in self._failures), key=lambda failure: failure.kind)
        waits = {DIED: 0.0, BY_PEER: self._patience.blame, CLOSED: self._patience.blame}
        return likeliest if waited >= waits.get(likeliest.kind, self._patience.evidence) else None

    def _check_for_hangs(self) -> None:
        now = time.monotonic()
        if now - self._last_check > SUSPENDED:
            self._discount(now - self._last_check, now)
        self._last_check = now
        late = [rank for rank in self.ranks if not rank.ready]
        if late and now - self._started > self._patience.start:
            names = " and ".join(rank.name for rank in late)
            text = f"{names} did not start within {self._patience.start:g} s"
            self._record(Failure(kind=HUNG, message=text))
        for rank in self.ranks:
            if rank.process.returncode is None and rank.is_hung(self._patience, now):
                text = f"{rank.name} stopped answering {now - rank.last_heard:.0f} s ago"
                self._record(Failure(kind=HUNG, message=text))
        culprits = stuck_ranks.stuck(self.ranks, self._patience)
        if culprits:
            text = stuck_ranks.describe(culprits, self.ranks, self.devices)
            logs = " and ".join(str(self._endpoint.rank_log(rank.rank)) for rank in culprits)
            self._record(Failure(kind=STUCK, message=f"{text} (log: {logs})"))

    def _discount(self, suspended: float, now: float) -> None:
        """Do not count the time in which this process was suspended: the ranks may have been suspended with it."""
        self._started += suspended
        for rank in self.ranks:
            rank.discount(suspended, now)

    def statuses(self) -> tuple[RankStatus, ...]:
        """The last status of each rank, with its current memory from the process table."""
        return tuple(replace(rank.status, memory=processes.resident_memory(rank.process.pid)) for rank in self.ranks)

    def kill(self) -> None:
        """Kill every rank; ``exited`` tells when all are gone."""
        self.killed_at = time.monotonic()
        for rank in self.ranks:
            self._events.forget(rank.control.fileno())
            rank.control.close()
            if rank.process.returncode is None:
                rank.process.kill()


def _set_or_remove(environment: dict[str, str], name: str, value: str | None) -> None:
    """Set a variable, or remove it if ``value`` is None."""
    environment.pop(name, None)
    if value is not None:
        environment[name] = value
