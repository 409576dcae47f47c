"""What the supervisor and its ranks say to each other, one datagram a message.

A ``SOCK_SEQPACKET`` pair keeps messages whole, so that any thread may send, and carries descriptors
(``SCM_RIGHTS``, unix(7)). Both ends are of one program, so this needs no version.
"""

import array
import socket
from typing import Any

import msgspec

from ..errors import Cancelled, InvalidRequest
from .frames import MAX_HEADER
from .messages import RankStatus

MAX_DATAGRAM = MAX_HEADER + 4096
BUFFER = 4 * MAX_DATAGRAM
DONE = "done"
"""The code of a request that went well; the others are those of ``errors``."""
HARMLESS = (DONE, InvalidRequest.code, Cancelled.code)
"""Codes after which the ranks can go on; any other ends the set."""


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To rank 0: carry out the request of this header, whose connection comes along."""

    header: msgspec.Raw


class CancelRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To rank 0: end this request at its next step."""

    request_id: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: the process group stands."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank, once a second."""

    status: RankStatus


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: how a request ended there.

    ``by_peer`` says that the error is one of communication, so that its cause is likely another rank.
    """

    request_id: str
    code: str
    message: str = ""
    by_peer: bool = False


ToRank = Run | CancelRun
FromRank = Ready | Heartbeat | Finished


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, with room for a few messages."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return ends


def send(sock: socket.socket, message: ToRank | FromRank, *, descriptor: int | None = None) -> None:
    """Send without waiting.

    Raises:
        BlockingIOError: the other side has not read for a long time.
        ConnectionError: the other side is gone.
    """
    rights = array.array("i", [] if descriptor is None else [descriptor])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    sock.sendmsg([msgspec.json.encode(message)], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, kind: Any) -> tuple[Any, int | None]:
    """The next message, one of the union ``kind``, and the descriptor that came with it.

    Raises:
        BlockingIOError: there is none now.
        ConnectionError: the other side is gone.
    """
    space = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
    data, ancillary, _, _ = sock.recvmsg(MAX_DATAGRAM, space, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError("the control socket was closed")
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    return msgspec.json.decode(data, type=kind), descriptors[0] if descriptors else None
