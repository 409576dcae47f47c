"""What nodes change in the weights of a parallel MODEL, sorted by how the ranks can apply it.

ComfyUI keeps changes as ``(strength, value, strength of the weight, offset, function)`` by the weight's name. The plain
low-rank factors of a LoRA (https://arxiv.org/abs/2106.09685) stay factors. Any other change of a weight needs the
weight itself, and so do all changes of a weight that has one.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comfy.weight_adapter import LoRAAdapter
from torch import Tensor

from ...parallel_backend.checkpoint.dtypes import STORED_NAMES

_PROBED = 8
"""Columns of the matrix that shows what a function does to rows."""

Patch = tuple[float, Any, float, tuple[int, int, int] | None, Any]
"""ComfyUI's form of one change."""


@dataclass(frozen=True, kw_only=True)
class LowRankPatch:
    """One change ``strength * scale * up @ down`` of rows of a linear layer's weight.

    Attributes:
        weight: the weight's name.
        start: the first of the changed rows.
        up: ``[rows, rank]``.
        down: ``[rank, columns]``.
        scale: the factor that belongs to the file.
        strength: the factor that a node sets.
        source: ComfyUI's object, which is the same for all changes of one LoRA.
        order: the row of ``up`` for each row; None for the same.
    """

    weight: str
    start: int
    up: Tensor
    down: Tensor
    scale: float
    strength: float
    source: Any
    order: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SortedPatches:
    """All changes of a MODEL's weights.

    Attributes:
        low_rank: changes that the ranks apply as factors.
        merged: by name, all changes of the weights that have others.
    """

    low_rank: tuple[LowRankPatch, ...]
    merged: Mapping[str, Sequence[Patch]]


def sort_patches(
    patches: Mapping[str, Sequence[Patch]], shapes: Mapping[str, Sequence[int]], linear: Container[str]
) -> SortedPatches:
    """Sort changes that fit their weights (see ``weight_fit``)."""
    low_rank: list[LowRankPatch] = []
    merged: dict[str, Sequence[Patch]] = {}
    for name, changes in patches.items():
        factors = [_low_rank(name, shapes[name], change) for change in changes] if name in linear else [None]
        plain = [each for each in factors if each is not None]
        if len(plain) == len(factors):
            low_rank += plain
        else:
            merged[name] = changes
    return SortedPatches(low_rank=tuple(low_rank), merged=merged)


def _low_rank(name: str, shape: Sequence[int], change: Patch) -> LowRankPatch | None:
    """Return a change as factors, or None if it is of another kind."""
    strength, adapter, weight_strength, offset, function = change
    if not isinstance(adapter, LoRAAdapter) or weight_strength != 1.0:
        return None
    up, down, _, *others = adapter.weights
    if any(other is not None for other in others) or (offset is not None and offset[0] != 0):
        return None
    start, rows = (0, shape[0]) if offset is None else offset[1:]
    order = None if function is None else _row_order(function, rows)
    if function is not None and order is None:
        return None
    return LowRankPatch(
        weight=name,
        start=start,
        up=_stored(up.flatten(start_dim=1)),
        down=_stored(down.flatten(start_dim=1)),
        scale=factor_scale(adapter),
        strength=strength,
        source=adapter,
        order=order,
    )


def factor_scale(adapter: LoRAAdapter) -> float:
    """Return the factor that a LoRA's file gives: ``alpha`` divided by the rank."""
    _, down, alpha, *_ = adapter.weights
    return 1.0 if alpha is None else float(alpha) / len(down)


def _stored(factor: Tensor) -> Tensor:
    """Return a factor in a dtype that files have. ComfyUI casts integers, too."""
    return factor if factor.dtype in STORED_NAMES else factor.float()


def _row_order(function: Any, rows: int) -> Tensor | None:
    """Return the order into which a function brings rows, or None if it does anything else."""
    probe = 1.0 + torch.arange(rows * _PROBED, dtype=torch.float64).reshape(rows, _PROBED)  # no two numbers are equal
    try:
        moved = function(probe.clone())
        order = ((moved[:, 0] - 1.0) / _PROBED).long()
        moves_rows = moved.shape == probe.shape and torch.equal(order.sort()[0], torch.arange(rows))
        return order if moves_rows and torch.equal(moved, probe[order]) else None
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
