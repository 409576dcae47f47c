"""The process that owns the socket, the queue and the ranks, and answers even when every rank is dead.

One thread, no torch, and never a blocking call: it reads a request's header, and when its turn comes
hands the connection to rank 0. It keeps a descriptor of it only to notice that the client hung up.
From then on it writes nothing to it: when ranks fail, the connection is shut down and the client asks
for the ``Outcome`` on another one.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from . import control, layout, procs, wire
from .endpoint import Endpoint, listen, peer
from .errors import BackendError, BackendUnavailable, Cancelled, InvalidRequest, ProtocolError, QueueFull
from .intake import Intake, answer, refuse
from .messages import Cancel, Devices, Done, Error, Outcome, Progress, RankRequest, Status, StatusQuery, Stop
from .poller import HANG_UP, Poller
from .rankset import Failure, Patience, RankSet

log = logging.getLogger(__name__)

TICK = 0.25
WORKER = (sys.executable, "-m", "parallel_backend.worker")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of the queue and seconds of patience.

    ``cancel``: until a running request must have ended after its cancel. ``agree``: until rank 0 must have
    ended a request that another rank ended with an error. ``end``: until ended ranks must be gone.
    """

    queue: int = 16
    outcomes: int = 64
    cancel: float = 120.0
    agree: float = 10.0
    end: float = 10.0
    sign_of_life: float = 5.0
    patience: Patience = field(default_factory=Patience)


@dataclass(kw_only=True)
class Job:
    """A request on its way, with its client's connection."""

    request: RankRequest
    header: bytes
    connection: socket.socket
    devices: Devices
    cancelled: float | None = None
    dissent: tuple[float, int, control.Finished] | None = None


class Supervisor:
    """Serves one endpoint until it is stopped or nobody asked for ranks for ``idle_timeout`` seconds (0: ever)."""

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        idle_timeout: float,
        command: Sequence[str] = WORKER,
        limits: Limits | None = None,
        uid_of: Callable[[socket.socket], int] = lambda sock: peer(sock)[1],
    ) -> None:
        self._endpoint, self._idle_timeout = endpoint, idle_timeout
        self._command, self._limits = command, limits or Limits()
        self._poller = Poller()
        self._lock, listener = listen(endpoint, backlog=64)
        self._intake = Intake(
            listener=listener, uid=os.getuid(), poller=self._poller, on_frame=self._dispatch, uid_of=uid_of
        )
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._set: RankSet | None = None
        self._ending: list[RankSet] = []
        self._generation = 0
        self._layout: layout.ParallelLayout | None = None
        self._outcomes: OrderedDict[str, Done | Error] = OrderedDict()
        self._stopping: list[socket.socket] | None = None
        self._used = self._signed = time.monotonic()

    def serve(self) -> None:
        """Run until stopped; every rank is gone when it returns, or was killed ``Limits.end`` seconds ago."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        log.info("serving at %s, pid %d", self._endpoint.socket, os.getpid())
        try:
            while self._stopping is None:
                self._poller.run_once(TICK)
                self._tick()
        finally:
            self._shut_down()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        log.info("%s received", signal.Signals(number).name)
        self._stopping = self._stopping or []

    # What clients ask

    def _dispatch(self, sock: socket.socket, frame: wire.Frame) -> None:
        message = frame.message
        if isinstance(message, RankRequest):
            self._enqueue(sock, frame)
        elif isinstance(message, Stop):
            self._stopping = [*(self._stopping or []), sock]
        else:
            self._reply(sock, message)

    def _reply(self, sock: socket.socket, message: object) -> None:
        if isinstance(message, StatusQuery):
            answer(sock, self.status())
        elif isinstance(message, Cancel):
            self._cancel(message.request_id)
            answer(sock, Done())
        elif isinstance(message, Outcome):
            unknown = Error(code="failure", message=f"the backend does not know request {message.request_id}")
            answer(sock, self._outcomes.get(message.request_id, unknown))
        else:
            text = f"{type(message).__name__} is no request"
            answer(sock, Error(code=ProtocolError.code, message=text))
        sock.close()

    def status(self) -> Status:
        """The backend at this moment."""
        waiting = bool(self._queue)
        starting = waiting and self._running is None
        return Status(
            pid=os.getpid(),
            protocol=wire.VERSION,
            generation=self._generation,
            state="stopping" if self._stopping is not None else "starting" if starting else
            "busy" if self._running else "idle",
            running=self._running.request.request_id if self._running else None,
            queued=tuple(job.request.request_id for job in self._queue),
            layout=self._layout,
            idle_timeout=self._idle_timeout,
            memory=procs.memory(os.getpid()),
            ranks=self._set.statuses() if self._set else (),
        )  # fmt: skip

    # The queue

    def _enqueue(self, sock: socket.socket, frame: wire.Frame) -> None:
        request = frame.message
        try:
            if len(self._queue) >= self._limits.queue:
                raise QueueFull(f"{len(self._queue)} requests wait already: try again when some are done")
            devices = _needed(request)
        except BackendError as error:
            refuse(sock, error)
            return
        header = wire.pack(frame)[wire.PREFIX.size :]
        job = Job(request=request, header=header, connection=sock, devices=devices)
        self._queue.append(job)
        self._poller.watch(sock.fileno(), HANG_UP, lambda: self._hung_up(job))
        self._sign_of_life(job)
        self._pump()

    def _sign_of_life(self, job: Job) -> None:
        ahead = self._queue.index(job) + (self._running is not None)
        answer(job.connection, Progress(phase="queued" if ahead else "start", value=0, total=max(1, ahead)))

    def _hung_up(self, job: Job) -> None:
        self._poller.forget(job.connection.fileno())
        log.debug("the client of request %s hung up", job.request.request_id)
        self._cancel(job.request.request_id)

    def _cancel(self, request_id: str) -> None:
        job = self._running
        if job and job.request.request_id == request_id and self._set and job.cancelled is None:
            job.cancelled = time.monotonic()
            self._set.cancel(request_id)
        for job in [job for job in self._queue if job.request.request_id == request_id]:
            self._queue.remove(job)
            self._finish_unrun(job, Cancelled("the request was cancelled before its turn came"))

    def _finish_unrun(self, job: Job, error: BackendError) -> None:
        answer(job.connection, Error(code=error.code, message=str(error)))
        self._close(job, Error(code=error.code, message=str(error)))

    def _close(self, job: Job, outcome: Done | Error) -> None:
        self._used = time.monotonic()
        self._outcomes[job.request.request_id] = outcome
        while len(self._outcomes) > self._limits.outcomes:
            self._outcomes.popitem(last=False)
        self._poller.forget(job.connection.fileno())
        job.connection.close()

    def _pump(self) -> None:
        if self._running or not self._queue or self._stopping is not None:
            return
        job = self._queue[0]
        if self._set and not self._set.covers(job.devices):
            self._end_set()
        if self._set is None:
            self._start_set(job.devices)
        elif self._set.ready:
            self._queue.popleft()
            self._running = job
            self._layout = _layout_of(job) or self._layout
            self._set.run(job.header, job.connection)

    # The ranks

    def _start_set(self, devices: Devices) -> None:
        if any(not ended.gone for ended in self._ending):
            return
        self._ending.clear()
        self._generation += 1
        self._set = RankSet(
            generation=self._generation,
            devices=devices,
            endpoint=self._endpoint,
            command=self._command,
            patience=self._limits.patience,
            poller=self._poller,
            on_finished=self._on_finished,
        )

    def _end_set(self) -> None:
        if self._set:
            self._set.end()
            self._ending.append(self._set)
            self._set = None

    def _on_finished(self, rank: int, finished: control.Finished) -> None:
        job = self._running
        if not self._set or not job or finished.request_id != job.request.request_id:
            return
        if finished.code not in (control.DONE, InvalidRequest.code, Cancelled.code):
            self._set.raised(rank, finished)
        elif rank == 0:
            self._running = None
            self._close(job, Done() if finished.code == control.DONE else _error(finished))
            self._pump()
        elif finished.code != control.DONE:
            job.dissent = (time.monotonic(), rank, finished)

    def _tick(self) -> None:
        self._intake.tick()
        failure = self._set.verdict() if self._set else None
        if failure is None and self._running:
            failure = self._overdue(self._running)
        if failure:
            self._fail(failure)
        self._give_up_on_ended()
        now = time.monotonic()
        if now - self._signed > self._limits.sign_of_life:
            self._signed = now
            for job in self._queue:
                self._sign_of_life(job)
        self._pump()
        if self._running or self._queue:
            self._used = now
        elif self._idle_timeout and now - self._used > self._idle_timeout and not self._intake.accept():
            log.info("idle for %g s", self._idle_timeout)
            self._stopping = []

    def _overdue(self, job: Job) -> Failure | None:
        now = time.monotonic()
        if job.cancelled and now - job.cancelled > self._limits.cancel:
            text = f"the ranks did not end a cancelled request within {self._limits.cancel:g} s"
            return Failure(kind=0, code="rank_failed", message=text)
        if job.dissent and now - job.dissent[0] > self._limits.agree:
            _, rank, finished = job.dissent
            text = f"rank {rank} alone ended the request: {finished.message}"
            return Failure(kind=0, code="rank_failed", message=text)
        return None

    def _give_up_on_ended(self) -> None:
        for ended in self._ending:
            overdue = time.monotonic() - (ended.ended or 0) - self._limits.end
            if not ended.gone and overdue > 0:
                log.error("ranks of generation %d do not end although they were killed", ended.generation)
                self._ending.remove(ended)
                return

    def _fail(self, failure: Failure) -> None:
        error = Error(code=failure.code, message=failure.message)
        log.error("generation %d ends: %s", self._generation, failure.message)
        ready = bool(self._set and self._set.ready)
        self._end_set()
        if self._running:
            job, self._running = self._running, None
            connection = job.connection.dup()
            self._close(job, error)
            _shut(connection)
        elif self._queue and not ready:
            job = self._queue.popleft()
            answer(job.connection, error)
            self._close(job, error)

    def _shut_down(self) -> None:
        self._endpoint.socket.unlink(missing_ok=True)
        stopped = BackendUnavailable("the backend was stopped")
        waiting, self._stopping = self._stopping or [], self._stopping or []
        if self._running:
            self._fail(Failure(kind=0, code=stopped.code, message=str(stopped)))
        self._end_set()
        for job in list(self._queue):
            self._finish_unrun(job, stopped)
        self._queue.clear()
        self._intake.close()
        end = time.monotonic() + self._limits.end
        while any(not ended.gone for ended in self._ending) and time.monotonic() < end:
            self._poller.run_once(TICK)
        for sock in waiting:
            answer(sock, Done())
            sock.close()
        os.close(self._lock)
        log.info("ended")


def _shut(connection: socket.socket) -> None:
    with connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.info("a client was gone before its request failed")


def _error(finished: control.Finished) -> Error:
    return Error(code=finished.code, message=finished.message)


def _needed(request: RankRequest) -> Devices:
    """The devices of a request: those its layout uses, or all.

    Raises:
        InvalidRequest: there are none, or fewer than the layout needs.
    """
    spec = request.model
    if not spec.devices.indices:
        raise InvalidRequest("no device was given: name at least one")
    if spec.layout is None:
        return spec.devices
    spec.layout.check_fits(len(spec.devices.indices))
    return Devices(kind=spec.devices.kind, indices=spec.devices.indices[: spec.layout.ranks])


def _layout_of(job: Job) -> layout.ParallelLayout | None:
    branches = getattr(job.request, "branches", None)
    if branches is None:
        return job.request.model.layout
    return job.request.model.layout or layout.auto(len(job.devices.indices), branches=branches)
