"""The backend as one blocking call, for ComfyUI's process: no diffusers, no torch.distributed, no state."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ..errors import BackendFailure, BackendUnavailable, Cancelled, InvalidRequest
from ..protocol import deadlines, frames
from ..protocol.endpoint import Endpoint
from ..protocol.fingerprint import is_outdated
from ..protocol.messages import Cancel, Continue, Done, Outcome, Progress, RankRequest, Status
from ..protocol.tensors import describe, recv_tensors, send_tensors
from . import query
from .launch import START_PATIENCE, connect_or_start

POLL = 0.05
"""Seconds between two looks at ``interrupted``."""

Interrupted = Callable[[], bool]
OnProgress = Callable[[Progress, dict[str, Tensor]], None]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds until a phase of a call is given up.

    ``connect``: until the supervisor takes a connection and answers. ``start``: until a backend that had to
    be started answers. ``send``: without the ranks taking any of the request's bytes. ``silence``: without
    a sign of life while the ranks load weights or compute a step. ``cancel``: until a cancelled request has
    ended. ``stop``: until the backend is gone.
    """

    connect: float = query.PATIENCE
    start: float = START_PATIENCE
    send: float = 60.0
    silence: float = 1800.0
    cancel: float = 150.0
    stop: float = query.STOP_PATIENCE


class Client:
    """Talks to the backend of an endpoint, and starts it when a request needs it. Any thread may call."""

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
        """Have the ranks carry out a request.

        Args:
            message: the request; its docstring lists the tensors.
            tensors: the request's tensors.
            interrupted: looked at every 50 ms; once true, the request is cancelled.
            on_progress: called on this thread; an exception from it ends the call and cancels the request.

        Returns:
            The reply's tensors, on the CPU.

        Raises:
            Cancelled: ``interrupted`` said so, or somebody else cancelled the request.
            DeadlineExceeded: a phase took too long; names it.
            BackendError: any other of ``errors``.
        """
        model = replace(message.model, path=os.path.abspath(message.model.path))
        message = replace(message, model=model)
        call = _Call(self, message, tensors or {}, interrupted or _never, on_progress or _ignore)
        deadline = deadlines.Deadline(self.timeouts.start, f"finding a backend that stays (log: {self.endpoint.log})")
        while True:
            with contextlib.suppress(_NotTaken):
                return call.run()
            if is_outdated():
                raise BackendUnavailable("the extension's files have changed since ComfyUI started: restart ComfyUI")
            # It was ending just as we connected, for want of work or because it runs older code.
            time.sleep(min(deadline.remaining(), POLL))

    def status(self) -> Status:
        """The backend at this moment.

        Raises:
            BackendUnavailable: none runs.
        """
        return query.status(self.endpoint, seconds=self.timeouts.connect)

    def stop(self) -> None:
        """End the backend, by force if it does not answer, and wait until its processes are gone.

        Raises:
            BackendUnavailable: none runs.
            DeadlineExceeded: it does not end.
        """
        query.stop(self.endpoint, seconds=self.timeouts.stop)

    def start(self, interrupted: Interrupted | None = None) -> None:
        """Start the backend unless it runs.

        Raises:
            BackendUnavailable, DeadlineExceeded, Cancelled: it does not come up, or the caller lost patience.
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


class _NotTaken(Exception):
    """The connection broke before the supervisor acknowledged the request."""


class _Call:
    """One request on one connection."""

    def __init__(
        self,
        client: Client,
        message: RankRequest,
        tensors: Mapping[str, Tensor],
        interrupted: Interrupted,
        on_progress: OnProgress,
    ) -> None:
        self._client, self._message, self._tensors = client, message, tensors
        self._interrupted, self._on_progress = interrupted, on_progress
        self._header = frames.pack(frames.Frame(message=message, tensors=describe(tensors)))
        self._looked = 0.0
        self._taken = False

    def run(self) -> dict[str, Tensor]:
        """Send the request and see it through."""
        with self._client._connect(self._interrupted) as sock:
            try:
                return self._converse(sock)
            except _Interrupted:
                self._cancel(sock)
                raise Cancelled("the request was cancelled") from None
            except ConnectionError as error:
                raise self._explain() from error

    def _converse(self, sock: socket.socket) -> dict[str, Tensor]:
        timeouts = self._client.timeouts
        sending = deadlines.Deadline(timeouts.send, "sending a request to the backend")
        frames.send_header(sock, self._header, deadline=sending, poll=self._look)
        # The supervisor answers at once and gives signs of life; the ranks may be silent for longer.
        silence = deadlines.Deadline(timeouts.connect, "waiting for the backend to take a request")
        while True:
            frame = frames.recv_header(sock, deadline=silence, poll=self._look)
            self._taken = True
            silence.renew()
            received = recv_tensors(sock, frame.tensors, deadline=silence, poll=self._look)
            if isinstance(frame.message, Continue):
                sending.renew()
                send_tensors(sock, self._tensors, deadline=sending, poll=self._look)
                silence = deadlines.Deadline(timeouts.silence, "waiting for a sign of life from the ranks")
            elif isinstance(frame.message, Progress):
                self._on_progress(frame.message, received)
            else:
                query.expect(frame.message, Done)
                return received

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked >= POLL:
            self._looked = now
            if self._interrupted():
                raise _Interrupted

    def _cancel(self, sock: socket.socket) -> None:
        """Ask for the end and wait for it: the connection closes when the ranks are free again."""
        with contextlib.suppress(BackendFailure):
            self._ask(Cancel(request_id=self._message.request_id))
            deadline = deadlines.Deadline(self._client.timeouts.cancel, "waiting for a cancelled request to end")
            rest = bytearray(1 << 20)
            with contextlib.suppress(ConnectionError):
                while deadlines.wait_for(sock, deadlines.READABLE, deadline.remaining()) and sock.recv_into(rest):
                    pass

    def _ask(self, message: object) -> None:
        query.ask(self._client.endpoint, message, Done, seconds=self._client.timeouts.connect)

    def _explain(self) -> Exception:
        """Why the connection broke, as the supervisor remembers it."""
        if not self._taken:
            return _NotTaken()
        try:
            self._ask(Outcome(request_id=self._message.request_id))
        except BackendUnavailable:
            log = self._client.endpoint.log
            return BackendUnavailable(f"the backend ended in the middle of a request (log: {log})")
        except (BackendFailure, Cancelled, InvalidRequest) as error:
            return error
        return BackendFailure("the backend finished the request, but its answer broke off")


class _Interrupted(Exception):
    """The caller wants no answer any more."""


def _never() -> bool:
    return False


def _ignore(progress: Progress, tensors: dict[str, Tensor]) -> None:
    """Nobody asked for progress."""
