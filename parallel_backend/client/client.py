"""Blocking calls to the backend, for ComfyUI's process: imports neither diffusers nor torch.distributed."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ..errors import BackendError, BackendFailure, BackendUnavailable, Cancelled, InvalidRequest
from ..other_machines import machines
from ..protocol import deadlines, frames
from ..protocol.endpoint import Endpoint
from ..protocol.fingerprint import is_outdated
from ..protocol.hosts import HostStatus
from ..protocol.messages import Cancel, Continue, Done, Outcome, Progress, RankRequest
from ..protocol.status import Status
from ..protocol.tensors import describe, recv_tensors, send_tensors
from . import query
from .launch import START_TIMEOUT, connect_or_start

POLL = 0.05
"""Seconds between two calls of ``interrupted``."""

HOSTS_TIMEOUT = 5.0
"""Seconds that the backend has to say which hosts there are."""

Interrupted = Callable[[], bool]
OnProgress = Callable[[Progress, dict[str, Tensor]], None]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of the phases of a call, in seconds.

    Attributes:
        connect: for the supervisor to accept a connection and answer.
        start: for a backend that has to be started to answer.
        send: the longest that the ranks may accept none of the request's bytes.
        silence: the longest without a message while the ranks load weights or compute a step.
        cancel: for a cancelled request to end.
        stop: for the backend to exit.
    """

    connect: float = query.ANSWER_TIMEOUT
    start: float = START_TIMEOUT
    send: float = 60.0
    silence: float = 1800.0
    cancel: float = 150.0
    stop: float = query.STOP_TIMEOUT


class Client:
    """Talks to the backend of an endpoint and starts it when a request needs it. Safe to use from any thread."""

    def __init__(
        self,
        *,
        endpoint: Endpoint | None = None,
        timeouts: Timeouts | None = None,
        idle_timeout: float | None = None,
    ) -> None:
        self.endpoint, self.timeouts = endpoint or Endpoint.default(), timeouts or Timeouts()
        self._idle_timeout = idle_timeout

    def call(
        self,
        message: RankRequest,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        interrupted: Interrupted | None = None,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Tensor]:
        """Have the ranks run a request.

        Args:
            message: the request; its docstring lists the tensors.
            tensors: the request's tensors.
            interrupted: polled every 50 ms; once it returns true, the request is cancelled.
            on_progress: called on this thread; an exception from it ends the call and cancels the request.

        Returns:
            The reply's tensors, on the CPU.

        Raises:
            InvalidRequest: the request cannot work.
            Cancelled: ``interrupted`` returned true, or another client cancelled the request.
            DeadlineExceeded: a phase took too long; the message names it.
            BackendError: any other error of ``errors``.
        """
        model = replace(message.model, path=os.path.abspath(message.model.path))
        message, files = replace(message, model=model), dict[str, str]()
        if self.remote:
            message, files = machines("links.request_files").to_be_sent(message)
        call = _Call(self, message, tensors or {}, files, interrupted or _never, on_progress or _ignore)
        deadline = deadlines.Deadline(self.timeouts.start, f"finding a backend that stays ({self.endpoint.log_place})")
        while True:
            with contextlib.suppress(_NotAcknowledged):
                return call.run()
            if self.endpoint.remote and self.endpoint.remote.closed:
                raise BackendUnavailable(self.endpoint.remote.closed)
            if is_outdated():
                raise BackendUnavailable("the extension's files have changed since ComfyUI started: restart ComfyUI")
            # The backend was shutting down as this client connected, because it was idle or runs older code.
            time.sleep(min(deadline.remaining(), POLL))

    @property
    def remote(self) -> bool:
        """Whether the backend is on another machine."""
        return self.endpoint.remote is not None

    def hosts(self) -> tuple[HostStatus, ...]:
        """The backend's hosts, the first one included; none if no backend for other machines answers on this one.

        Raises:
            BackendError: the backend on another machine does not answer.
        """
        if not self.remote and not self.endpoint.by_hand.exists():
            return ()
        try:
            return query.status(self.endpoint, seconds=HOSTS_TIMEOUT).hosts
        except BackendError:
            if self.remote:
                raise
            return ()

    def status(self) -> Status:
        """The current status of the backend.

        Raises:
            BackendUnavailable: no backend runs.
        """
        return query.status(self.endpoint, seconds=self.timeouts.connect)

    def stop(self) -> None:
        """Stop the backend, by force if it does not answer, and wait until its processes are gone.

        Raises:
            BackendUnavailable: no backend runs.
            DeadlineExceeded: it does not exit.
        """
        query.stop(self.endpoint, seconds=self.timeouts.stop)

    def start(self, interrupted: Interrupted | None = None) -> None:
        """Start the backend unless it already runs.

        Raises:
            BackendUnavailable: it does not start.
            DeadlineExceeded: it takes too long to start.
            Cancelled: ``interrupted`` returned true.
        """
        self._connect(interrupted or _never).close()

    def _connect(self, interrupted: Interrupted) -> socket.socket:
        return connect_or_start(
            self.endpoint,
            connect_seconds=self.timeouts.connect,
            start_seconds=self.timeouts.start,
            idle_timeout=self._idle_timeout,
            interrupted=interrupted,
        )


class _NotAcknowledged(Exception):
    """The connection broke before the supervisor acknowledged the request."""


class _Call:
    """One request on one connection."""

    def __init__(
        self,
        client: Client,
        message: RankRequest,
        tensors: Mapping[str, Tensor],
        files: Mapping[str, str],
        interrupted: Interrupted,
        on_progress: OnProgress,
    ) -> None:
        self._client, self._message, self._tensors, self._files = client, message, tensors, files
        self._interrupted, self._on_progress = interrupted, on_progress
        self._header = frames.pack(frames.Frame(message=message, tensors=describe(tensors)))
        self._last_poll = 0.0
        self._acknowledged = False

    def run(self) -> dict[str, Tensor]:
        """Send the request, report its progress, and return the reply's tensors."""
        with self._client._connect(self._interrupted) as sock:
            try:
                return self._exchange(sock)
            except _Interrupted:
                self._cancel(sock)
                raise Cancelled("the request was cancelled") from None
            except ConnectionError as error:
                raise self._cause() from error

    def _exchange(self, sock: socket.socket) -> dict[str, Tensor]:
        timeouts = self._client.timeouts
        sending = deadlines.Deadline(timeouts.send, "sending a request to the backend")
        frames.send_header(sock, self._header, deadline=sending, poll=self._poll)
        # The supervisor answers at once and then sends keepalives; the ranks may be silent for longer.
        silence = deadlines.Deadline(timeouts.connect, "waiting for the backend to accept a request")
        while True:
            frame = frames.recv_header(sock, deadline=silence, poll=self._poll)
            self._acknowledged = True
            silence.renew()
            received = recv_tensors(sock, frame.tensors, deadline=silence, poll=self._poll)
            if isinstance(frame.message, Continue):
                sending.renew()
                if frame.message.missing:
                    send_files = machines("links.sent_files").send_files
                    send_files(sock, frame.message.missing, self._files, deadline=sending, poll=self._poll)
                send_tensors(sock, self._tensors, deadline=sending, poll=self._poll)
                silence = deadlines.Deadline(timeouts.silence, "waiting for a message from the ranks")
            elif isinstance(frame.message, Progress):
                self._on_progress(frame.message, received)
            else:
                query.expect(frame.message, Done)
                return received

    def _poll(self) -> None:
        now = time.monotonic()
        if now - self._last_poll >= POLL:
            self._last_poll = now
            if self._interrupted():
                raise _Interrupted

    def _cancel(self, sock: socket.socket) -> None:
        """Cancel the request and wait for its end: the connection closes once the ranks are free again."""
        with contextlib.suppress(BackendFailure):
            self._query(Cancel(request_id=self._message.request_id))
            deadline = deadlines.Deadline(self._client.timeouts.cancel, "waiting for a cancelled request to end")
            discarded = bytearray(1 << 20)
            with contextlib.suppress(ConnectionError):
                while deadlines.wait_for(sock, deadlines.READABLE, deadline.remaining()) and sock.recv_into(discarded):
                    pass

    def _query(self, message: object) -> None:
        query.ask(self._client.endpoint, message, Done, seconds=self._client.timeouts.connect)

    def _cause(self) -> Exception:
        """Why the connection broke, according to the supervisor."""
        if not self._acknowledged:
            return _NotAcknowledged()
        try:
            self._query(Outcome(request_id=self._message.request_id))
        except BackendUnavailable as error:
            endpoint = self._client.endpoint
            if endpoint.remote and endpoint.remote.closed:
                return BackendUnavailable(f"a request broke off: {error}")
            return BackendUnavailable(f"the backend ended in the middle of a request ({endpoint.log_place})")
        except Cancelled as error:
            # Not by this client: the supervisor cancels a request whose connection breaks, as that to another machine
            # may do.
            remote = self._client.endpoint.remote
            return BackendUnavailable(f"the connection to the backend at {remote} broke") if remote else error
        except (BackendFailure, InvalidRequest) as error:
            return error
        return BackendFailure("the backend finished the request, but the connection broke during its reply")


class _Interrupted(Exception):
    """The caller interrupted the request."""


def _never() -> bool:
    return False


def _ignore(progress: Progress, tensors: dict[str, Tensor]) -> None:
    """The default ``on_progress``."""
