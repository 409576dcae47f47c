"""What is fuzzed: one function a reader, which takes any bytes.

A target returns, or refuses with an error that its reader promises. Anything else is a finding: another exception, what
an accepted input may not hold, and a refusal for lack of memory, since readers check sizes before they allocate.
"""

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from parallel_backend.checkpoint import adapter_file, overlay_file
from parallel_backend.checkpoint.gguf_file import read_gguf
from parallel_backend.checkpoint.quantised import with_compression
from parallel_backend.checkpoint.safetensors_file import read_header
from parallel_backend.checkpoint.stored_tensor import DTYPE_BYTES, PACKED_BYTES, Header
from parallel_backend.client.status_text import format_json, format_status
from parallel_backend.errors import InvalidRequest, ProtocolError
from parallel_backend.machines.nodes import host_control
from parallel_backend.protocol import frames, rank_control
from parallel_backend.protocol.messages import RankRequest
from parallel_backend.protocol.status import Status
from parallel_backend.supervisor.request_queue import QueuedRequest, devices_for


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader.

    Attributes:
        run: reads bytes.
        refusals: the errors with which it may refuse.
        json_at: how many bytes come before a header of JSON, the last of which are its length; None without one.
        length: the format of that length for ``int.to_bytes``: bytes and byte order; None without one.
    """

    run: Callable[[bytes], None]
    refusals: tuple[type[Exception], ...]
    json_at: int | None = None
    length: tuple[int, str] | None = None


class Finding(AssertionError):
    """An accepted input holds what its reader may not accept, or a refused one took memory first."""


class RefusedRequest(Exception):
    """The supervisor refuses a message that decodes."""


def check(target: Target, data: bytes) -> str | None:
    """Run a target; return its refusal, or None if it accepts.

    Raises:
        Exception: what the target found.
    """
    try:
        target.run(data)
    except target.refusals as error:
        causes: BaseException | None = error
        while causes is not None:
            if isinstance(causes, MemoryError):
                raise Finding("memory was asked for before a size was checked") from error
            causes = causes.__cause__ or causes.__context__
        return str(error) or type(error).__name__
    return None


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise Finding(text)


# Messages

_PIECES = 64


def _stream(data: bytes) -> None:
    """Read headers from a socket, in at most ``_PIECES`` pieces of as many bytes as the first byte says."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, size = frames.HeaderReader(ours), max(1 + (data[0] if data else 0), len(data) // _PIECES)
        pieces = [data[at : at + size] for at in range(1, len(data), size)]
        for piece in pieces:
            theirs.sendall(piece)
            while (frame := reader.advance()) is not None:
                _as_supervisor(frame)
            _expect(reader.started or not piece or frame is None, "a header is neither begun nor complete")
        theirs.close()
        try:
            reader.advance()
        except ConnectionError:
            if reader.started:
                raise


def _message(data: bytes) -> None:
    _as_supervisor(frames.unpack(data))


def _as_supervisor(frame: frames.Frame) -> None:
    """Do with an accepted message what the supervisor does before a rank sees it."""
    _check_tensors(frame)
    message = frame.message
    if isinstance(message, Status):
        _expect(bool(format_status(message)) and bool(format_json(message)), "a status has no text")
    try:
        packed = frames.pack(frame)
        if isinstance(message, RankRequest):
            devices = devices_for(message)
            _expect(0 < len(devices.indices) <= 64, "the number of ranks")
            request = QueuedRequest(
                message=message, header=packed, connection=_UNUSED, metas=frame.tensors, devices=devices
            )
            _expect(request.layout is None or request.layout.ranks <= len(devices.indices), "the layout's ranks")
    except InvalidRequest as error:
        raise RefusedRequest(str(error)) from error
    _expect(frames.unpack(packed[frames.PREFIX.size :]) == frame, "a message changes on its way")


def _check_tensors(frame: frames.Frame) -> None:
    metas = frame.tensors
    _expect(len(metas) <= frames.MAX_TENSORS, "too many tensors")
    _expect(len({meta.name for meta in metas}) == len(metas), "two tensors have one name")
    _expect(all(meta.name.isprintable() and 0 < len(meta.name) <= frames.MAX_NAME for meta in metas), "a strange name")
    _expect(all(len(meta.shape) <= frames.MAX_DIMS for meta in metas), "too many dims")
    _expect(all(0 <= size <= frames.MAX_PAYLOAD for meta in metas for size in meta.shape), "a strange size")
    _expect(sum(meta.nbytes for meta in metas) <= frames.MAX_PAYLOAD, "too many bytes")


_UNUSED = socket.socket.__new__(socket.socket)
"""A connection that nothing reads."""

CONTROL = (rank_control.ToRank, rank_control.FromRank)
"""What the control sockets carry, in both directions."""


def _control(data: bytes) -> None:
    """Receive a datagram, in the direction that its first byte says."""
    kind = CONTROL[data[0] % 2 if data else 0]
    ours, theirs = rank_control.pair()
    with ours, theirs:
        if data[1:]:
            theirs.send(data[1:])
        else:
            theirs.close()
        message, descriptors = rank_control.receive(ours, kind)
        _expect(not descriptors, "a descriptor from nowhere")
        if isinstance(message, rank_control.Run):
            frames.unpack(bytes(message.header))


AGENTS = (host_control.ToHost, host_control.FromHost)
"""What the connection to another host's agent carries, in both directions."""


def _agent(data: bytes) -> None:
    """Receive messages of an agent, or of the supervisor, as the first byte says."""
    ours, theirs = socket.socketpair()
    stream = host_control.MessageStream(ours, AGENTS[data[0] % 2 if data else 0])
    with ours, theirs:
        for at in range(1, len(data), _CHUNK):
            theirs.sendall(data[at : at + _CHUNK])
            stream.receive()
        theirs.close()
        with suppress(ConnectionError):
            stream.receive()


_CHUNK = 16 << 10

# Files


@cache
def _memory_file() -> int:
    return os.memfd_create("fuzzed")


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    """Yield the path of a file in memory with this content."""
    descriptor = _memory_file()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)
    yield Path(f"/proc/self/fd/{descriptor}")


def _safetensors(data: bytes) -> None:
    with _file(data) as path:
        header = read_header(path)
        _check_file(header, len(data), gaps=False)
        with_compression(header.tensors, header.layers)


def _gguf(data: bytes) -> None:
    with _file(data) as path:
        header = read_gguf(path)
        _check_file(header, len(data), gaps=True)
    for tensor in header.tensors.values():
        packed = tensor.compression
        _expect(packed is None or _size(tensor.shape) % packed.block == 0, "half a block")


FILE_ID = "id"
"""The id in the files of the target ``changes``."""


def _changes(data: bytes) -> None:
    """Read a file of ComfyUI's process with an adapter's factors, or with other weights."""
    with _file(data) as path:
        refusal: InvalidRequest | None = None
        try:
            adapter = adapter_file.read(path, FILE_ID)
            _expect(all(type(layer.start) is int for layer in adapter.layers), "a row that is no number")
            _expect(all(type(size) is int for shape in adapter.shapes.values() for size in shape), "a shape")
        except InvalidRequest as error:
            refusal = error
        overlay_file.read(path, FILE_ID, "transformer")
    if refusal:
        raise refusal


def _check_file(header: Header, size: int, *, gaps: bool) -> None:
    """Check what a header says about a file of ``size`` bytes."""
    tensors = sorted(header.tensors.values(), key=lambda each: (each.offset, each.bytes))
    for tensor in tensors:
        _expect(tensor.offset >= 0 and tensor.bytes >= 0 and tensor.offset + tensor.bytes <= size, "beyond the file")
        number = (DTYPE_BYTES | PACKED_BYTES).get(tensor.dtype)
        _expect(
            tensor.compression is not None or number is None or _size(tensor.shape) * number == tensor.bytes, "bytes"
        )
    for one, other in itertools.pairwise(tensors):
        _expect(one.offset + one.bytes <= other.offset, "two tensors overlap")
        _expect(gaps or one.offset + one.bytes == other.offset, "a gap")


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


MESSAGE_ERRORS = (ProtocolError, ConnectionError, RefusedRequest)
TARGETS: Mapping[str, Target] = {
    "stream": Target(run=_stream, refusals=MESSAGE_ERRORS, json_at=1 + frames.PREFIX.size, length=(4, "big")),
    "message": Target(run=_message, refusals=MESSAGE_ERRORS, json_at=0),
    "control": Target(run=_control, refusals=MESSAGE_ERRORS, json_at=1),
    "agent": Target(run=_agent, refusals=MESSAGE_ERRORS, json_at=5, length=(4, "big")),
    "safetensors": Target(run=_safetensors, refusals=(InvalidRequest,), json_at=8, length=(8, "little")),
    "gguf": Target(run=_gguf, refusals=(InvalidRequest,)),
    "changes": Target(run=_changes, refusals=(InvalidRequest,), json_at=8, length=(8, "little")),
}
"""Every target by its name, which is also the name of its folder in ``corpus``."""
