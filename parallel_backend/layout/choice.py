"""Layouts that nobody names: for a request without one, and where a device has too little room."""

import math
from collections.abc import Sequence
from dataclasses import replace

from .parallel_layout import ParallelLayout

_UNEVEN = 1.25
"""By how much the busiest rank may exceed an even share of frames in the automatic layout. Only attention is uneven."""


def auto(hosts: Sequence[int], *, branches: int, rows: float = 0) -> ParallelLayout:
    """Return the layout for a request that names none: CFG first, because it sends the least, then Ulysses.

    With guidance (two or more branches) and an even number of ranks, two groups split the branches, and the ranks of
    each group split the tokens. Otherwise all ranks split the tokens.

    Between hosts, links are slower than inside them. There, branches are split, and otherwise a ring passes keys and
    values on, which sends less over each link than Ulysses and overlaps with the computation (USP,
    https://arxiv.org/abs/2405.07719). Ulysses stays inside a host.

    Where frames attend only to themselves and can be shared evenly, ``dsp`` stands for Ulysses. It sends half.

    Args:
        hosts: numbers of adjacent ranks on one host, in the order of the ranks.
        branches: how many the request has.
        rows: the fewest frames that a batch has; 0 if tokens attend across frames.
    """
    ranks, inside = sum(hosts), math.gcd(*hosts)
    if len(hosts) == 1:
        inside = ranks // 2 if branches >= 2 and ranks % 2 == 0 else ranks
    across = ranks // inside
    cfg = 2 if branches >= 2 and across % 2 == 0 else 1
    if across == cfg and _shares_evenly(rows, inside):
        return ParallelLayout(cfg=cfg, dsp=inside)
    return ParallelLayout(cfg=cfg, ring=across // cfg, ulysses=inside)


def _shares_evenly(rows: float, ranks: int) -> bool:
    """Whether the busiest of some ranks has hardly more rows than the others."""
    return rows == math.inf or (rows > 0 and ranks * math.ceil(rows / ranks) <= _UNEVEN * rows)


def sharing(layout: ParallelLayout) -> list[ParallelLayout]:
    """Return layouts of as many ranks in which ranks share the weights. The first sends the least."""
    if layout.ranks == 1:
        return []
    same = [replace(layout, shard_weights=True)] if layout.sequence > 1 else []
    together = [ParallelLayout(ulysses=layout.ranks, shard_weights=True)] if layout.sequence < layout.ranks else []
    return [*same, *together, ParallelLayout(tensor=layout.ranks)]


def less_memory(layout: ParallelLayout | None, ranks: int) -> list[ParallelLayout]:
    """Return layouts in which each rank holds less than in this one: the fewest tokens, then a share of the weights."""
    if ranks == 1:
        return []
    rungs = [ParallelLayout(ulysses=ranks), ParallelLayout(ulysses=ranks, shard_weights=True)]
    if layout in rungs:
        return rungs[rungs.index(layout) + 1 :]
    return rungs[1:] if layout and layout.splits_weights else rungs
