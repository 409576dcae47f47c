"""What unequal ranks can do together: from the speed of each rank to weights along each axis.

Ranks of an axis share the work of every rank of the other axes alike: Ulysses' heads are the same all around a ring,
and a tensor rank's columns those of all tokens. Where speeds do not allow for that, the slowest of them decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .parallel_layout import ParallelLayout

Weights = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class AxisWeights:
    """By what the ranks along each axis share their work, relative to each other.

    Attributes:
        tokens: by place in the sequence.
        heads: by place on ``ulysses``.
        frames: by place on ``dsp``.
        columns: of linear layers, by place on ``tensor``.
        cut_heads: by place on ``tensor``.
        samples: by place on ``data``.
    """

    tokens: Weights
    heads: Weights
    frames: Weights
    columns: Weights
    cut_heads: Weights
    samples: Weights


def weights_of(layout: ParallelLayout) -> AxisWeights:
    """Return the weights along each axis of a layout."""
    linear, attention = _grid(layout, layout.balance), _grid(layout, layout.attention_balance or layout.balance)
    columns, cut_heads = _inner(linear), _inner(attention)
    tokens = tuple(_least(row, columns) for row in linear)
    rates = [_least(row, cut_heads) for row in attention]
    return AxisWeights(
        tokens=tokens,
        heads=_heads(layout, tokens, rates),
        frames=tuple(rates) if layout.dsp > 1 else (1.0,),
        columns=columns,
        cut_heads=cut_heads,
        samples=layout.balance if layout.balance and layout.shares_samples else (1.0,) * layout.data,
    )


def _heads(layout: ParallelLayout, tokens: Weights, rates: Sequence[float]) -> Weights:
    """Return the weights along ``ulysses``, whose ranks attend to the queries of their place on the ring.

    Args:
        layout: of the ranks.
        tokens: weights by place in the sequence.
        rates: what each place there can attend to.
    """
    size = layout.ulysses
    queries = [sum(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    around = [range(place, layout.ring * size, size) for place in range(size)]
    return tuple(min(rates[i] / queries[i // size] for i in places) for places in around)


def by_rank(layout: ParallelLayout) -> Weights:
    """Return the relative speed of each rank of a layout; 1 for each without a balance."""
    if not layout.balance:
        return (1.0,) * layout.ranks
    places = map(layout.coordinates, range(layout.ranks))
    if layout.adapts or layout.shares_samples:
        axis = "data" if layout.shares_samples else "pipe" if layout.pipe > 1 else "ring"
        return tuple(layout.balance[place[axis]] for place in places)
    return tuple(layout.balance[place["sequence"] * layout.tensor + place["tensor"]] for place in places)


def _grid(layout: ParallelLayout, balance: Weights) -> list[Weights]:
    """Return the speeds by place in the sequence, in it by place on ``tensor``."""
    if layout.pipe > 1 or layout.shares_samples or not balance:
        return [(1.0,) * layout.tensor] * layout.sequence
    if layout.stale:
        return [(speed,) * layout.tensor for speed in balance for _ in range(layout.ulysses)]
    return [balance[i : i + layout.tensor] for i in range(0, len(balance), layout.tensor)]


def _inner(grid: Sequence[Weights]) -> Weights:
    """Return the weights along the inner axis: the least share that a rank there has of the speed of its row."""
    columns = zip(*grid, strict=True)
    return tuple(min(speed / sum(row) for speed, row in zip(each, grid, strict=True)) for each in columns)


def _least(row: Weights, shares: Weights) -> float:
    """Return what a row of ranks can do that share its work so: what its busiest rank can."""
    return min(speed / share for speed, share in zip(row, shares, strict=True))
