"""Warns about layouts that send a lot between hosts in every block."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass

from ...layout.parallel_layout import AXES, ParallelLayout
from .crossing_bytes import CrossingBytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HostMap:
    """Where the ranks are.

    Attributes:
        names: the host of each rank; empty if all are on one.
        bandwidth: measured bytes a second of the slowest link between hosts; 0 if not measured.
    """

    names: tuple[str, ...] = ()
    bandwidth: float = 0.0


def cross_badly(layout: ParallelLayout, hosts: Sequence[str]) -> list[str]:
    """Return the parts of a layout that cross hosts but belong inside one."""
    found = [
        f"{axis}={layout.degrees[axis]}" for axis in ("ulysses", "dsp", "tensor") if _crosses(layout, (axis,), hosts)
    ]
    shares = layout.shard_weights and _crosses(layout, ("ring", "ulysses", "dsp"), hosts)
    return found + ["shard_weights"] * shares


def _crosses(layout: ParallelLayout, axes: Sequence[str], hosts: Sequence[str]) -> bool:
    """Whether ranks that differ in these axes alone are on more than one host."""
    groups: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for rank in range(layout.ranks if hosts else 0):
        place = layout.coordinates(rank)
        groups[tuple(place[axis] for axis in AXES if axis not in axes)].add(hosts[rank])
    return any(len(group) > 1 for group in groups.values())


class Crossing:
    """Counts, on rank 0, the traffic between hosts of a loop's second step, or forward, if heavy axes cross hosts.

    The first step may load weights.

    Args:
        layout: the layout.
        hosts: where its ranks are.
        chosen: whether the layout was chosen for the user.
    """

    def __init__(self, layout: ParallelLayout, hosts: HostMap, *, chosen: bool) -> None:
        self._badly, self._hosts, self._chosen = cross_badly(layout, hosts.names), hosts, chosen
        self._ranks, self._steps = layout.ranks, 0
        self._counter: CrossingBytes | None = None
        self._note = ""

    def step_done(self) -> str:
        """Count a step. Return a note for the user; "" for nothing."""
        self._done("step")
        if self._steps == 1:
            self._begin()
        return self._note

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Compute one forward of its own while the context lasts."""
        if self._steps == 1:
            self._begin()
        try:
            yield
            self._done("forward")
        finally:
            self.close()

    def _begin(self) -> None:
        if self._badly:
            self._counter = CrossingBytes(self._hosts.names, self._ranks)
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def _done(self, what: str) -> None:
        self._steps += 1
        if self._counter:
            counted = self._counter.total
            self.close()
            self._note = self._sentence(counted, what)
            log.warning(self._note)

    def close(self) -> None:
        """Count no more."""
        if self._counter:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counter = None

    def _sentence(self, count: float, part: str) -> str:
        what = " and ".join(self._badly)
        text = f"{what} across hosts sends about {count / 1e6:.1f} MB between them in a {part}"
        if self._hosts.bandwidth:
            text += f", {count / self._hosts.bandwidth:.2f} s at {self._hosts.bandwidth / 1e6:.0f} MB/s"
        return text if self._chosen else f"{text}; without a layout, only CFG or a ring crosses"


class Crossings:
    """Makes a ``Crossing`` for each loop, and one for all forwards of a model in a layout.

    Args:
        hosts: where the ranks are.
    """

    def __init__(self, hosts: HostMap) -> None:
        self._hosts = hosts
        self._of_forwards: dict[tuple[str, ParallelLayout, bool], Crossing] = {}

    @contextmanager
    def loop(self, layout: ParallelLayout, *, chosen: bool) -> Iterator[Callable[[], str]]:
        """See ``Elsewhere``."""
        with closing(Crossing(layout, self._hosts, chosen=chosen)) as crossing:
            yield crossing.step_done

    def forward(self, model: str, layout: ParallelLayout, *, chosen: bool) -> AbstractContextManager[None]:
        """See ``Elsewhere``."""
        key = (model, layout, chosen)
        if key not in self._of_forwards:
            self._of_forwards[key] = Crossing(layout, self._hosts, chosen=chosen)
        return self._of_forwards[key].forward()

    def forget(self, model: str) -> None:
        """Forget a model that is unloaded."""
        for key in [key for key in self._of_forwards if key[0] == model]:
            del self._of_forwards[key]
