"""Transfer the tensors of a frame: raw bytes directly between a socket and preallocated memory."""

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidRequest
from .deadlines import READABLE, Deadline, send_all, wait_for
from .frames import ITEM_SIZES, Frame, TensorMeta, pack

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

SOCKET_BUFFER = 4 << 20
"""Send buffer requested for a socket that sends tensors, in bytes; the kernel caps it at ``net.core.wmem_max``."""


_WORD = 8
"""Bytes of a 64-bit integer."""


def describe(tensors: Mapping[str, Tensor]) -> tuple[TensorMeta, ...]:
    """The metadata of ``tensors`` for a header.

    Raises:
        InvalidRequest: the protocol does not support a dtype.
    """
    return tuple(
        TensorMeta(name=name, dtype=NAMES.get(tensor.dtype, str(tensor.dtype)), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def send(
    sock: socket.socket, message: object, tensors: Mapping[str, Tensor] | None = None, *, deadline: Deadline
) -> None:
    """Send a message and its tensors.

    Raises:
        DeadlineExceeded, ConnectionError: see ``deadlines.send_all``.
    """
    tensors = tensors or {}
    send_all(sock, pack(Frame(message=message, tensors=describe(tensors))), deadline=deadline)
    send_tensors(sock, tensors, deadline=deadline)


def is_sent(meta: TensorMeta, kept: Collection[str]) -> bool:
    """Whether the bytes of a request's tensor follow, if the ranks keep the tensors of the names ``kept``."""
    return not meta.same and meta.name not in kept


def send_tensors(
    sock: socket.socket,
    tensors: Mapping[str, Tensor],
    *,
    deadline: Deadline,
    poll: Callable[[], None] | None = None,
) -> None:
    """Send the raw bytes of tensors whose header has been sent.

    Raises:
        DeadlineExceeded, ConnectionError: see ``deadlines.send_all``.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    for tensor in tensors.values():
        if tensor.numel():
            send_all(sock, bytes_of(tensor.detach().cpu().contiguous()), deadline=deadline, poll=poll)


def recv_tensors(
    sock: socket.socket,
    metas: Sequence[TensorMeta],
    *,
    deadline: Deadline,
    poll: Callable[[], None] | None = None,
    pinned: bool = False,
) -> dict[str, Tensor]:
    """Receive the tensors of a header that are sent, each into a preallocated CPU tensor.

    ``pinned`` memory gets to a GPU and from there several times as fast, and torch reuses it.

    Raises:
        DeadlineExceeded: nothing arrived within the deadline, which starts over with each chunk.
        ConnectionError: the peer closed the connection.
        InvalidRequest: a tensor does not fit into memory.
    """
    received = {}
    for meta in metas:
        tensor = _empty(meta, pinned)
        if tensor.numel():
            recv_into(sock, bytes_of(tensor), deadline=deadline, poll=poll)
        received[meta.name] = tensor
    return received


def _empty(meta: TensorMeta, pinned: bool) -> Tensor:
    try:
        return torch.empty(meta.shape, dtype=DTYPES[meta.dtype], pin_memory=pinned)
    except RuntimeError as error:
        raise InvalidRequest(f"tensor {meta.name!r} of {meta.nbytes} bytes does not fit into memory") from error


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one dtype, shape and device, and equal memory, in which NaN equals NaN.

    Memory that is not contiguous, or no whole number of words, compares as numbers.
    """
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if _in_words(one) and _in_words(other):
        one, other = (tensor.reshape(-1).view(torch.int64) for tensor in (one, other))
    return bool(torch.equal(one, other))


def _in_words(tensor: Tensor) -> bool:
    """Whether a tensor can be viewed as 64-bit integers, which a CPU compares several times as fast."""
    start = tensor.storage_offset() * tensor.element_size()
    return tensor.is_contiguous() and tensor.nbytes % _WORD == 0 and start % _WORD == 0


def recv_into(
    sock: socket.socket, view: memoryview, *, deadline: Deadline, poll: Callable[[], None] | None = None
) -> None:
    """Receive as many bytes as the memory has. Raises what ``recv_tensors`` does."""
    while view:
        try:
            count = sock.recv_into(view, len(view), socket.MSG_DONTWAIT)
        except BlockingIOError:
            wait_for(sock, READABLE, min(deadline.remaining(), 0.05) if poll else deadline.remaining())
        else:
            if not count:
                raise ConnectionResetError("the peer closed the connection in the middle of a tensor")
            view = view[count:]
            deadline.renew()
        if poll:
            poll()
