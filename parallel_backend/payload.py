"""The tensors of a frame: raw bytes straight between a socket and preallocated memory."""

import select
import socket
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .wire import ITEM_SIZES, Deadline, Frame, TensorMeta, pack, send_all

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def describe(tensors: Mapping[str, Tensor]) -> tuple[TensorMeta, ...]:
    """What a header says of ``tensors``.

    Raises:
        ValueError: a dtype that the wire does not carry.
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
        DeadlineExceeded, ConnectionError: see ``wire.send_all``.
    """
    tensors = tensors or {}
    send_all(sock, pack(Frame(message=message, tensors=describe(tensors))), deadline=deadline)
    for tensor in tensors.values():
        if tensor.numel():
            send_all(sock, _bytes_of(tensor.detach().contiguous().cpu()), deadline=deadline)


def recv_tensors(
    sock: socket.socket,
    metas: tuple[TensorMeta, ...],
    *,
    deadline: Deadline,
    poll: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """Receive the tensors that a header announced, each into one preallocated CPU tensor.

    Raises:
        DeadlineExceeded: nothing arrived for as long as the deadline allows.
        ConnectionError: the other side closed.
    """
    received = {}
    for meta in metas:
        tensor = torch.empty(meta.shape, dtype=DTYPES[meta.dtype])
        if tensor.numel():
            _recv_into(sock, _bytes_of(tensor), deadline=deadline, poll=poll)
        received[meta.name] = tensor
    return received


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _recv_into(
    sock: socket.socket, view: memoryview, *, deadline: Deadline, poll: Callable[[], None] | None
) -> None:
    while view:
        ready, _, _ = select.select([sock], [], [], min(deadline.remaining(), 0.1))
        if poll:
            poll()
        if not ready:
            continue
        count = sock.recv_into(view, len(view), socket.MSG_DONTWAIT)
        if not count:
            raise ConnectionResetError("the other side closed the connection in the middle of a tensor")
        view = view[count:]
        deadline.renew()
