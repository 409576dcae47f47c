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
        for name, view in views.items():
            view.copy_(tensors[name])
    with PROGRESS.waiting():
        dist.broadcast(buffer, axis.ranks[0], group=axis.group)
    return views


def _aligned_size(meta: TensorMeta) -> int:
    return -(-meta.nbytes // _ALIGN) * _ALIGN


def _views(buffer: Tensor, metas: Sequence[TensorMeta]) -> dict[str, Tensor]:
    views, offset = {}, 0
    for meta in metas:
        views[meta.name] = buffer[offset : offset + meta.nbytes].view(DTYPES[meta.dtype]).view(meta.shape)
        offset += _aligned_size(meta)
    return views
