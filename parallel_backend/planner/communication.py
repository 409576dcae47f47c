"""Seconds of exchanges: bytes by the strategies' own formulas, over the links between the devices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..interfaces.strategy import Strategy, Workload
from ..layout.parallel_layout import ParallelLayout
from ..strategies import STRATEGIES
from ..strategies.batch import BatchSplit
from ..strategies.dsp import Dsp
from ..strategies.pipe import Pipe
from ..strategies.ring import Ring
from ..strategies.sequence import SequenceSplit
from ..strategies.sharded_weights import ShardedWeights
from ..strategies.tensor import TensorParallel
from ..strategies.ulysses import Ulysses
from ..strategies.whole_queries import WholeQueries
from .hardware.description import Hardware, Link

SEQUENCE = "sequence"
"""``ring``, ``ulysses`` and ``dsp`` as one axis."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Who sends to whom.

    Attributes:
        axis: along which axis.
        around: whether a rank sends to the next one alone, as sums and gathers of process groups do, too. Else it sends
            an equal part to each other one.
    """

    axis: str
    around: bool = False


PATTERNS: Mapping[type[Strategy], Pattern] = {
    BatchSplit: Pattern(axis="cfg"),
    Dsp: Pattern(axis="dsp"),
    Pipe: Pattern(axis="pipe", around=True),
    Ring: Pattern(axis="ring", around=True),
    SequenceSplit: Pattern(axis=SEQUENCE),
    ShardedWeights: Pattern(axis=SEQUENCE, around=True),
    TensorParallel: Pattern(axis="tensor", around=True),
    Ulysses: Pattern(axis="ulysses"),
    WholeQueries: Pattern(axis=SEQUENCE),
}
"""By strategy."""


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What one strategy sends in a denoiser call.

    Attributes:
        by_rank: bytes of each rank.
        seconds: that the bytes take, without latency.
        latency: seconds of one exchange of nothing.
    """

    by_rank: tuple[int, ...] = ()
    seconds: float = 0.0
    latency: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the busiest rank."""
        return max(self.by_rank, default=0)


Sent = dict[type[Strategy], Exchanged]
"""What each strategy sends."""


def exchanged(layout: ParallelLayout, workload: Workload, hardware: Hardware) -> Sent:
    """Return what each strategy sends in a denoiser call, and how long it takes."""
    found = Sent()
    for strategy in STRATEGIES:
        sent = [strategy.bytes_sent(layout, workload, rank) for rank in range(layout.ranks)]
        found[type(strategy)] = _exchange(_pattern(type(strategy), hardware), layout, sent, hardware)
    return found


def _pattern(strategy: type[Strategy], hardware: Hardware) -> Pattern:
    """Return who sends to whom. CPU ranks gather weights from each other directly."""
    pattern = PATTERNS[strategy]
    return replace(pattern, around=False) if strategy is ShardedWeights and hardware.cores else pattern


def members(layout: ParallelLayout, rank: int, axis: str) -> list[int]:
    """Return the ranks along an axis that include a rank, in the order of the axis."""
    place = layout.coordinates(rank)
    parts = ("ring", "ulysses", "dsp") if axis == SEQUENCE else (axis,)
    kept = {name: where for name, where in place.items() if name not in (*parts, SEQUENCE)}
    ranks = [other for other in range(layout.ranks) if kept.items() <= layout.coordinates(other).items()]
    return sorted(ranks, key=lambda other: layout.coordinates(other)[axis])


def _exchange(pattern: Pattern, layout: ParallelLayout, sent: Sequence[int], hardware: Hardware) -> Exchanged:
    by_link: dict[Link, dict[int, float]] = {}
    for rank, nbytes in enumerate(sent):
        for link, some in _flows(pattern, layout, rank, nbytes, hardware):
            carried = by_link.setdefault(link, {})
            carried[rank] = carried.get(rank, 0.0) + some
    seconds = max(_link_seconds(by_link, around=pattern.around), default=0.0)
    latency = max((link.latency for link in by_link), default=0.0)
    return Exchanged(by_rank=tuple(sent), seconds=seconds, latency=latency)


def _flows(
    pattern: Pattern, layout: ParallelLayout, rank: int, nbytes: int, hardware: Hardware
) -> Iterator[tuple[Link, float]]:
    """Yield over which link a rank sends how many bytes."""
    group = members(layout, rank, pattern.axis)
    if len(group) < 2 or not nbytes:
        return
    index = group.index(rank)
    if pattern.around:
        yield hardware.link(rank, group[(index + 1) % len(group)], group), float(nbytes)
        return
    for other in group:
        if other != rank:
            yield hardware.link(rank, other, group), nbytes / (len(group) - 1)


def _link_seconds(by_link: Mapping[Link, Mapping[int, float]], *, around: bool) -> Iterator[float]:
    """Yield the seconds of the busiest device of each link, and of all its devices together.

    Args:
        by_link: bytes by the device that sends them.
        around: whether each device sends to the next one alone.
    """
    for link, carried in by_link.items():
        yield max(carried.values()) / ((around and link.around) or link.bandwidth)
        if link.total:
            yield sum(carried.values()) / link.total
