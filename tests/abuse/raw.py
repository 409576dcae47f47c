"""Speak to a backend in bytes that no client of ours would send."""

import contextlib
import json
import socket
from typing import Any

from parallel_backend.client.client import Client
from parallel_backend.protocol import deadlines, frames
from parallel_backend.protocol.endpoint import connect
from parallel_backend.protocol.fingerprint import fingerprint
from parallel_backend.protocol.messages import Error, Progress

SECONDS = 5.0
"""How long an answer may take."""

ECHO: dict[str, Any] = {
    "name": "echo",
    "model": {"path": "/no/such/model", "devices": {"kind": "cpu", "indices": [0, 1]}},
}
"""The body of a good request."""


def frame(header: bytes) -> bytes:
    """Return a header with the prefix that fits it."""
    return frames.PREFIX.pack(frames.MAGIC, frames.VERSION, len(header)) + header


def header(kind: str = "Trial", body: Any = ECHO, tensors: Any = ()) -> bytes:
    """Return the header of a message, whatever is in it."""
    return json.dumps({"type": kind, "body": body, "tensors": tensors, "program": fingerprint()}).encode()


def tensor(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a tensor, with changes."""
    return {"name": "x", "dtype": "float32", "shape": [4], **changes}


def answers(sock: socket.socket) -> Any:
    """Return the next message of the backend."""
    return next_frame(sock).message


def next_frame(sock: socket.socket) -> frames.Frame:
    """Return the next message of the backend, and what it says about its tensors."""
    return frames.recv_header(sock, deadline=deadlines.Deadline(SECONDS, "an answer"))


def last_frame(sock: socket.socket) -> frames.Frame:
    """Return the first frame that is no progress of a request."""
    while isinstance((frame := next_frame(sock)).message, Progress):
        pass
    return frame


def refusal(client: Client, sent: bytes) -> Error:
    """Send bytes on a connection of their own, and return the error that they are refused with."""
    with connect(client.endpoint, seconds=SECONDS) as sock:
        sock.sendall(sent)
        answer = answers(sock)
        assert isinstance(answer, Error), answer
        with contextlib.suppress(ConnectionResetError):  # it closed before it had read all
            assert sock.recv(1) == b"", "the connection stays open"
    return answer
