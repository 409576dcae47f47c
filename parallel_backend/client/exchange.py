"""One request on one connection: sends it and the files that the ranks lack, and waits for its reply."""

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import BackendError, BackendFailure, BackendUnavailable, Cancelled, InvalidRequest
from ..other_machines import machines
from ..protocol import deadlines, frames
from ..protocol.endpoint import Endpoint
from ..protocol.frames import TensorMeta
from ..protocol.messages import Cancel, Continue, Done, Outcome, Progress, RankRequest, Step
from ..protocol.run_key import is_changing
from ..protocol.tensors import is_sent, recv_tensors, send_tensors
from . import query
from .launch import START_TIMEOUT

POLL = 0.05
"""Seconds between two calls of ``interrupted``."""

Interrupted = Callable[[], bool]
OnProgress = Callable[[Progress, dict[str, Tensor]], None]


def never() -> bool:
    """The default ``interrupted``."""
    return False


def ignore(progress: Progress, tensors: dict[str, Tensor]) -> None:
    """The default ``on_progress``."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of the phases of a call, in seconds.

    Attributes:
        connect: until the supervisor accepts a connection and answers.
        start: until a newly started backend answers.
        send: longest pause in which the ranks accept no bytes of the request.
        silence: longest pause without a message while the ranks load weights or compute a step.
        cancel: until a cancelled request ends.
        stop: until the backend exits.
    """

    connect: float = query.ANSWER_TIMEOUT
    start: float = START_TIMEOUT
    send: float = 60.0
    silence: float = 1800.0
    cancel: float = 150.0
    stop: float = query.STOP_TIMEOUT


class NotAccepted(BackendUnavailable):
    """The connection broke before the supervisor accepted the request: the backend was about to end."""


class RunEnded(Exception):
    """The ranks take no further step of a run on its connection. The step has not been carried out."""


class _Interrupted(Exception):
    """The caller interrupted the request."""


@dataclass(kw_only=True)
class Exchange:
    """A request that is ready to be sent, and the further steps on its connection.

    Attributes:
        endpoint: where the backend is.
        timeouts: of the phases.
        message: the request.
        tensors: its tensors.
        metas: their metadata.
        files: paths of files that exist only in this process's memory, by the ids that the request uses.
        interrupted: see ``Client.call``.
        on_progress: see ``Client.call``.
    """

    endpoint: Endpoint
    timeouts: Timeouts
    message: RankRequest
    tensors: Mapping[str, Tensor]
    metas: tuple[TensorMeta, ...]
    files: Mapping[str, str]
    interrupted: Interrupted
    on_progress: OnProgress

    def __post_init__(self) -> None:
        self._header = frames.pack(frames.Frame(message=self.message, tensors=self.metas))
        self._last_poll, self._accepted = 0.0, False
        self.open = False

    def run(self, sock: socket.socket) -> dict[str, Tensor]:
        """Send the request, report its progress, and return the reply's tensors.

        Afterwards ``open`` says whether ``step`` may follow.

        Raises:
            NotAccepted: the backend was about to end.
            BackendError: see ``Client.call``.
        """
        done = BackendFailure("the backend finished the request, but the connection broke during its reply")
        return self._carried_out(sock, self._exchange, done)

    def step(
        self, sock: socket.socket, tensors: Mapping[str, Tensor], *, interrupted: Interrupted, on_progress: OnProgress
    ) -> dict[str, Tensor]:
        """Run the request again with other tensors of those that change. See ``run``.

        Raises:
            RunEnded: the ranks had ended the run before.
        """
        self.tensors, self.interrupted, self.on_progress, self.open = tensors, interrupted, on_progress, False
        return self._carried_out(sock, self._next_step, RunEnded())

    def _carried_out(
        self, sock: socket.socket, carry_out: Callable[[socket.socket], dict[str, Tensor]], done: Exception
    ) -> dict[str, Tensor]:
        """Return the reply's tensors. If the connection breaks although the ranks are done, raise ``done``."""
        try:
            return carry_out(sock)
        except _Interrupted:
            self._cancel(sock)
            raise Cancelled("the request was cancelled") from None
        except ConnectionError as error:
            raise (self._cause() or done) from error

    def _next_step(self, sock: socket.socket) -> dict[str, Tensor]:
        sending = deadlines.Deadline(self.timeouts.send, "sending a step to the backend")
        metas = tuple(meta for meta in self.metas if is_changing(meta))
        header = frames.pack(frames.Frame(message=Step(), tensors=metas))
        try:
            deadlines.send_all(sock, header, deadline=sending, poll=self._poll)
            self._send_tensors(sock, metas, (), sending)
        except ConnectionError:
            raise RunEnded from None
        self.on_progress(Progress(phase="accepted", value=0, total=1), {})
        return self._reply(sock, deadlines.Deadline(self.timeouts.silence, "waiting for a message from the ranks"))

    def _exchange(self, sock: socket.socket) -> dict[str, Tensor]:
        timeouts = self.timeouts
        sending = deadlines.Deadline(timeouts.send, "sending a request to the backend")
        frames.send_header(sock, self._header, deadline=sending, poll=self._poll)
        # The supervisor answers at once and then sends keepalives; the ranks may be silent for longer.
        return self._reply(sock, deadlines.Deadline(timeouts.connect, "waiting for the backend to accept a request"))

    def _reply(self, sock: socket.socket, silence: deadlines.Deadline) -> dict[str, Tensor]:
        """Return the reply's tensors, and send those of the request once rank 0 asks for them."""
        while True:
            frame = frames.recv_header(sock, deadline=silence, poll=self._poll)
            self._accepted = True
            silence.renew()
            received = recv_tensors(sock, frame.tensors, deadline=silence, poll=self._poll)
            if isinstance(frame.message, Continue):
                self._go_on(sock, frame.message)
                silence = deadlines.Deadline(self.timeouts.silence, "waiting for a message from the ranks")
            elif isinstance(frame.message, Progress):
                self.on_progress(frame.message, received)
            else:
                self.open = query.expect(frame.message, Done).open
                return received

    def _go_on(self, sock: socket.socket, message: Continue) -> None:
        sending = deadlines.Deadline(self.timeouts.send, "sending a request to the backend")
        if message.missing:
            send_files = machines("links.sent_files").send_files
            send_files(sock, message.missing, self.files, deadline=sending, poll=self._poll)
        self._send_tensors(sock, self.metas, message.kept, sending)

    def _send_tensors(
        self, sock: socket.socket, metas: Sequence[TensorMeta], kept: Collection[str], deadline: deadlines.Deadline
    ) -> None:
        sent = {meta.name: self.tensors[meta.name] for meta in metas if is_sent(meta, kept)}
        send_tensors(sock, sent, deadline=deadline, poll=self._poll)

    def _poll(self) -> None:
        now = time.monotonic()
        if now - self._last_poll >= POLL:
            self._last_poll = now
            if self.interrupted():
                raise _Interrupted

    def _cancel(self, sock: socket.socket) -> None:
        """Cancel the request and wait for its end: the connection closes once the ranks are free again."""
        with contextlib.suppress(BackendFailure):
            self._query(Cancel(request_id=self.message.request_id))
            deadline = deadlines.Deadline(self.timeouts.cancel, "waiting for a cancelled request to end")
            discarded = bytearray(1 << 20)
            with contextlib.suppress(ConnectionError):
                while deadlines.wait_for(sock, deadlines.READABLE, deadline.remaining()) and sock.recv_into(discarded):
                    pass

    def _query(self, message: object) -> None:
        query.ask(self.endpoint, message, Done, seconds=self.timeouts.connect)

    def _cause(self) -> BackendError | None:
        """Why the connection broke, according to the supervisor; None if the ranks have ended the request well."""
        if not self._accepted:
            return NotAccepted("the backend ended before it accepted a request")
        try:
            self._query(Outcome(request_id=self.message.request_id))
        except BackendUnavailable as error:
            if self.endpoint.remote and self.endpoint.remote.closed:
                return BackendUnavailable(f"a request broke off: {error}")
            return BackendUnavailable(f"the backend ended in the middle of a request ({self.endpoint.log_place})")
        except Cancelled as error:
            # This client did not cancel. The supervisor does when a connection breaks, and one to another machine may
            # break.
            remote = self.endpoint.remote
            return BackendUnavailable(f"the connection to the backend at {remote} broke") if remote else error
        except (BackendFailure, InvalidRequest) as error:
            return error
        return None
