"""Requests that the supervisor answers itself: status, cancel, outcome, stop. No torch, so that commands are quick."""

import signal
from typing import Any, TypeVar

from .. import processes
from ..errors import BackendFailure, BackendUnavailable, DeadlineExceeded, ProtocolError, RankFailed, from_code
from ..protocol import deadlines, frames
from ..protocol.endpoint import Endpoint, connect, peer
from ..protocol.messages import Done, Error, Stop
from ..protocol.status import Status, StatusQuery

ANSWER_TIMEOUT = 20.0
"""Seconds that the supervisor has to answer."""

STOP_TIMEOUT = 30.0
"""Seconds that the backend has to exit."""

Answer = TypeVar("Answer")


def ask(endpoint: Endpoint, message: object, kind: type[Answer], *, seconds: float = ANSWER_TIMEOUT) -> Answer:
    """Send one message on a new connection and return its answer, of type ``kind``.

    Raises:
        BackendUnavailable: no backend runs.
        BackendError: the answer is an error, is late, or has another protocol version.
    """
    with connect(endpoint, seconds=seconds) as sock:
        deadline = deadlines.Deadline(seconds, f"waiting for the backend to answer {type(message).__name__}")
        try:
            frames.send_header(sock, frames.pack(frames.Frame(message=message)), deadline=deadline)
            answer = frames.recv_header(sock, deadline=deadline).message
        except ConnectionError as error:
            closed = endpoint.remote.closed if endpoint.remote else ""
            raise BackendUnavailable(
                closed or f"the backend ended before it answered {type(message).__name__}"
            ) from error
    return expect(answer, kind)


def status(endpoint: Endpoint, *, seconds: float = ANSWER_TIMEOUT) -> Status:
    """The current status of the backend.

    Raises:
        BackendUnavailable: no backend runs.
    """
    return ask(endpoint, StatusQuery(), Status, seconds=seconds)


def stop(endpoint: Endpoint, *, seconds: float = STOP_TIMEOUT) -> None:
    """Stop the backend, and wait until its processes are gone. A local backend that does not answer is killed.

    Do not wait for an ended backend of several machines: a client may start another one then.

    Raises:
        BackendUnavailable: no backend runs.
        DeadlineExceeded: it does not exit.
    """
    if endpoint.remote is not None:
        _stop_elsewhere(endpoint, seconds)
        return
    try:
        sock = connect(endpoint, seconds=seconds)
    except BackendUnavailable:
        if not endpoint.by_hand.exists():
            raise
        endpoint.by_hand.unlink(missing_ok=True)
        return
    with sock:
        pid, _ = peer(sock)
        deadline = deadlines.Deadline(seconds, "stopping the backend")
        try:
            frames.send_header(sock, frames.pack(frames.Frame(message=Stop())), deadline=deadline)
            frames.recv_header(sock, deadline=deadline)
        except ProtocolError:
            # It speaks another protocol version, but every version stops on SIGTERM.
            processes.send_signal(pid, signal.SIGTERM)
        except DeadlineExceeded:
            endpoint.socket.unlink(missing_ok=True)  # tells clients that the end was wanted
            processes.send_signal(pid, signal.SIGKILL)
        except ConnectionError:
            pass
        if not processes.wait_for_exit(pid, seconds):
            raise DeadlineExceeded(f"the backend (pid {pid}) did not exit within {seconds:g} s")


def _stop_elsewhere(endpoint: Endpoint, seconds: float) -> None:
    try:
        ask(endpoint, Stop(), Done, seconds=seconds)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"the backend at {endpoint.remote} does not end within {seconds:g} s: run python -m parallel_backend "
            "stop on its machine"
        ) from error


def expect(answer: Any, kind: type[Answer]) -> Answer:
    """Return the answer if it has the expected type.

    Raises:
        BackendError: it is an error or has another type.
    """
    if isinstance(answer, Error):
        error = from_code(answer.code, answer.message)
        if isinstance(error, RankFailed):
            error.not_started = answer.not_started
        raise error
    if not isinstance(answer, kind):
        raise BackendFailure(f"the backend answered {type(answer).__name__} where {kind.__name__} was expected")
    return answer
