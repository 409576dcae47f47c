"""What the supervisor answers by itself: status, cancel, outcome, stop. No torch, so that commands are quick."""

import signal
from typing import Any, TypeVar

from .. import processes
from ..errors import BackendFailure, BackendUnavailable, DeadlineExceeded, ProtocolError, from_code
from ..protocol import deadlines, frames
from ..protocol.endpoint import Endpoint, connect, peer
from ..protocol.messages import Error, Status, StatusQuery, Stop

PATIENCE = 20.0
"""Seconds in which the supervisor answers."""

STOP_PATIENCE = 30.0
"""Seconds in which the backend ends."""

Answer = TypeVar("Answer")


def ask(endpoint: Endpoint, message: object, kind: type[Answer], *, seconds: float = PATIENCE) -> Answer:
    """One question on a connection of its own.

    Raises:
        BackendUnavailable: no backend runs.
        BackendError: it answers with an error, too late, or in another version.
    """
    with connect(endpoint, seconds=seconds) as sock:
        deadline = deadlines.Deadline(seconds, f"waiting for the backend to answer {name(message)}")
        try:
            frames.send_header(sock, frames.pack(frames.Frame(message=message)), deadline=deadline)
            answer = frames.recv_header(sock, deadline=deadline).message
        except ConnectionError as error:
            raise BackendUnavailable(f"the backend ended before it answered {name(message)}") from error
    return expect(answer, kind)


def status(endpoint: Endpoint, *, seconds: float = PATIENCE) -> Status:
    """The backend at this moment.

    Raises:
        BackendUnavailable: none runs.
    """
    return ask(endpoint, StatusQuery(), Status, seconds=seconds)


def stop(endpoint: Endpoint, *, seconds: float = STOP_PATIENCE) -> None:
    """End the backend, by force if it does not answer, and wait until its processes are gone.

    Raises:
        BackendUnavailable: none runs.
        DeadlineExceeded: it does not end.
    """
    with connect(endpoint, seconds=seconds) as sock:
        pid, _ = peer(sock)
        deadline = deadlines.Deadline(seconds, "stopping the backend")
        try:
            frames.send_header(sock, frames.pack(frames.Frame(message=Stop())), deadline=deadline)
            frames.recv_header(sock, deadline=deadline)
        except ProtocolError:
            # It speaks another version; this it understands.
            processes.end(pid, signal.SIGTERM)
        except DeadlineExceeded:
            processes.end(pid, signal.SIGKILL)
        except ConnectionError:
            pass
        if not processes.wait_gone(pid, seconds):
            raise DeadlineExceeded(f"the backend (pid {pid}) did not end within {seconds:g} s")


def expect(answer: Any, kind: type[Answer]) -> Answer:
    """The answer, if it is of the expected kind.

    Raises:
        BackendError: it is an error, or something else.
    """
    if isinstance(answer, Error):
        raise from_code(answer.code, answer.message)
    if not isinstance(answer, kind):
        raise BackendFailure(f"the backend answered {name(answer)} where {kind.__name__} was expected")
    return answer


def name(message: object) -> str:
    """A message's name on the wire."""
    return type(message).__name__
