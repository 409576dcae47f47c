"""One generation of rank processes: started together, watched together, ended together."""

import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from .. import processes
from ..errors import OutOfMemory, RankFailed
from ..protocol import rank_control
from ..protocol.endpoint import Endpoint
from ..protocol.messages import Devices, RankStatus
from .event_loop import READ, EventLoop

log = logging.getLogger(__name__)

DIED, HUNG, OUT_OF_MEMORY, RAISED, BY_PEER = range(5)
"""Kinds of failure, the likeliest cause first: when a rank dies, the others soon raise for want of it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a set had to end. ``code`` is one of ``errors``."""

    message: str
    kind: int = RAISED
    code: str = RankFailed.code


ASLEEP = 2.0
"""Seconds between two looks at the ranks from which on this process itself was stopped."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds until a rank is given up.

    ``hang``: no heartbeat, and the process does not move either. ``stall``: no heartbeat from a process
    that computes, reads from a disk or waits for a core (a long call that keeps Python's lock, a busy machine).
    ``evidence``: from the first failure to the verdict, so that a rank that died is named rather than one that
    missed it; ``blame`` is the same while all failures look like another rank's.
    """

    start: float = 120.0
    hang: float = 8.0
    stall: float = 120.0
    evidence: float = 0.5
    blame: float = 4.0


@dataclass(kw_only=True)
class Rank:
    """One rank as its supervisor sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    pidfd: int
    status: RankStatus
    ready: bool = False
    beat: float = field(default_factory=time.monotonic)
    moved: float = 0.0
    ticks: int | None = None

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"rank {self.rank} (pid {self.process.pid})"


class RankSet:
    """``len(devices.indices)`` ranks; reports the first cause of their failure.

    ``command`` starts a worker and takes its options appended. ``on_finished`` is called with a rank's
    number and its ``Finished``.
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
        self._started = self._looked = time.monotonic()
        self._failures: list[tuple[float, Failure]] = []
        self.ranks: list[Rank] = []
        self.ended: float | None = None

    def start(self) -> None:
        """Start the processes; ``ready`` says when they stand.

        Raises:
            OSError: one cannot be started. Those that were are still to be ended.
        """
        with socket.create_server(("127.0.0.1", 0)) as store:
            port = store.getsockname()[1]
            for rank in range(len(self.devices.indices)):
                self.ranks.append(self._start(rank, port, store.fileno()))

    def _start(self, rank: int, port: int, store: int) -> Rank:
        ours, theirs = rank_control.pair()
        passed = [theirs.fileno()] + ([store] if rank == 0 else [])
        command = [*self._command, "--control-fd", str(theirs.fileno()), "--device", self._device(rank)]
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
                pass_fds=passed,
                env=self._environment(rank, port),
            )
        status = RankStatus(rank=rank, pid=process.pid, device=self._device(rank), memory=0)
        started = Rank(rank=rank, process=process, control=ours, pidfd=os.pidfd_open(process.pid), status=status)
        self._events.watch(ours.fileno(), READ, lambda: self._hear(started))
        self._events.watch(started.pidfd, READ, lambda: self._bury(started))
        log.info("generation %d: %s on %s started", self.generation, started.name, status.device)
        return started

    def _device(self, rank: int) -> str:
        return "cpu" if self.devices.kind == "cpu" else f"cuda:{self.devices.indices[rank]}"

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        world = len(self.devices.indices)
        environment = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world)),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if self.devices.kind == "cuda":
            _put(environment, "CUDA_VISIBLE_DEVICES", self.devices.visible)
        # ComfyUI sets this allocator for its own process; ranks that inherit it run out of memory under NCCL.
        for name in environment.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
            kept = [option for option in environment[name].split(",") if option.strip() != "backend:cudaMallocAsync"]
            _put(environment, name, ",".join(kept) or None)
        return environment

    def covers(self, devices: Devices) -> bool:
        """Whether the set can serve a request for ``devices``: its first ranks sit on just those."""
        ours = replace(self.devices, indices=self.devices.indices[: len(devices.indices)])
        return ours == devices

    @property
    def ready(self) -> bool:
        """Whether every rank has joined the process group."""
        return bool(self.ranks) and all(rank.ready for rank in self.ranks)

    @property
    def gone(self) -> bool:
        """Whether every process has been reaped."""
        return all(rank.process.returncode is not None for rank in self.ranks)

    def run(self, header: bytes, connection: socket.socket) -> None:
        """Hand a request with its connection to rank 0."""
        message = rank_control.Run(header=msgspec.Raw(header))
        self._tell(message, descriptor=connection.fileno())

    def cancel(self, request_id: str) -> None:
        """Have rank 0 end a request at its next step."""
        self._tell(rank_control.CancelRun(request_id=request_id))

    def _tell(self, message: rank_control.ToRank, *, descriptor: int | None = None) -> None:
        first = self.ranks[0]
        try:
            rank_control.send(first.control, message, descriptor=descriptor)
        except OSError as error:
            self._fail(Failure(kind=BY_PEER, message=f"{first.name} takes no message: {error}"))

    def _hear(self, rank: Rank) -> None:
        try:
            message, _ = rank_control.receive(rank.control, rank_control.FromRank)
        except BlockingIOError:
            return
        except msgspec.DecodeError as error:
            self._fail(Failure(kind=RAISED, message=f"{rank.name} sent a message that does not decode: {error}"))
            return
        except ConnectionError:
            self._events.forget(rank.control.fileno())
            self._fail(Failure(kind=RAISED, message=f"{rank.name} closed its control socket"))
            return
        rank.beat, rank.ticks = time.monotonic(), None
        if isinstance(message, rank_control.Heartbeat):
            rank.status = replace(message.status, pid=rank.process.pid)
        elif isinstance(message, rank_control.Ready):
            rank.ready = True
        elif isinstance(message, rank_control.Finished):
            self._on_finished(rank.rank, message)

    def raised(self, rank: int, finished: rank_control.Finished) -> None:
        """Take note of a rank's error after which the set cannot be used."""
        kind = BY_PEER if finished.by_peer else RAISED
        kind = OUT_OF_MEMORY if finished.code == OutOfMemory.code else kind
        text = f"{self.ranks[rank].name} on {self._device(rank)} {finished.message}"
        text = f"{text} (log: {self._endpoint.rank_log(rank)})"
        self._fail(Failure(kind=kind, code=finished.code, message=text))

    def _bury(self, rank: Rank) -> None:
        self._events.forget(rank.pidfd)
        os.close(rank.pidfd)
        how = processes.describe_exit(rank.process.wait(timeout=5))
        if self.ended is not None:
            return
        path = self._endpoint.rank_log(rank.rank)
        said = processes.last_line(path) if rank.process.returncode > 0 else ""
        during = "" if rank.ready else " while starting"
        text = f"{rank.name} {how}{during}{': ' + said if said else ''} (log: {path})"
        self._fail(Failure(kind=DIED, message=text))

    def _fail(self, failure: Failure) -> None:
        if self.ended is None:
            log.error("generation %d: %s", self.generation, failure.message)
            self._failures.append((time.monotonic(), failure))

    def verdict(self) -> Failure | None:
        """The likeliest cause, once something failed and the others had time to say why."""
        self._look_for_hangs()
        if not self._failures:
            return None
        waited = time.monotonic() - self._failures[0][0]
        likeliest = min((failure for _, failure in self._failures), key=lambda failure: failure.kind)
        needed = {DIED: 0.0, BY_PEER: self._patience.blame}.get(likeliest.kind, self._patience.evidence)
        return likeliest if waited >= needed else None

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        if now - self._looked > ASLEEP:
            self._forgive(now - self._looked, now)
        self._looked = now
        late = [rank for rank in self.ranks if not rank.ready]
        if late and now - self._started > self._patience.start:
            names = " and ".join(rank.name for rank in late)
            text = f"{names} did not start within {self._patience.start:g} s"
            self._fail(Failure(kind=HUNG, message=text))
        for rank in self.ranks:
            if self._hangs(rank, now):
                text = f"{rank.name} stopped answering {now - rank.beat:.0f} s ago"
                self._fail(Failure(kind=HUNG, message=text))

    def _forgive(self, asleep: float, now: float) -> None:
        """This process did not run for a while; the ranks may have been stopped with it, and had nobody to tell."""
        self._started += asleep
        for rank in self.ranks:
            rank.beat, rank.ticks = min(now, rank.beat + asleep), None

    def _hangs(self, rank: Rank, now: float) -> bool:
        if not rank.ready or now - rank.beat < self._patience.hang / 4:
            return False
        pulse = processes.pulse(rank.process.pid)
        if pulse and (pulse.ticks != rank.ticks or pulse.would_move):
            rank.moved = rank.beat if rank.ticks is None and not pulse.would_move else now
            rank.ticks = pulse.ticks
        return now - max(rank.beat, rank.moved) > self._patience.hang or now - rank.beat > self._patience.stall

    def statuses(self) -> tuple[RankStatus, ...]:
        """What each rank said last, with the memory that the process table shows now."""
        return tuple(replace(rank.status, memory=processes.memory(rank.process.pid)) for rank in self.ranks)

    def end(self) -> None:
        """Kill every rank; ``gone`` says when they are."""
        self.ended = time.monotonic()
        for rank in self.ranks:
            self._events.forget(rank.control.fileno())
            rank.control.close()
            if rank.process.returncode is None:
                rank.process.kill()


def _put(environment: dict[str, str], name: str, value: str | None) -> None:
    """Set a variable, or with ``None`` leave it out."""
    environment.pop(name, None)
    if value is not None:
        environment[name] = value
