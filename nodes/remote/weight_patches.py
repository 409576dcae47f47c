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

from ...parallel_backend.errors import InvalidRequest

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
        source: ComfyUI's object, which tells the changes of one LoRA from those of others.
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
        low_rank: those that the ranks apply as factors.
        merged: by name, all changes of the weights that have others.
    """

    low_rank: tuple[LowRankPatch, ...]
    merged: Mapping[str, Sequence[Patch]]


def sort_patches(
    patches: Mapping[str, Sequence[Patch]], shapes: Mapping[str, Sequence[int]], linear: Container[str]
) -> SortedPatches:
    """Sort changes.

    Args:
        patches: changes by the weights' names.
        shapes: shape of each weight.
        linear: names of the weights of linear layers.

    Raises:
        InvalidRequest: factors do not fit the weight. ComfyUI logs this and leaves the weight as it is.
    """
    low_rank: list[LowRankPatch] = []
    merged: dict[str, Sequence[Patch]] = {}
    for name, changes in patches.items():
        for change in changes:
            _check_factors(name, shapes[name], change)
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
        up=up.flatten(start_dim=1),
        down=down.flatten(start_dim=1),
        scale=factor_scale(adapter),
        strength=strength,
        source=adapter,
        order=order,
    )


def factor_scale(adapter: LoRAAdapter) -> float:
    """Return the factor that a LoRA's file gives: ``alpha`` divided by the rank."""
    _, down, alpha, *_ = adapter.weights
    return 1.0 if alpha is None else float(alpha) / len(down)


def _row_order(function: Any, rows: int) -> Tensor | None:
    """Return the order into which a function brings rows, or None if it does anything else."""
    numbers = torch.arange(rows, dtype=torch.float64).unsqueeze(1)
    try:
        moved = function(numbers.expand(rows, 2).clone())
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    order = moved[:, 0]
    moves_rows = moved.shape == (rows, 2) and torch.equal(moved[:, 1], order)
    return order.long() if moves_rows and torch.equal(order.sort()[0], numbers[:, 0]) else None


def _check_factors(name: str, shape: Sequence[int], change: Patch) -> None:
    adapter, offset = change[1], change[3]
    if not isinstance(adapter, LoRAAdapter):
        return
    up, down, _, mid, _, reshape = adapter.weights
    if 0 in up.shape or 0 in down.shape:
        raise InvalidRequest(f"the LoRA's factors for {name} have rank 0 ({_sizes(up, down)}): download the file again")
    if mid is not None or reshape is not None:
        return
    wanted = list(shape)
    if offset is not None:
        wanted[offset[0]] = offset[2]
    rows, columns = wanted[0], torch.Size(wanted[1:]).numel()
    found = (up.shape[0], down[0].numel()) if up[0].numel() == len(down) else None
    if found != (rows, columns):
        raise InvalidRequest(
            f"the LoRA's factors for {name} have shapes {_sizes(up, down)}, and the weight has {list(wanted)}: the "
            "LoRA is for another model"
        )


def _sizes(up: Tensor, down: Tensor) -> str:
    return f"{list(up.shape)} and {list(down.shape)}"
