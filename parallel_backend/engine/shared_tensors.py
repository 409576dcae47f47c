"""Gives every rank a request's tensors: sends what a rank lacks, and keeps what later requests may need."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..distributed.broadcast import broadcast_if_any, broadcast_tensors
from ..distributed.collectives import gather_numbers
from ..distributed.mesh import Axis
from ..protocol.frames import TensorMeta
from .kept_tensors import KeptTensors

Tensors = Mapping[str, Tensor]


def complete(metas: Sequence[TensorMeta], received: Tensors, kept: KeptTensors) -> dict[str, Tensor]:
    """Return all tensors of a request on rank 0, by name, in the order of ``metas``."""
    tensors: dict[str, Tensor] = {}
    for meta in metas:
        tensor = received.get(meta.name, kept.get(meta))
        tensors[meta.name] = tensors[meta.same] if tensor is None else tensor
    return tensors


def share_constant(
    metas: Sequence[TensorMeta], tensors: Tensors | None, kept: KeptTensors, axis: Axis, device: torch.device
) -> dict[str, Tensor]:
    """Return the tensors that have digests on every rank, and keep them. Collective over the axis.

    Args:
        metas: of all tensors of the request.
        tensors: all of them, on the axis's first rank only.
    """
    constant = [meta for meta in metas if meta.digest]
    found = {meta.name: tensor for meta in constant if (tensor := kept.get(meta)) is not None}
    has = [int(meta.name in found) for meta in constant]
    everywhere = [all(flags) for flags in zip(*gather_numbers(has, axis), strict=True)] if constant else []
    lacking = [meta for meta, had in zip(constant, everywhere, strict=True) if not had]
    found |= broadcast_tensors(lacking, tensors, axis, device)
    for meta in constant:
        kept.add(meta.digest, found[meta.name])
    return found


def share_changing(
    metas: Sequence[TensorMeta], tensors: Tensors | None, constant: Tensors, axis: Axis, device: torch.device
) -> dict[str, Tensor]:
    """Return all tensors on every rank, in the order of ``metas``. Collective over the axis.

    Args:
        metas: of all tensors of the request.
        tensors: all of them, on the axis's first rank only.
        constant: what ``share_constant`` returned.
    """
    found = {**constant, **broadcast_tensors(_changing(metas), tensors, axis, device)}
    return {meta.name: found[meta.same or meta.name] for meta in metas}


def share_step(
    metas: Sequence[TensorMeta], tensors: Tensors | None, constant: Tensors, axis: Axis
) -> dict[str, Tensor] | None:
    """Return what ``share_changing`` does, on the CPU; None on every rank if the first has no tensors. Collective."""
    changing = broadcast_if_any(_changing(metas), tensors, axis)
    if changing is None:
        return None
    found = {**constant, **changing}
    return {meta.name: found[meta.same or meta.name] for meta in metas}


def _changing(metas: Sequence[TensorMeta]) -> list[TensorMeta]:
    return [meta for meta in metas if not meta.digest and not meta.same]
