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
from ..errors import BackendError, BackendUnavailable, ProtocolError
from ..protocol import frames, rank_control
from ..protocol.endpoint import REQUEST_LOG, Endpoint, listen, peer
from ..protocol.fingerprint import fingerprint
from ..protocol.messages import Cancel, Done, Error, Expect, Outcome, RankRequest, Stop, Unload
from ..protocol.model_spec import Devices
from ..protocol.status import Status, StatusQuery
from . import request_lines
from .admission import refusal
from .event_loop import EventLoop
from .limits import Limits
from .listener import Listener, answer, refuse
from .log_files import LogFiles
from .other_machines import Machines, OtherMachines
from .ranks.expected_devices import expected_devices
from .ranks.generations import Generations
from .ranks.spares import Spares
from .request_queue import QueuedRequest, RequestQueue
from .request_runner import RequestRunner
from .work import work_of

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two checks of ranks, deadlines and idle time."""
RANK_COMMAND = (sys.executable, "-m", "parallel_backend.rank")


class Supervisor:
    """Serves one endpoint until it is stopped, or idle for ``idle_timeout`` seconds (0 means no limit).

    A function for ``idle_timeout`` is asked each time.

    Attributes:
        logs: the files in the endpoint's log folder.

    Raises:
        BackendUnavailable: another supervisor serves the endpoint.
        InvalidRequest: nothing can listen on the address for other machines.
        BackendFailure: the disk refuses the lock or the socket.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        idle_timeout: float | Callable[[], float],
        command: Sequence[str] | None = None,
        limits: Limits | None = None,
        uid_of: Callable[[socket.socket], int] = lambda sock: peer(sock)[1],
        machines: Machines | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._idle_timeout = idle_timeout if callable(idle_timeout) else lambda: idle_timeout
        self._limits = limits or Limits()
        self._events = EventLoop()
        self._lock, listener = listen(endpoint, backlog=64)
        self._socket_stat = endpoint.socket.stat()
        self.logs = LogFiles(endpoint.logs)
        self._others = self._let_in(machines) if machines else None
        self._listener = Listener(
            listener=listener, uid=os.getuid(), events=self._events, on_frame=self._dispatch, uid_of=uid_of
        )
        self._queue = self._make_queue()
        command = command or (machines.rank_command if machines else RANK_COMMAND)
        self._spares = Spares(
            command=command, number=self._limits.spares, events=self._events, log=endpoint.spare_log,
            devices=(machines and machines.devices) or expected_devices(),
        )  # fmt: skip
        self._generations = self._make_generations(command)
        self._runner = RequestRunner(
            queue=self._queue,
            generations=self._generations,
            limits=self._limits,
            events=self._events,
            may_start=lambda: self._stopping is None,
        )
        self._stopping: list[socket.socket] | None = None  # once set, connections that wait for the end
        self._last_keepalive = time.monotonic()
        self._program = fingerprint()

    def _make_queue(self) -> RequestQueue:
        return RequestQueue(
            size=self._limits.queue,
            outcomes=self._limits.outcomes,
            events=self._events,
            on_disconnect=lambda request: self._runner.cancel(request.id),
            on_end=self._log_end,
        )

    def _make_generations(self, command: Sequence[str]) -> Generations:
        return Generations(
            logs=self.logs,
            command=command,
            patience=self._limits.patience,
            exit_patience=self._limits.end,
            events=self._events,
            on_finished=lambda rank, finished: self._runner.finish(rank, finished),
            take_spares=self._spares.take,
            hosts=self._others,
        )

    def _let_in(self, machines: Machines) -> OtherMachines:
        try:
            return machines.begin(endpoint=self._endpoint, logs=self.logs, events=self._events)
        except BackendError:
            self._endpoint.socket.unlink()
            self.logs.close()
            os.close(self._lock)
            raise

    def serve(self) -> None:
        """Run until stopped. On return, every process has exited, or was killed ``Limits.end`` seconds ago."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        log.info("serving at %s, pid %d", self._endpoint.socket, os.getpid())
        try:
            while self._stopping is None:
                self._events.run_once(TICK)
                self._runner.guard(self._tick)
        finally:
            self._shut_down()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        log.info("%s received", signal.Signals(number).name)
        self._stopping = self._stopping or []

    # Messages of clients

    def _dispatch(self, sock: socket.socket, frame: frames.Frame) -> None:
        message = frame.message
        if isinstance(message, RankRequest):
            self._admit(sock, frame, message)
        elif isinstance(message, Stop):
            self._stopping = [*(self._stopping or []), sock]
        elif not self._is_of_others(sock, frame):
            self._answer_query(sock, frame)

    def _is_of_others(self, sock: socket.socket, frame: frames.Frame) -> bool:
        return self._others is not None and self._others.take(
            sock, frame.message, same_program=frame.program == self._program, store_port=self._generations.store_port
        )

    def _answer_query(self, sock: socket.socket, frame: frames.Frame) -> None:
        message = frame.message
        if isinstance(message, StatusQuery):
            answer(sock, self.status())
        elif isinstance(message, Expect):
            if frame.program == self._program:  # a request of another one ends this backend, or is refused
                self._expect(message.devices)
            answer(sock, Done())
        elif isinstance(message, Cancel):
            self._runner.cancel(message.request_id)
            answer(sock, Done())
        elif isinstance(message, Outcome):
            answer(sock, self._queue.outcome(message.request_id))
        else:
            return refuse(sock, ProtocolError(f"{type(message).__name__} is not a request"))
        sock.close()

    def _expect(self, devices: Devices) -> None:
        """Prepare ranks for a request on these devices, unless there are some, or others work."""
        self._queue.touch()
        current = self._generations.current
        if not self._queue.busy and not (current and current.covers(devices)):
            self._spares.expect(devices)

    def status(self) -> Status:
        """The current status of the backend."""
        running, current = self._queue.running, self._generations.current
        ranks = current.statuses() if current else ()
        status = Status(
            pid=os.getpid(),
            protocol=frames.VERSION,
            generation=self._generations.number,
            state=self._state(),
            running=running.id if running else None,
            queued=tuple(request.id for request in self._queue.queued),
            layout=self._runner.layout(ranks),
            idle_timeout=self._idle_timeout(),
            memory=processes.resident_memory(os.getpid()),
            ranks=ranks,
            logs=str(self._endpoint.logs),
            log_problem=self.logs.problem,
            spares=self._spares.statuses(),
            most_spares=self._limits.spares,
            internal_errors=self._events.internal_errors,
            work=work_of(running) if running else None,
        )
        return self._others.added_to(status) if self._others else status

    def _state(self) -> Literal["idle", "starting", "busy", "stopping"]:
        if self._stopping is not None:
            return "stopping"
        if self._queue.running or self._runner.settling:
            return "busy"
        return "starting" if self._queue.first else "idle"

    # The queue

    def _admit(self, sock: socket.socket, frame: frames.Frame, message: RankRequest) -> None:
        same_program = frame.program == self._program
        several = self._others is not None
        if error := refusal(message, for_several_machines=several, same_program=same_program, busy=self._queue.busy):
            refuse(sock, error)
        elif same_program:
            self._enqueue(sock, frame)
        else:
            self._yield_to_client(sock, message)

    def _yield_to_client(self, sock: socket.socket, message: RankRequest) -> None:
        """End, so that a client with different code starts a backend from its own files."""
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
        self._runner.guard(self._runner.run_next)

    def _log_end(self, request: QueuedRequest, outcome: Done | Error) -> None:
        code = outcome.code if isinstance(outcome, Error) else rank_control.DONE
        ranks = self._generations.current.ranks if self._generations.current else []
        line = request_lines.of_request(request, code, ranks[0].status.models if ranks else ())
        self.logs.write(REQUEST_LOG, line)

    # What is done from time to time

    def _tick(self) -> None:
        self._listener.tick()
        now = time.monotonic()
        unused = self._queue.unused_for(now) > self._limits.idle
        if self._others is not None:
            self._others.tick(idle=unused)
        self._runner.check_ranks()
        self._generations.forget_exited()
        if now - self._last_keepalive > self._limits.keepalive_interval:
            self._last_keepalive = now
            self._queue.send_keepalives()
        self._runner.run_next()
        self._spares.tick(idle=unused or (self._spares.hurried and not self._queue.busy))
        self._stop_if_unused(now)

    def _stop_if_unused(self, now: float) -> None:
        """Stop after the idle timeout, or when the socket has gone and the running request has ended."""
        if self._is_idle(now):
            log.info("idle for %g s", self._idle_timeout())
            self._stopping = []
        elif not self._endpoint.has_socket(self._socket_stat) and not self._queue.running:
            log.warning("ending: %s was removed or replaced, so no client can connect", self._endpoint.socket)
            self._stopping = self._stopping or []

    def _is_idle(self, now: float) -> bool:
        limit = self._idle_timeout()
        if not limit or self._queue.unused_for(now) <= limit:
            return False
        # A client that has just connected may be about to send a request.
        return not self._listener.accept() and not self._listener.pending

    def _shut_down(self) -> None:
        if self._endpoint.has_socket(self._socket_stat):
            self._endpoint.socket.unlink(missing_ok=True)
        self._stopping = self._stopping or []
        if self._others is not None:
            self._others.end()
        stopped = BackendUnavailable("the backend was stopped")
        self._queue.end_running(Error(code=stopped.code, message=str(stopped)), answered=False)
        for request in self._queue.queued:
            self._queue.end_queued(request, stopped)
        self._generations.kill()
        if self._others is not None:
            self._others.close()
        self._spares.kill()
        self._listener.close()
        overdue = time.monotonic() + self._limits.end
        while self._generations.forget_exited() or not (self._spares.exited or time.monotonic() > overdue):
            self._events.run_once(TICK)
        for sock in self._stopping:
            answer(sock, Done())
            sock.close()
        if self._others is not None:
            self._others.wait(self._limits.end)
        log.info("ended")
        self.logs.close()
        os.close(self._lock)
