"""The process that owns the socket, the queue and the ranks, and that answers even when every rank is dead.

It imports no torch and never blocks. One thread does everything but write the logs. It reads a request's header and,
when the request's turn comes, passes the connection to rank 0. It keeps its own descriptor of the connection only to
notice when the client disconnects, and writes nothing more to it. When ranks fail, it shuts the connection down, and
the client asks for the ``Outcome`` on another one.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Literal

from .. import processes
from ..errors import BackendError, BackendFailure, BackendUnavailable, Cancelled, ProtocolError, RankFailed
from ..layout.parallel_layout import ParallelLayout
from ..protocol import frames, rank_control
from ..protocol.endpoint import REQUEST_LOG, Endpoint, listen, peer
from ..protocol.fingerprint import fingerprint
from ..protocol.messages import Cancel, Done, Error, Outcome, RankRequest, Stop, Unload
from ..protocol.model_spec import Devices
from ..protocol.status import Status, StatusQuery
from . import request_lines
from .event_loop import EventLoop
from .failures import STUCK
from .generations import Generations
from .limits import Limits
from .listener import Listener, answer, refuse
from .log_files import LogFiles
from .overdue import overdue
from .request_queue import EarlyFailure, QueuedRequest, RequestQueue
from .spares import Spares

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two checks of ranks, deadlines and idle time."""
RANK_COMMAND = (sys.executable, "-m", "parallel_backend.rank")


class Supervisor:
    """Serves one endpoint until it is stopped, or idle for ``idle_timeout`` seconds (0 means no limit).

    Attributes:
        logs: the files in the endpoint's log folder.

    Raises:
        BackendUnavailable: another supervisor serves the endpoint.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        idle_timeout: float,
        command: Sequence[str] = RANK_COMMAND,
        limits: Limits | None = None,
        uid_of: Callable[[socket.socket], int] = lambda sock: peer(sock)[1],
    ) -> None:
        self._endpoint, self._idle_timeout = endpoint, idle_timeout
        self._limits = limits or Limits()
        self._events = EventLoop()
        self._lock, listener = listen(endpoint, backlog=64)
        self._socket_stat = endpoint.socket.stat()
        self.logs = LogFiles(endpoint.logs)
        self._listener = Listener(
            listener=listener, uid=os.getuid(), events=self._events, on_frame=self._dispatch, uid_of=uid_of
        )
        self._queue = RequestQueue(
            size=self._limits.queue,
            outcomes=self._limits.outcomes,
            events=self._events,
            on_disconnect=lambda request: self._cancel(request.id),
            on_end=self._log_end,
        )
        self._spares = Spares(endpoint=endpoint, command=command, number=self._limits.spares, events=self._events)
        self._generations = Generations(
            logs=self.logs,
            command=command,
            patience=self._limits.patience,
            exit_patience=self._limits.end,
            events=self._events,
            on_finished=self._on_finished,
            take_spares=self._spares.take,
        )
        self._layout: ParallelLayout | None = None
        self._stopping: list[socket.socket] | None = None  # once set, connections that wait for the end
        self._last_keepalive = time.monotonic()
        self._program = fingerprint()

    def serve(self) -> None:
        """Run until stopped. On return, every process has exited, or was killed ``Limits.end`` seconds ago."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        log.info("serving at %s, pid %d", self._endpoint.socket, os.getpid())
        try:
            while self._stopping is None:
                self._events.run_once(TICK)
                self._guard(self._tick)
        finally:
            self._shut_down()

    def _guard(self, step: Callable[[], None]) -> None:
        """Take a step for the request whose turn it is. An exception ends that request and its ranks, and no more."""
        try:
            step()
        except Exception as error:
            first = self._queue.first
            if not (self._queue.running or first or self._generations.current):
                raise  # no client is the cause
            self._events.count(error)
            failed = Error(code=BackendFailure.code, message=f"the backend failed: {type(error).__name__}: {error}")
            self._fail_ranks(failed)
            if first and first in self._queue.queued:
                self._queue.end_queued(first, failed)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        log.info("%s received", signal.Signals(number).name)
        self._stopping = self._stopping or []

    # Messages of clients

    def _dispatch(self, sock: socket.socket, frame: frames.Frame) -> None:
        message = frame.message
        if isinstance(message, RankRequest):
            self._handle_request(sock, frame)
        elif isinstance(message, Stop):
            self._stopping = [*(self._stopping or []), sock]
        else:
            self._answer_query(sock, message)

    def _answer_query(self, sock: socket.socket, message: object) -> None:
        if isinstance(message, StatusQuery):
            answer(sock, self.status())
        elif isinstance(message, Cancel):
            self._cancel(message.request_id)
            answer(sock, Done())
        elif isinstance(message, Outcome):
            answer(sock, self._queue.outcome(message.request_id))
        else:
            text = f"{type(message).__name__} is not a request"
            answer(sock, Error(code=ProtocolError.code, message=text))
        sock.close()

    def status(self) -> Status:
        """The current status of the backend."""
        running = self._queue.running
        return Status(
            pid=os.getpid(),
            protocol=frames.VERSION,
            generation=self._generations.number,
            state=self._state(),
            running=running.id if running else None,
            queued=tuple(request.id for request in self._queue.queued),
            layout=self._layout,
            idle_timeout=self._idle_timeout,
            memory=processes.resident_memory(os.getpid()),
            ranks=self._generations.current.statuses() if self._generations.current else (),
            logs=str(self._endpoint.logs),
            log_problem=self.logs.problem,
            spares=self._spares.statuses(),
            internal_errors=self._events.internal_errors,
        )

    def _state(self) -> Literal["idle", "starting", "busy", "stopping"]:
        if self._stopping is not None:
            return "stopping"
        if self._queue.running:
            return "busy"
        return "starting" if self._queue.first else "idle"

    # The queue

    def _handle_request(self, sock: socket.socket, frame: frames.Frame) -> None:
        if frame.program != self._program:
            self._yield_to_client(sock, frame.message)
        else:
            self._enqueue(sock, frame)

    def _yield_to_client(self, sock: socket.socket, message: object) -> None:
        """The client runs different code: end, so that it starts a backend from its own files, or refuse while busy."""
        if self._queue.running or self._queue.first:
            busy = "the backend is busy and runs different code from this ComfyUI: try again later"
            refuse(sock, BackendUnavailable(busy))
            return
        log.info("ending: the extension's files have changed, and a client runs different code")
        self._endpoint.socket.unlink(missing_ok=True)
        self._stopping = self._stopping or []
        if isinstance(message, Unload):
            answer(sock, Done())
        sock.close()

    def _enqueue(self, sock: socket.socket, frame: frames.Frame) -> None:
        try:
            self._queue.add(sock, frame)
        except BackendError as error:
            self.logs.write(REQUEST_LOG, request_lines.of_refused(frame.message, frame.tensors, error.code))
            return refuse(sock, error)
        self._guard(self._run_next)

    def _log_end(self, request: QueuedRequest, outcome: Done | Error) -> None:
        code = outcome.code if isinstance(outcome, Error) else rank_control.DONE
        ranks = self._generations.current.ranks if self._generations.current else []
        line = request_lines.of_request(request, code, ranks[0].status.models if ranks else ())
        self.logs.write(REQUEST_LOG, line)

    def _cancel(self, request_id: str) -> None:
        running = self._queue.running
        if running and running.id == request_id and running.cancelled_at is None and self._generations.current:
            running.cancelled_at = time.monotonic()
            self._generations.current.cancel(request_id)
        for request in self._queue.queued:
            if request.id == request_id:
                self._queue.end_queued(request, Cancelled("the request was cancelled before it ran"))

    def _run_next(self) -> None:
        request = self._queue.first
        if request is None or self._queue.running or self._stopping is not None:
            return
        covered = self._generations.current is not None and self._generations.current.covers(request.devices)
        if isinstance(request.message, Unload) and not covered:
            # No rank holds the model, so there is nothing to free, and no reason to start or kill ranks.
            self._queue.end_queued(request, Done())
            self._run_next()
            return
        if not (covered and self._generations.current and self._generations.current.ready):
            request.first_at = request.first_at or time.monotonic()
        if not covered:
            self._generations.kill()
        if self._generations.current is None:
            self._start_ranks(request.devices)
        elif self._generations.current.ready:
            self._queue.take()
            self._layout = request.layout or self._layout
            self._generations.current.run(request.header, request.connection)

    # The ranks

    def _start_ranks(self, devices: Devices) -> None:
        try:
            self._generations.start(devices)
        except OSError as error:
            message, ranks = f"the ranks do not start: {error}", tuple(range(len(devices.indices)))
            self._fail_ranks(Error(code=RankFailed.code, message=message, not_started=ranks))

    def _on_finished(self, rank: int, finished: rank_control.Finished) -> None:
        request = self._queue.running
        if self._generations.current and finished.code not in rank_control.RECOVERABLE:
            # Even after rank 0 has answered, since this rank will run nothing more.
            self._generations.current.record_error(rank, finished)
        elif not self._generations.current or not request or finished.request_id != request.id:
            return
        elif rank == 0:
            request.finished = finished
            error = Error(code=finished.code, message=finished.message)
            self._queue.end_running(Done() if finished.code == rank_control.DONE else error, answered=True)
            self._run_next()
        elif finished.code != rank_control.DONE:
            request.early_failure = EarlyFailure(at=time.monotonic(), rank=rank, finished=finished)

    def _tick(self) -> None:
        self._listener.tick()
        failure = self._generations.current.verdict() if self._generations.current else None
        if self._queue.running and (failure is None or failure.kind == STUCK):
            failure = overdue(self._queue.running, self._limits, stuck=failure is not None) or failure
        if failure:
            self._fail_ranks(Error(code=failure.code, message=failure.message, not_started=failure.not_started))
        self._generations.forget_exited()
        now = time.monotonic()
        if now - self._last_keepalive > self._limits.keepalive_interval:
            self._last_keepalive = now
            self._queue.send_keepalives()
        self._run_next()
        self._spares.tick(idle=self._queue.unused_for(now) > self._limits.idle)
        self._stop_if_unused(now)

    def _stop_if_unused(self, now: float) -> None:
        """Stop after the idle timeout, or when the socket has gone and the running request has ended."""
        if self._is_idle(now):
            log.info("idle for %g s", self._idle_timeout)
            self._stopping = []
        elif not self._endpoint.has_socket(self._socket_stat) and not self._queue.running:
            log.warning("ending: %s was removed or replaced, so no client can connect", self._endpoint.socket)
            self._stopping = self._stopping or []

    def _is_idle(self, now: float) -> bool:
        if not self._idle_timeout or self._queue.unused_for(now) <= self._idle_timeout:
            return False
        # A client that has just connected may be about to send a request.
        return not self._listener.accept() and not self._listener.pending

    def _fail_ranks(self, error: Error) -> None:
        if self._queue.running and self._queue.running.cancelled_at:  # or its client would go on with it
            error = Error(code=Cancelled.code, message=f"the request was cancelled, and then {error.message}")
        log.error("killing generation %d: %s", self._generations.number, error.message)
        current = self._generations.current
        # Spare ranks may have died unnoticed, or have failed in a way that new processes do not.
        may_retry = bool(current and (current.ready or current.uses_spares))
        self._generations.kill()
        first = self._queue.first
        if self._queue.running:
            self._queue.end_running(error, answered=False)
        elif first and not may_retry:
            self._queue.end_queued(first, error)

    def _shut_down(self) -> None:
        if self._endpoint.has_socket(self._socket_stat):
            self._endpoint.socket.unlink(missing_ok=True)
        self._stopping = self._stopping or []
        stopped = BackendUnavailable("the backend was stopped")
        self._queue.end_running(Error(code=stopped.code, message=str(stopped)), answered=False)
        for request in self._queue.queued:
            self._queue.end_queued(request, stopped)
        self._generations.kill()
        self._spares.kill()
        self._listener.close()
        overdue = time.monotonic() + self._limits.end
        while self._generations.forget_exited() or not (self._spares.exited or time.monotonic() > overdue):
            self._events.run_once(TICK)
        for sock in self._stopping:
            answer(sock, Done())
            sock.close()
        log.info("ended")
        self.logs.close()
        os.close(self._lock)
