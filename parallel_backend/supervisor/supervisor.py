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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

from .. import processes
from ..errors import BackendError, BackendUnavailable, Cancelled, ProtocolError, RankFailed
from ..layout.parallel_layout import ParallelLayout
from ..protocol import frames, rank_control
from ..protocol.endpoint import Endpoint, listen, peer
from ..protocol.fingerprint import fingerprint
from ..protocol.messages import Cancel, Devices, Done, Error, Outcome, RankRequest, Status, StatusQuery, Stop, Unload
from .event_loop import EventLoop
from .generations import Generations
from .listener import Listener, answer, refuse
from .rank_set import Failure, Patience
from .request_queue import QueuedRequest, RequestQueue

log = logging.getLogger(__name__)

TICK = 0.25
WORKER = (sys.executable, "-m", "parallel_backend.rank")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of the queue and seconds of patience.

    ``cancel``: until a running request must have ended after its cancel. ``agree``: until rank 0 must have
    ended a request that another rank refused (it may be waiting for a client that does not read).
    ``end``: until ended ranks must be gone.
    """

    queue: int = 16
    outcomes: int = 64
    cancel: float = 120.0
    agree: float = 70.0
    end: float = 10.0
    sign_of_life: float = 5.0
    patience: Patience = field(default_factory=Patience)


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
        self._limits = limits or Limits()
        self._events = EventLoop()
        self._lock, listener = listen(endpoint, backlog=64)
        self._socket = endpoint.socket.stat()
        self._intake = Listener(
            listener=listener, uid=os.getuid(), events=self._events, on_frame=self._dispatch, uid_of=uid_of
        )
        self._queue = RequestQueue(
            size=self._limits.queue,
            outcomes=self._limits.outcomes,
            events=self._events,
            on_hang_up=lambda job: self._cancel(job.id),
        )
        self._sets = Generations(
            endpoint=endpoint,
            command=command,
            patience=self._limits.patience,
            limit=self._limits.end,
            events=self._events,
            on_finished=self._on_finished,
        )
        self._layout: ParallelLayout | None = None
        self._stopping: list[socket.socket] | None = None
        self._signed = time.monotonic()
        self._program = fingerprint()

    def serve(self) -> None:
        """Run until stopped; every rank is gone when it returns, or was killed ``Limits.end`` seconds ago."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        log.info("serving at %s, pid %d", self._endpoint.socket, os.getpid())
        try:
            while self._stopping is None:
                self._events.run_once(TICK)
                self._tick()
        finally:
            self._shut_down()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        log.info("%s received", signal.Signals(number).name)
        self._stopping = self._stopping or []

    # What clients ask

    def _dispatch(self, sock: socket.socket, frame: frames.Frame) -> None:
        message = frame.message
        if isinstance(message, RankRequest):
            self._take(sock, frame)
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
            answer(sock, self._queue.outcome(message.request_id))
        else:
            text = f"{type(message).__name__} is no request"
            answer(sock, Error(code=ProtocolError.code, message=text))
        sock.close()

    def status(self) -> Status:
        """The backend at this moment."""
        running = self._queue.running
        return Status(
            pid=os.getpid(),
            protocol=frames.VERSION,
            generation=self._sets.number,
            state=self._state(),
            running=running.id if running else None,
            queued=tuple(job.id for job in self._queue.waiting),
            layout=self._layout,
            idle_timeout=self._idle_timeout,
            memory=processes.memory(os.getpid()),
            ranks=self._sets.current.statuses() if self._sets.current else (),
        )

    def _state(self) -> Literal["idle", "starting", "busy", "stopping"]:
        if self._stopping is not None:
            return "stopping"
        if self._queue.running:
            return "busy"
        return "starting" if self._queue.first else "idle"

    # The queue

    def _take(self, sock: socket.socket, frame: frames.Frame) -> None:
        if frame.program != self._program:
            self._give_way(sock, frame.message)
        else:
            self._enqueue(sock, frame)

    def _give_way(self, sock: socket.socket, message: object) -> None:
        """The client's files are not those this process was started from: the client is to start anew from its own."""
        if self._queue.running or self._queue.first:
            refuse(sock, BackendUnavailable("the backend is busy, and runs other code than this ComfyUI: try again"))
            return
        log.info("the extension has changed: a client of other code is here")
        self._endpoint.socket.unlink(missing_ok=True)
        self._stopping = self._stopping or []
        if isinstance(message, Unload):
            answer(sock, Done())
        sock.close()

    def _enqueue(self, sock: socket.socket, frame: frames.Frame) -> None:
        try:
            self._queue.add(sock, frame)
        except BackendError as error:
            refuse(sock, error)
        else:
            self._pump()

    def _cancel(self, request_id: str) -> None:
        running = self._queue.running
        if running and running.id == request_id and running.cancelled is None and self._sets.current:
            running.cancelled = time.monotonic()
            self._sets.current.cancel(request_id)
        for job in self._queue.waiting:
            if job.id == request_id:
                self._queue.settle(job, Cancelled("the request was cancelled before its turn came"))

    def _pump(self) -> None:
        job = self._queue.first
        if job is None or self._queue.running or self._stopping is not None:
            return
        covered = self._sets.current is not None and self._sets.current.covers(job.devices)
        if isinstance(job.request, Unload) and not covered:
            # There is nothing to free, and no reason to start or to end ranks.
            self._queue.settle(job, Done())
            self._pump()
            return
        if not covered:
            self._sets.end()
        if self._sets.current is None:
            self._start_set(job.devices)
        elif self._sets.current.ready:
            self._queue.take()
            self._layout = job.layout or self._layout
            self._sets.current.run(job.header, job.connection)

    # The ranks

    def _start_set(self, devices: Devices) -> None:
        try:
            self._sets.start(devices)
        except OSError as error:
            self._fail(Error(code=RankFailed.code, message=f"the ranks cannot be started: {error}"))

    def _on_finished(self, rank: int, finished: rank_control.Finished) -> None:
        job = self._queue.running
        if self._sets.current and finished.code not in rank_control.HARMLESS:
            # Also after rank 0 has answered: that rank will do nothing more.
            self._sets.current.raised(rank, finished)
        elif not self._sets.current or not job or finished.request_id != job.id:
            return
        elif rank == 0:
            done = finished.code == rank_control.DONE
            self._queue.finish(Done() if done else Error(code=finished.code, message=finished.message), answered=True)
            self._pump()
        elif finished.code != rank_control.DONE:
            job.dissent = (time.monotonic(), rank, finished)

    def _tick(self) -> None:
        self._intake.tick()
        failure = self._sets.current.verdict() if self._sets.current else None
        if failure is None and self._queue.running:
            failure = self._overdue(self._queue.running)
        if failure:
            self._fail(Error(code=failure.code, message=failure.message))
        self._sets.bury()
        now = time.monotonic()
        if now - self._signed > self._limits.sign_of_life:
            self._signed = now
            self._queue.signs_of_life()
        self._pump()
        if self._idle(now):
            log.info("idle for %g s", self._idle_timeout)
            self._stopping = []
        elif not self._endpoint.listens(self._socket) and not self._queue.running:
            log.warning("%s is no longer ours: nobody can reach this backend any more", self._endpoint.socket)
            self._stopping = self._stopping or []

    def _idle(self, now: float) -> bool:
        if not self._idle_timeout or self._queue.running or self._queue.first:
            return False
        return now - self._queue.used > self._idle_timeout and not self._intake.accept() and not self._intake.pending

    def _overdue(self, job: QueuedRequest) -> Failure | None:
        now = time.monotonic()
        if job.cancelled and now - job.cancelled > self._limits.cancel:
            return Failure(message=f"the ranks did not end a cancelled request within {self._limits.cancel:g} s")
        if job.dissent and now - job.dissent[0] > self._limits.agree:
            _, rank, finished = job.dissent
            return Failure(message=f"rank {rank} alone ended the request: {finished.message}")
        return None

    def _fail(self, error: Error) -> None:
        log.error("generation %d ends: %s", self._sets.number, error.message)
        started = bool(self._sets.current and self._sets.current.ready)
        self._sets.end()
        waiting = self._queue.first
        if self._queue.running:
            self._queue.finish(error, answered=False)
        elif waiting and not started:
            self._queue.settle(waiting, error)

    def _shut_down(self) -> None:
        if self._endpoint.listens(self._socket):
            self._endpoint.socket.unlink(missing_ok=True)
        waiting, self._stopping = self._stopping or [], self._stopping or []
        stopped = BackendUnavailable("the backend was stopped")
        self._queue.finish(Error(code=stopped.code, message=str(stopped)), answered=False)
        for job in self._queue.waiting:
            self._queue.settle(job, stopped)
        self._sets.end()
        self._intake.close()
        while self._sets.bury():
            self._events.run_once(TICK)
        for sock in waiting:
            answer(sock, Done())
            sock.close()
        os.close(self._lock)
        log.info("ended")
