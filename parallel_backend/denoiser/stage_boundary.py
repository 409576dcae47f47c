"""The stages of a pipeline: which blocks each holds, and how activations go from one to the next.

The cut into consecutive ranges whose largest cost is least is the linear partition problem (Skiena, The Algorithm
Design Manual), solved by dynamic programming.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..distributed.collectives import Leaving, Work, receive, wait
from ..distributed.mesh import Axis
from ..interfaces.family import Block, Family
from ..interfaces.state import State
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


class Boundary:
    """The way from the stage before and to the stage after.

    What leaves is kept until it has left; ``finish`` waits for that.

    Args:
        ways: the stages in two groups; each stage receives in one of them and sends in the other.
    """

    def __init__(self, axis: Axis, ways: Sequence[Axis]) -> None:
        self.axis, self._ways = axis, ways
        self._leaving = Leaving()

    @property
    def first(self) -> bool:
        """Whether nothing comes before this stage."""
        return self.axis.index == 0

    @property
    def last(self) -> bool:
        """Whether nothing comes after this stage."""
        return self.axis.index == self.axis.size - 1

    def expect(self, shapes: Mapping[str, torch.Size], like: Tensor) -> "Arriving":
        """Start to receive the streams that the stage before makes, in the dtype and on the device of a tensor."""
        flat = like.new_empty(sum(shape.numel() for shape in shapes.values()))
        before = self.axis.index - 1
        return Arriving(shapes, flat, receive(flat, self._ways[before % 2], before))

    def send(self, streams: Mapping[str, Tensor]) -> None:
        """Start to send streams to the stage after."""
        assert len({stream.dtype for stream in streams.values()}) == 1, "the stage after expects one dtype"
        flat = torch.cat([stream.reshape(-1) for stream in streams.values()])
        self._leaving.send(flat, self._ways[self.axis.index % 2], self.axis.index + 1)

    def finish(self) -> None:
        """Wait until all has left."""
        self._leaving.finish()


class Arriving:
    """Streams on their way here."""

    def __init__(self, shapes: Mapping[str, torch.Size], flat: Tensor, works: Sequence[Work]) -> None:
        self._shapes, self._flat, self._works = shapes, flat, works

    def wait(self) -> dict[str, Tensor]:
        """The streams."""
        wait(self._works)
        parts = self._flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def shapes(state: State) -> dict[str, torch.Size]:
    """The shapes of the streams."""
    return {name: stream.shape for name, stream in state.streams.items()}
