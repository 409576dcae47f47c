"""The messages between the supervisor and its ranks, one datagram each.

A ``SOCK_SEQPACKET`` socket pair preserves message boundaries, so any thread may send, and it can pass file
descriptors (``SCM_RIGHTS``, unix(7)). Both ends run the same code, so messages carry no version.
"""

import array
import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import Cancelled, ClientStalled, InvalidRequest, NoRoom, ProtocolError
from .frames import MAX_HEADER
from .model_spec import Collectives
from .status import RankStatus

MAX_DATAGRAM = MAX_HEADER + 4096
BUFFER = 4 * MAX_DATAGRAM
MAX_DESCRIPTORS = 2
DONE = "done"
"""The code of a request that succeeded; ``errors`` has the other codes."""
RECOVERABLE = (DONE, InvalidRequest.code, Cancelled.code, NoRoom.code, ClientStalled.code)
"""Codes after which the ranks stay usable; after any other, the supervisor kills the set."""


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To rank 0: run the request of this header. The descriptor of its client's connection comes with the message."""

    header: msgspec.Raw


class CancelRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To rank 0: cancel this request at its next step."""

    request_id: str


class GiveWay(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To rank 0: another request waits, so wait for no further step of this one."""

    request_id: str


class Become(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a spare rank: become this rank.

    The descriptor of the rank's log comes with the message, and for rank 0 also the store's listening socket.

    Attributes:
        device: PyTorch's name of its device.
        collectives: the communication backend of GPU ranks.
        environment: variables to set, ``RANK`` among them.
    """

    device: str
    collectives: Collectives
    environment: dict[str, str]


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a spare rank: it has imported what ranks need."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: it has joined the process group."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank, once a second."""

    status: RankStatus


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a rank: how a request ended there, or why the rank does not start.

    Attributes:
        request_id: the request; "" while the rank starts.
        code: ``DONE`` or a code of ``errors``.
        message: the error's message.
        by_peer: communication failed, so another rank probably caused the error.
        seconds: from rank 0: time spent on the request by phase, see ``RequestLine``.
        sent: from rank 0: bytes of tensors sent to the client.
        received: from rank 0: bytes of the client's tensors that arrived.
        steps: from rank 0: answers, of which a ``Forward`` may have several.
        unheard: from rank 0: the other ranks have not received the request.
    """

    request_id: str
    code: str
    message: str = ""
    by_peer: bool = False
    seconds: dict[str, float] = {}
    sent: int = 0
    received: int = 0
    steps: int = 0
    unheard: bool = False


ToRank = Run | CancelRun | GiveWay
FromRank = Ready | Heartbeat | Finished | Prepared


def pair() -> tuple[socket.socket, socket.socket]:
    """Create a connected pair of sockets whose buffers hold a few messages."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return ends


def send(sock: socket.socket, message: ToRank | Become | FromRank, *, descriptors: Sequence[int] = ()) -> None:
    """Send a message and at most ``MAX_DESCRIPTORS`` descriptors without blocking.

    Raises:
        BlockingIOError: the buffer is full, because the peer has not read for a long time.
        ConnectionError: the peer is gone.
    """
    rights = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    sock.sendmsg([msgspec.json.encode(message)], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, kind: Any) -> tuple[Any, tuple[int, ...]]:
    """Receive a message of the union ``kind`` and the descriptors that came with it, without blocking.

    Raises:
        BlockingIOError: no message has arrived.
        ConnectionError: the peer is gone.
        ProtocolError: the message does not decode. Its descriptor is closed.
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(MAX_DATAGRAM, space, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError("the control socket was closed")
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    try:
        return msgspec.json.decode(data, type=kind), tuple(descriptors)
    except (ValueError, RecursionError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError(f"a message does not decode: {error}") from error
