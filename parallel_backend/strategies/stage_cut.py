"""Which blocks each stage of a pipeline holds.

The cut into consecutive ranges whose largest cost is least is the linear partition problem (Skiena, The Algorithm
Design Manual), solved by dynamic programming.
"""

from collections.abc import Sequence

from ..interfaces.family import Block, Family
from ..layout.partition import Partition

_TOKENS = 4096
"""Tokens of a row for which stages are to take equally long: an image of 1024 pixels a side in most models."""


def cut(costs: Sequence[float], speeds: Sequence[float]) -> Partition:
    """Consecutive items by stage, at least one each, so that the slowest stage takes the least time.

    Args:
        costs: of each item; speeds: of each stage, in the cost that it does in a unit of time.
    """
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[i]: the time of the slowest stage so far, and how many items each took, for the first i items.
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * len(costs)]
    for speed in speeds:
        longer: list[tuple[float, tuple[int, ...]] | None] = [None] * len(best)
        for end in range(1, len(best)):
            ways = [
                (max(found[0], (before[end] - before[begin]) / speed), (*found[1], end - begin))
                for begin, found in enumerate(best[:end])
                if found is not None
            ]
            longer[end] = min(ways, default=None)
        best = longer
    assert best[-1] is not None, f"{len(costs)} blocks are too few for {len(speeds)} stages"
    return Partition(best[-1][1])


def blocks(family: Family, speeds: Sequence[float]) -> Partition:
    """How many of the blocks with weights each stage holds. ``speeds`` are by stage."""
    return cut([_cost(family, block) for block in family.blocks if block.modules], speeds)


def sites(family: Family, speeds: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """By stage how often each of the geometry's sites is in it."""
    held, counts, begin = [block for block in family.blocks if block.modules], [], 0
    for size in blocks(family, speeds).sizes:
        inside = {part for block in held[begin : begin + size] for module in block.modules for part in module.modules()}
        streams = [site.streams for site in family.attentions if site.module in inside]
        counts.append(tuple(streams.count(site.streams) for site in family.geometry.sites))
        begin += size
    return tuple(counts)


def _cost(family: Family, block: Block) -> float:
    """Multiplications of a token with the block's weights, and of attention with a usual number of others."""
    inside = {part for module in block.modules for part in module.modules()}
    weights = sum(parameter.numel() for module in block.modules for parameter in module.parameters()) / block.parts
    widths = {site.streams: site.heads * site.head_dim for site in family.geometry.sites}
    return weights + sum(2 * _TOKENS * widths[site.streams] for site in family.attentions if site.module in inside)
