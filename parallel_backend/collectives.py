"""The two ways in which ranks talk during a request. All sizes are known on both sides beforehand."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis
from .payload import DTYPES
from .wire import TensorMeta

_ALIGN = 16
"""Bytes to which tensors are aligned in the shared buffer, so that each can be viewed in its own dtype."""


def join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat``, which copies even a part that is alone."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def exchange(outgoing: Sequence[Sequence[Tensor]], sizes: Sequence[int], axis: Axis) -> list[Tensor]:
    """One ``all_to_all_single``: send ``outgoing[i]`` to the ``i``-th rank of the axis.

    Args:
        outgoing: per rank the tensors for it, any shape, all of one dtype; they are packed in order.
        sizes: number of values that each rank sends here, which may be zero.

    Returns:
        Per rank a flat tensor of its values.
    """
    example = next(tensor for parts in outgoing for tensor in parts)
    sent = [sum(part.numel() for part in parts) for parts in outgoing]
    buffer = example.new_empty(sum(sent))
    start = 0
    for part in (part for parts in outgoing for part in parts):
        buffer[start : start + part.numel()].view(part.shape).copy_(part)
        start += part.numel()
    received = example.new_empty(sum(sizes))
    dist.all_to_all_single(received, buffer, list(sizes), sent, group=axis.group)
    return list(torch.split(received, list(sizes)))


def all_gather(own: Tensor, shapes: Sequence[Sequence[int]], axis: Axis) -> list[Tensor]:
    """Every rank's tensor on every rank of the axis; ``shapes[i]`` is that of the ``i``-th rank, own ones equal."""
    if axis.size == 1:
        return [own]
    sizes = [0 if i == axis.index else math.prod(shape) for i, shape in enumerate(shapes)]
    outgoing = [[own[:0] if i == axis.index else own] for i in range(axis.size)]
    received = exchange(outgoing, sizes, axis)
    return [
        own if i == axis.index else flat.view(*shape)
        for i, (flat, shape) in enumerate(zip(received, shapes, strict=True))
    ]


def gather(own: Tensor, sizes: Sequence[int], axis: Axis) -> list[Tensor]:
    """Every rank's values, flat, on the first rank of the axis; empty tensors elsewhere."""
    if axis.size == 1:
        return [own.reshape(-1)]
    outgoing = [[own if i == 0 else own.reshape(-1)[:0]] for i in range(axis.size)]
    return exchange(outgoing, sizes if axis.index == 0 else [0] * axis.size, axis)


def agree(value: int, axis: Axis) -> int:
    """The first rank's ``value`` on every rank of the axis, over the CPU's group."""
    if axis.size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(shared, axis.ranks[0], group=axis.group)
    return int(shared.item())


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
