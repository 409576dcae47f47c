"""Gives every rank the tensors that the first rank has, in one broadcast."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..progress import PROGRESS
from ..protocol.frames import TensorMeta
from ..protocol.tensors import DTYPES
from .mesh import Axis

_ALIGN = 16
"""Alignment in bytes of each tensor in the broadcast buffer, so that each can be viewed in its own dtype."""


def broadcast_tensors(
    metas: Sequence[TensorMeta], tensors: Mapping[str, Tensor] | None, axis: Axis, device: torch.device
) -> dict[str, Tensor]:
    """Copy named tensors from the axis's first rank to ``device`` on every rank, in one broadcast.

    Args:
        metas: name, dtype and shape of each tensor, on every rank.
        tensors: the tensors, needed on the first rank only.
        axis: the ranks that take part.
        device: where the copies go.
    """
    if not metas:
        return {}
    if axis.size == 1:
        assert tensors is not None
        return {meta.name: tensors[meta.name].to(device) for meta in metas}
    buffer = torch.empty(sum(map(_aligned_size, metas)), dtype=torch.uint8, device=device)
    views = _views(buffer, metas)
    if axis.index == 0:
        assert tensors is not None
        _fill(views, tensors)
    _broadcast(buffer, axis)
    return views


def broadcast_if_any(
    metas: Sequence[TensorMeta], tensors: Mapping[str, Tensor] | None, axis: Axis
) -> dict[str, Tensor] | None:
    """Copy named tensors, if there are any, from the axis's first rank to the CPU of every rank, in one broadcast.

    It takes the place of an agreement and a broadcast. Where there are none, as many bytes are sent.

    Args:
        metas: as in ``broadcast_tensors``.
        tensors: on the first rank, the tensors, or None if there are none.
        axis: the ranks that take part.

    Returns:
        The tensors; None, on every rank, if the first rank has none.
    """
    if axis.size == 1:
        return None if tensors is None else {meta.name: tensors[meta.name] for meta in metas}
    buffer = torch.empty(_ALIGN + sum(map(_aligned_size, metas)), dtype=torch.uint8)
    views = _views(buffer[_ALIGN:], metas)
    if axis.index == 0:
        buffer[0] = tensors is not None
        if tensors is not None:
            _fill(views, tensors)
    _broadcast(buffer, axis)
    return views if buffer[0] else None


def _fill(views: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, view in views.items():
        view.copy_(tensors[name])


def _broadcast(buffer: Tensor, axis: Axis) -> None:
    with PROGRESS.waiting():
        dist.broadcast(buffer, axis.ranks[0], group=axis.group)


def _aligned_size(meta: TensorMeta) -> int:
    return -(-meta.nbytes // _ALIGN) * _ALIGN


def _views(buffer: Tensor, metas: Sequence[TensorMeta]) -> dict[str, Tensor]:
    views, offset = {}, 0
    for meta in metas:
        views[meta.name] = buffer[offset : offset + meta.nbytes].view(DTYPES[meta.dtype]).view(meta.shape)
        offset += _aligned_size(meta)
    return views
