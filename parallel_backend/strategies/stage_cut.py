"""Which blocks each stage of a pipeline holds.

Cutting a sequence into consecutive ranges so that the costliest range costs as little as possible is the linear
partition problem (Skiena, The Algorithm Design Manual). It is solved by dynamic programming.
"""

from collections.abc import Sequence

from torch import nn

from ..interfaces.family import Block, Family
from ..layout.partition import Partition

_TOKENS = 4096
"""Row length for which the stages are balanced: an image of 1024 x 1024 pixels in most models."""


def cut(costs: Sequence[float], speeds: Sequence[float]) -> Partition:
    """Cut items into consecutive stages of at least one item each, so that the slowest stage is as fast as possible.

    Args:
        costs: cost of each item.
        speeds: cost that each stage processes in a unit of time.
    """
    total_cost = [0.0]  # of the first i items
    for cost in costs:
        total_cost.append(total_cost[-1] + cost)
    # best[i]: the best cut of the first i items into the stages so far: the slowest stage's time and the stage sizes.
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * len(costs)]
    for speed in speeds:
        extended: list[tuple[float, tuple[int, ...]] | None] = [None] * len(best)
        for end in range(1, len(best)):
            candidates = [
                (max(shorter[0], (total_cost[end] - total_cost[begin]) / speed), (*shorter[1], end - begin))
                for begin, shorter in enumerate(best[:end])
                if shorter is not None
            ]
            extended[end] = min(candidates, default=None)
        best = extended
    assert best[-1] is not None, f"{len(costs)} blocks are too few for {len(speeds)} stages"
    return Partition(best[-1][1])


def blocks(family: Family, speeds: Sequence[float]) -> Partition:
    """Return how many of the blocks with weights each stage holds."""
    return cut([_cost(family, block) for block in family.blocks if block.modules], speeds)


def shares(family: Family, speeds: Sequence[float]) -> tuple[float, ...]:
    """Return which part of the cost of all blocks each stage has."""
    costs = [_cost(family, block) for block in family.blocks if block.modules]
    cuts, begin = [], 0
    for size in cut(costs, speeds).sizes:
        cuts.append(sum(costs[begin : begin + size]) / sum(costs))
        begin += size
    return tuple(cuts)


def sites(family: Family, speeds: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Return, for each stage, how often it contains each of the geometry's attention sites."""
    with_weights = [block for block in family.blocks if block.modules]
    counts, begin = [], 0
    for size in blocks(family, speeds).sizes:
        inside = {part for block in with_weights[begin : begin + size] for part in _submodules(block)}
        kinds = [(site.streams, site.queries) for site in family.attentions if site.module in inside]
        counts.append(tuple(kinds.count((site.streams, site.queries)) for site in family.geometry.sites))
        begin += size
    return tuple(counts)


def _cost(family: Family, block: Block) -> float:
    """Return the multiplications of one token: with the block's weights, and in attention to ``_TOKENS`` tokens."""
    inside = _submodules(block)
    weights = sum(parameter.numel() for module in block.modules for parameter in module.parameters()) / block.parts
    widths = {site.streams: site.heads * site.head_dim for site in family.geometry.sites if site.queries is None}
    attending = [site for site in family.attentions if site.module in inside and site.queries is None]
    return weights + sum(2 * _TOKENS * widths[site.streams] for site in attending)


def _submodules(block: Block) -> set[nn.Module]:
    return {part for module in block.modules for part in module.modules()}
