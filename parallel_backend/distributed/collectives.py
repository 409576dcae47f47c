"""The two ways in which ranks talk during a request. All sizes are known on both sides beforehand."""

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..protocol.frames import TensorMeta
from ..protocol.tensors import DTYPES
from .mesh import Axis

Parts = Sequence[Tensor]
Place = tuple[int, Tensor]
"""A tensor, and the place on the axis of the rank that it comes from or goes to."""

_MOST_LEAVING = 8
_ALIGN = 16
"""Bytes to which tensors are aligned in the shared buffer, so that each can be viewed in its own dtype."""


class Work(Protocol):
    """What was started and is to be waited for."""

    def wait(self) -> Any:
        """Return once it is done."""


def join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat``, which copies even a part that is alone."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def start(leaving: Sequence[Parts], arriving: Sequence[Parts], axis: Axis) -> Sequence[Work]:
    """Start to send ``leaving[i]`` to the ``i``-th rank of the axis, and to receive ``arriving[i]`` from it.

    All tensors are contiguous. Both sides know all sizes, so that what is empty is left out on both, as is what a rank
    has for itself. The caller waits for what is returned, and leaves the tensors alone until then.
    """
    sent, received = _for_others(leaving, axis), _for_others(arriving, axis)
    if any(staged(axis, tensor) for _, tensor in (*sent[:1], *received[:1])):
        return [_Staged(sent, received, axis)]
    return _exchange(sent, received, axis)


def staged(axis: Axis, tensor: Tensor) -> bool:
    """Whether exchanges pass the CPU's memory: of a GPU's, gloo cannot send. What it gathers, sums or broadcasts it
    copies by itself."""
    return axis.gloo and tensor.is_cuda


def wait(works: Iterable[Work]) -> None:
    """Wait for what was started."""
    for work in works:
        work.wait()


class _Staged:
    """An exchange of copies in the CPU's memory; what arrives is copied to its place by who waits."""

    def __init__(self, sent: Sequence[Place], received: Sequence[Place], axis: Axis) -> None:
        self._arriving = [(tensor, torch.empty_like(tensor, device="cpu")) for _, tensor in received]
        copies = [(i, tensor.to("cpu", copy=True)) for i, tensor in sent]
        buffers = [(i, buffer) for (i, _), (_, buffer) in zip(received, self._arriving, strict=True)]
        self._works = _exchange(copies, buffers, axis)

    def wait(self) -> None:
        """See ``Work``."""
        wait(self._works)
        for tensor, buffer in self._arriving:
            tensor.copy_(buffer)


def _for_others(by_rank: Sequence[Parts], axis: Axis) -> list[Place]:
    return [(i, part) for i, parts in enumerate(by_rank) for part in parts if i != axis.index and part.numel()]


def _exchange(sent: Iterable[Place], received: Iterable[Place], axis: Axis) -> list[dist.Work]:
    ways = ((dist.isend, sent), (dist.irecv, received))
    ops = [
        dist.P2POp(op, part, axis.ranks[i], group=axis.group)
        for op, places in (ways[::-1] if _over_a_network() else ways)
        for i, part in places
    ]
    works: list[dist.Work] = dist.batch_isend_irecv(ops) if ops else []
    return works


def _over_a_network() -> bool:
    """Whether gloo was told a device that is not the machine's own. There it uses both directions at once only if
    receives come first; within a machine, where a rank has one core, sends are to: its threads wake each other less."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo") != "lo"


def send(tensor: Tensor, axis: Axis, to: int) -> Sequence[Work]:
    """Start to send a tensor to one rank of the axis; see ``start``."""
    return start([[tensor] if i == to else [] for i in range(axis.size)], [], axis)


def receive(tensor: Tensor, axis: Axis, source: int) -> Sequence[Work]:
    """Start to receive a tensor from one rank of the axis; see ``start``."""
    return start([], [[tensor] if i == source else [] for i in range(axis.size)], axis)


class PendingSends:
    """Tensors on their way to others, each kept until it has left, and no more than some at a time.

    Whoever takes them in must not wait for more of this rank meanwhile than what is on its way.
    """

    def __init__(self) -> None:
        self._on_the_way: deque[tuple[Sequence[Work], Tensor]] = deque()

    def send(self, tensor: Tensor, axis: Axis, to: int) -> None:
        """Start to send a tensor; waits for older ones to leave where there are many."""
        self._on_the_way.append((send(tensor, axis, to), tensor))
        if len(self._on_the_way) > _MOST_LEAVING:
            wait(self._on_the_way.popleft()[0])

    def finish(self) -> None:
        """Wait until all have left."""
        while self._on_the_way:
            wait(self._on_the_way.popleft()[0])


def all_gather(own: Tensor, shapes: Sequence[Sequence[int]], axis: Axis) -> list[Tensor]:
    """Every rank's tensor on every rank of the axis; ``shapes[i]`` is that of the ``i``-th rank."""
    own = own.contiguous()
    whole = [own if i == axis.index else own.new_empty(*shape) for i, shape in enumerate(shapes)]
    wait(start([[own]] * axis.size, [[part] for part in whole], axis))
    return whole


def scatter(parts: Sequence[Tensor], own: Tensor, axis: Axis) -> Tensor:
    """Each rank's part of what the first one has, into ``own``; of others', one at a time is on the first's device."""
    if axis.index:
        wait(receive(own, axis, 0))
        return own
    for to, part in enumerate(parts[1:], 1):
        wait(send(part.to(own.device).contiguous(), axis, to))
    return own.copy_(parts[0])


def gather(own: Tensor, sizes: Sequence[int], axis: Axis) -> list[Tensor]:
    """Every rank's values, flat, on the first rank of the axis; empty tensors elsewhere."""
    own = own.reshape(-1)
    if axis.index:
        wait(start([[own]], [], axis))
        return [own[:0]] * axis.size
    whole = [own, *(own.new_empty(size) for size in sizes[1:])]
    wait(start([], [[part] for part in whole], axis))
    return whole


def agree(value: int, axis: Axis) -> int:
    """The first rank's ``value`` on every rank of the axis, over the CPU's group."""
    if axis.size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(shared, axis.ranks[0], group=axis.group)
    return int(shared.item())


def all_of(value: bool, axis: Axis) -> bool:
    """Whether it is true on every rank of the axis, over the CPU's group."""
    if axis.size == 1:
        return value
    shared = torch.tensor([int(value)])
    dist.all_reduce(shared, dist.ReduceOp.MIN, group=axis.group)
    return bool(shared.item())


def share(
    metas: Sequence[TensorMeta], tensors: Mapping[str, Tensor] | None, axis: Axis, device: torch.device
) -> dict[str, Tensor]:
    """The first rank's ``tensors`` on every rank of the axis, on ``device``, in one broadcast."""
    if axis.size == 1:
        assert tensors is not None
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    buffer = torch.empty(sum(map(_room, metas)), dtype=torch.uint8, device=device)
    views = _views(buffer, metas)
    if axis.index == 0:
        assert tensors is not None
        for name, view in views.items():
            view.copy_(tensors[name])
    dist.broadcast(buffer, axis.ranks[0], group=axis.group)
    return views


def _room(meta: TensorMeta) -> int:
    return -(-meta.nbytes // _ALIGN) * _ALIGN


def _views(buffer: Tensor, metas: Sequence[TensorMeta]) -> dict[str, Tensor]:
    views, start = {}, 0
    for meta in metas:
        views[meta.name] = buffer[start : start + meta.nbytes].view(DTYPES[meta.dtype]).view(meta.shape)
        start += _room(meta)
    return views
