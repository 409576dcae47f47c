"""The seconds of a model's layers by share of the tokens, as a rank measures them."""

from collections.abc import Callable, Mapping
from functools import partial as partial_of
from typing import Any

import torch
from torch import Tensor

from ..attention.routing import Route, routed
from ..distributed.collectives import gather_texts
from ..distributed.mesh import Axis
from ..distributed.rank_speeds import SAME_SPEED_RATIO, grouped
from ..interfaces.family import Family
from ..interfaces.state import State
from ..layout.partition import Partition
from ..layout.stream_partition import StreamPartition
from ..strategies.token_split import TokenSplit
from .hardware.description import Curve
from .layers import kind_of
from .timing import usual_here, usual_of

_ALONE = 2
"""In how many parts the tokens are of which rank 0 computes one alone."""


def measured(
    family: Family, inputs: Mapping[str, Tensor], world: Axis, device: torch.device
) -> tuple[Curve, float, float, State]:
    """Measure a forward without attention on all ranks together; collective over the world.

    Returns:
        The seconds by share of the tokens, how much faster rank 0 is while the others do nothing, ``balanced`` of this
        device, and the state of all tokens after the embedding.
    """
    nothing = _NoAttention()
    routes = [Route(site.module, nothing, site.each_sample) for site in family.attentions]
    with routed(routes):
        embedding, whole = usual_of(lambda: family.embed(inputs), world)
        points, each, own, balanced = list[tuple[float, float]](), dict[int, float](), 0.0, 0.0
        for n in range(world.size, 0, -1):
            state = _part(whole, 1 / n)
            blocks, each[n], head = _forward(family, state, lambda work: usual_of(work, world))
            points.append((1 / n, embedding + blocks + head))
            if n == _ALONE and world.index == 0:  # the others wait for the next round
                own = _forward(family, state, usual_here)[1]
        share = _share_by_speed(points[0][1], world, device)
        if share is not None:  # apart from the curve: the speed of a machine may change from one point to the next
            blocks, _, head = _forward(family, _part(whole, share), lambda work: usual_of(work, world))
            balanced = share / (embedding + blocks + head)
    # All tokens are a second measurement of the same, which takes less than twice as long: something may disturb one.
    faster = min(each[_ALONE], each[1] / _ALONE) / own if own else 1.0
    return tuple(points), max(1.0, faster), balanced, whole


def _share_by_speed(seconds: float, world: Axis, device: torch.device) -> float | None:
    """Return the share of the tokens in proportion to this rank's speed; None on all ranks where speeds are alike.

    Args:
        seconds: of an equal share on this rank.
    """
    speeds = [1 / float(each) for each in gather_texts(repr(seconds), world)]
    alike = len(set(grouped(speeds, SAME_SPEED_RATIO[device.type]))) == 1
    return None if alike else speeds[world.index] / sum(speeds)


def _part(whole: State, share: float) -> State:
    """Return the first tokens of each stream."""
    if share == 1:
        return whole
    streams = {}
    for name, tokens in whole.streams.items():
        first = min(tokens.shape[1], max(1, round(tokens.shape[1] * share)))
        streams[name] = StreamPartition(((0, Partition((first, tokens.shape[1] - first))),))
    split = TokenSplit(axis=Axis(name="sequence", ranks=(0, 1), index=0, group=None, gloo=True), streams=streams)
    return split.shard(whole)


def _forward(
    family: Family, state: State, timed: Callable[[Callable[[], Any]], tuple[float, Any]]
) -> tuple[float, float, float]:
    """Return the seconds of all blocks, of one of each kind, and of what follows the blocks."""
    total, seen = 0.0, dict[tuple[object, ...], float]()
    for block in family.blocks:
        if (kind := kind_of(block)) not in seen:
            seen[kind], state = timed(partial_of(block.run, state))
        total += seen[kind]
    return total, sum(seen.values()), timed(partial_of(family.head, state))[0]


class _NoAttention:
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        return query
