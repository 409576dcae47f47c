"""Frames on a stream socket: a fixed prefix, a JSON header, then the raw bytes of the tensors.

    magic 4s | version u16 | header length u32 | header JSON | tensor bytes, in the header's order

A client sends a request's tensor bytes only after ``Continue``, so a refused or queued request transfers none.
The tensor bytes of a reply follow its header at once.

Nothing is unpickled, and every size is checked before memory is allocated for it. This module handles the header
alone and needs no torch: the supervisor reads headers and leaves the tensor bytes in the socket for the rank that it
passes the connection to. ``tensors`` transfers the tensors.
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

VERSION = 4
MAGIC = b"PDiT"
PREFIX = struct.Struct("!4sHI")
MAX_HEADER = 1 << 17
MAX_TENSORS = 256
MAX_DIMS = 8
MAX_NAME = 200
MAX_DIGEST = 64
MAX_PAYLOAD = 1 << 38
ITEM_SIZES: dict[str, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """Name, dtype and shape of a tensor that follows a header.

    Attributes:
        digest: a hash of its values, by which ranks that have it say so; "" if it is always sent.
        same: the name of an earlier tensor of the message that it equals; it is not sent. "" if there is none.

    Raises:
        InvalidRequest: the name, the dtype, the shape or the digest is not supported.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str = ""
    same: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable():
            raise InvalidRequest(f"tensor {self.name!r}: a name must have 1 to {MAX_NAME} printable characters")
        if self.dtype not in ITEM_SIZES:
            raise InvalidRequest(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(ITEM_SIZES)}")
        if len(self.shape) > MAX_DIMS or any(not 0 <= size <= MAX_PAYLOAD for size in self.shape):
            raise InvalidRequest(
                f"tensor {self.name!r}: shape {self.shape} must have at most {MAX_DIMS} sizes from 0 to {MAX_PAYLOAD}"
            )

        if len(self.digest) > MAX_DIGEST or not self.digest.isascii():
            raise InvalidRequest(f"tensor {self.name!r}: a digest must have at most {MAX_DIGEST} ASCII characters")

    @property
    def nbytes(self) -> int:
        """Number of raw bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A message and its metadata.

    Attributes:
        message: one of ``MESSAGES``.
        tensors: the tensors that follow it.
        program: the ``fingerprint`` of the sender's code.
    """

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
    """Encode a frame's prefix and header.

    Raises:
        InvalidRequest: the header or the tensors exceed the limits, or two tensors have one name.
    """
    check_names(frame.tensors)
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
            f"exceeds the limits of {MAX_HEADER}, {MAX_TENSORS} and {MAX_PAYLOAD}"
        )
    return PREFIX.pack(MAGIC, VERSION, len(header)) + header


def check_names(tensors: tuple[TensorMeta, ...]) -> None:
    """Refuse two tensors with one name, of which a receiver would keep one, and tensors that equal no earlier one.

    Raises:
        InvalidRequest: the message names the tensor.
    """
    sent: dict[str, TensorMeta] = {}
    names = set[str]()
    for meta in tensors:
        if meta.name in names:
            raise InvalidRequest(f"two tensors have the name {meta.name!r}: each needs a name of its own")
        names.add(meta.name)
        if not meta.same:
            sent[meta.name] = meta
            continue
        other = sent.get(meta.same)
        if other is None or (other.shape, other.dtype) != (meta.shape, meta.dtype):
            raise InvalidRequest(f"tensor {meta.name!r} cannot equal {meta.same!r}: name an earlier one of its shape")


def unpack(header: bytes) -> Frame:
    """Decode a header, without its prefix, to a frame.

    Raises:
        ProtocolError: the header does not decode to a known message, or its tensors exceed the limits or share a name.
    """
    try:
        parts = msgspec.json.decode(header, type=_Header)
        message: Any = msgspec.json.decode(parts.body, type=MESSAGES[parts.type])
        check_names(parts.tensors)
    except KeyError as error:
        raise ProtocolError(f"unknown message {error}") from error
    except RecursionError as error:
        raise ProtocolError("a message is nested too deeply") from error
    except ValueError as error:
        raise ProtocolError(f"a message does not decode: {error}") from error
    if len(parts.tensors) > MAX_TENSORS or sum(meta.nbytes for meta in parts.tensors) > MAX_PAYLOAD:
        raise ProtocolError(f"a message announces more than {MAX_TENSORS} tensors or {MAX_PAYLOAD} bytes")
    return Frame(message=message, tensors=parts.tensors, program=parts.program)


class HeaderReader:
    """Reads exactly one header from a socket, without blocking and without reading past it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._expected = PREFIX.size
        self._in_header = False

    @property
    def started(self) -> bool:
        """Whether part of a header has arrived."""
        return bool(self._buffer) or self._in_header

    def advance(self) -> Frame | None:
        """Read what has arrived; return the frame once its header is complete, otherwise None.

        Raises:
            ProtocolError: the magic or the version is wrong, or the header is too long or does not decode.
            ConnectionError: the peer closed the connection.
        """
        while True:
            try:
                chunk = self._sock.recv(self._expected - len(self._buffer), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not chunk:
                raise ConnectionResetError("the peer closed the connection")
            self._buffer += chunk
            if len(self._buffer) < self._expected:
                continue
            if self._in_header:
                return self._finish()
            self._expected = _header_length(bytes(self._buffer))
            self._buffer.clear()
            self._in_header = True

    def _finish(self) -> Frame:
        frame = unpack(bytes(self._buffer))
        self._buffer.clear()
        self._expected, self._in_header = PREFIX.size, False
        return frame


def _header_length(prefix: bytes) -> int:
    magic, version, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak Parallel DiT's protocol")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version} and this process version {VERSION}: "
            "stop the backend (python -m parallel_backend stop) so that a matching one starts"
        )
    if not 0 < length <= MAX_HEADER:
        raise ProtocolError(f"a header of {length} bytes exceeds the limit of {MAX_HEADER}")
    return int(length)


def recv_header(
    sock: socket.socket, *, deadline: Deadline, poll: Callable[[], None] | None = None, poll_every: float = 0.05
) -> Frame:
    """Block until one header has arrived, calling ``poll`` every ``poll_every`` seconds.

    Raises:
        DeadlineExceeded: see ``Deadline``.
        ProtocolError, ConnectionError: see ``HeaderReader.advance``.
    """
    reader = HeaderReader(sock)
    while (frame := reader.advance()) is None:
        wait_for(sock, READABLE, min(deadline.remaining(), poll_every) if poll else deadline.remaining())
        if poll:
            poll()
    return frame


def send_header(
    sock: socket.socket, header: bytes, *, deadline: Deadline, poll: Callable[[], None] | None = None
) -> None:
    """Send a packed header whose answer the caller reads next.

    A supervisor that refuses a connection answers and closes before it has read the header. Its answer can be read
    despite the broken pipe, so a connection error is left for that read to raise.

    Raises:
        DeadlineExceeded: the peer does not accept the bytes.
    """
    with contextlib.suppress(ConnectionError):
        send_all(sock, header, deadline=deadline, poll=poll)
