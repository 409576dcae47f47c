"""Frames on a stream socket: a fixed prefix, a JSON header, then the raw bytes of the tensors.

    magic 4s | version u16 | header length u32 | header JSON | tensor bytes, in the header's order

A request's tensor bytes wait for ``Continue``, so that a refused or queued one has moved nothing; those
of a reply follow at once.

Nothing is unpickled, and every size is checked before memory is taken for it. This file handles the
header only and needs no torch: the supervisor reads headers and leaves tensor bytes in the socket
for the rank that is handed the connection. ``payload`` moves the tensors.
"""

import contextlib
import math
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import InvalidRequest, ProtocolError
from .deadlines import READABLE, Deadline, send_all, wait_for
from .fingerprint import fingerprint
from .messages import MESSAGES

VERSION = 2
MAGIC = b"PDiT"
PREFIX = struct.Struct("!4sHI")
MAX_HEADER = 1 << 17
MAX_TENSORS = 256
MAX_DIMS = 8
MAX_PAYLOAD = 1 << 38
ITEM_SIZES: dict[str, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """Name, dtype and shape of a tensor that follows a header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise InvalidRequest(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(ITEM_SIZES)}")
        if len(self.shape) > MAX_DIMS or any(size < 0 for size in self.shape):
            raise InvalidRequest(
                f"tensor {self.name!r}: shape {self.shape} needs at most {MAX_DIMS} sizes of 0 or more"
            )

    @property
    def nbytes(self) -> int:
        """Length of the raw bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A message, what tensors follow it, and which code its sender runs (see ``fingerprint``)."""

    message: Any
    tensors: tuple[TensorMeta, ...] = ()
    program: str = field(default_factory=fingerprint)


@dataclass(frozen=True, kw_only=True)
class _Header:
    type: str
    body: msgspec.Raw
    tensors: tuple[TensorMeta, ...] = ()
    program: str = ""


def pack(frame: Frame) -> bytes:
    """Prefix and header of a frame.

    Raises:
        InvalidRequest: the header or the tensors are over the limits.
    """
    header = msgspec.json.encode(
        _Header(
            type=type(frame.message).__name__,
            body=msgspec.Raw(msgspec.json.encode(frame.message)),
            tensors=frame.tensors,
            program=frame.program,
        )
    )
    payload = sum(meta.nbytes for meta in frame.tensors)
    if len(header) > MAX_HEADER or payload > MAX_PAYLOAD or len(frame.tensors) > MAX_TENSORS:
        raise InvalidRequest(
            f"a message of {len(header)} header bytes, {len(frame.tensors)} tensors and {payload} tensor bytes "
            f"is over the limits of {MAX_HEADER}, {MAX_TENSORS} and {MAX_PAYLOAD}"
        )
    return PREFIX.pack(MAGIC, VERSION, len(header)) + header


def unpack(header: bytes) -> Frame:
    """The frame of a header.

    Raises:
        ProtocolError: the header does not decode to a known message.
    """
    try:
        parts = msgspec.json.decode(header, type=_Header)
        message: Any = msgspec.json.decode(parts.body, type=MESSAGES[parts.type])
        frame = Frame(message=message, tensors=parts.tensors, program=parts.program)
    except KeyError as error:
        raise ProtocolError(f"unknown message {error}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"a message does not decode: {error}") from error
    if len(frame.tensors) > MAX_TENSORS or sum(meta.nbytes for meta in frame.tensors) > MAX_PAYLOAD:
        raise ProtocolError(f"a message announces more than {MAX_TENSORS} tensors or {MAX_PAYLOAD} bytes")
    return frame


class HeaderReader:
    """Reads one header off a non-blocking socket and never a byte more."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._wanted = PREFIX.size
        self._in_header = False

    @property
    def started(self) -> bool:
        """Whether part of a header has arrived."""
        return bool(self._buffer) or self._in_header

    def advance(self) -> Frame | None:
        """Take what has arrived; the frame once its header is whole, else None.

        Raises:
            ProtocolError: wrong magic or version, a header over the limit, or one that does not decode.
            ConnectionError: the other side closed.
        """
        while True:
            try:
                chunk = self._sock.recv(self._wanted - len(self._buffer), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not chunk:
                raise ConnectionResetError("the other side closed the connection")
            self._buffer += chunk
            if len(self._buffer) < self._wanted:
                continue
            if self._in_header:
                return self._finish()
            self._wanted = _header_length(bytes(self._buffer))
            self._buffer.clear()
            self._in_header = True

    def _finish(self) -> Frame:
        frame = unpack(bytes(self._buffer))
        self._buffer.clear()
        self._wanted, self._in_header = PREFIX.size, False
        return frame


def _header_length(prefix: bytes) -> int:
    magic, version, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolError("the other side does not speak Parallel DiT's protocol")
    if version != VERSION:
        raise ProtocolError(
            f"the other side speaks protocol version {version} and this one {VERSION}: "
            "stop the backend (python -m parallel_backend stop) so that a matching one starts"
        )
    if not 0 < length <= MAX_HEADER:
        raise ProtocolError(f"a header of {length} bytes is over the limit of {MAX_HEADER}")
    return int(length)


def recv_header(
    sock: socket.socket, *, deadline: Deadline, poll: Callable[[], None] | None = None, poll_every: float = 0.05
) -> Frame:
    """Block for one header, calling ``poll`` now and then while nothing arrives.

    Raises:
        DeadlineExceeded, ProtocolError, ConnectionError: see ``Deadline`` and ``HeaderReader``.
    """
    reader = HeaderReader(sock)
    while True:
        frame = reader.advance()
        if frame is not None:
            return frame
        wait_for(sock, READABLE, min(deadline.remaining(), poll_every) if poll else deadline.remaining())
        if poll:
            poll()


def send_header(
    sock: socket.socket, header: bytes, *, deadline: Deadline, poll: Callable[[], None] | None = None
) -> None:
    """Send a packed header, whose answer is read next.

    Whoever refuses a connection answers and closes before the header is read. The answer outlives the
    broken pipe, so that is left to the reading.

    Raises:
        DeadlineExceeded: the other side does not take it.
    """
    with contextlib.suppress(ConnectionError):
        send_all(sock, header, deadline=deadline, poll=poll)
