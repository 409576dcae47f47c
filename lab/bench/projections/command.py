"""Ways to get from tokens to heads around an attention layer's projections: ``python -m lab bench projections``.

Ulysses projects the tokens that a rank holds, and then exchanges q, k and v: all heads together, or half of them while
the other half attends. They could also leave one by one, while the next is projected. Or the ranks could gather all
tokens and project only for their heads, which sends less on two ranks, as much on three, and more on more.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.model_spec import Devices

from ..loop.links import RANKS, Links
from ..loop.run import LoopTeam
from ..results import print_results
from .rank import ProjectionRequest

WAYS = ("exchange", "halves", "pieces", "gather")
TOKENS = (1024, 4096)
MEGABITS = (2000.0, 500.0)


class ProjectionTeam(LoopTeam):
    """Ranks that hold a layer, each in its own network namespace if there are links."""

    module = "lab.bench.projections.rank"


@dataclass(frozen=True, kw_only=True)
class WaysTaken:
    """The results for one size on one link.

    Attributes:
        tokens: of all ranks.
        megabits: limit of the link, in megabits a second; None for the machine's own.
        seconds: the fastest call, by way.
        ratios: the median of a call's seconds over those of ``exchange`` in the same round, by way.
    """

    tokens: int
    megabits: float | None
    seconds: dict[str, float]
    ratios: dict[str, float]

    @property
    def failed(self) -> bool:
        """A wrong result is an error of its rank."""
        return False

    def describe(self) -> str:
        """Format the results as a line."""
        link = "own link" if self.megabits is None else f"{self.megabits:g} Mbit/s"
        ways = (f"{way} {1e3 * self.seconds[way]:.1f} ms ({self.ratios[way]:.2f})" for way in WAYS)
        return f"{self.tokens} tokens, {link}: " + ", ".join(ways)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--tokens", action="append", type=int, metavar="N", help=f"repeatable (default: {TOKENS})")
    parser.add_argument("--heads", type=int, default=12, help="of 128 channels each (default %(default)s)")
    parser.add_argument(
        "--link", action="append", type=float, metavar="MBIT",
        help=f"limit of the link between the ranks; repeatable; 0 for no limit and no root (default: {MEGABITS})",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="calls of each way (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Time all ways; return the exit status."""
    tokens, rates = options.tokens or TOKENS, options.link or MEGABITS
    if min(*tokens, options.heads, options.rounds, 1) < 1:
        raise InvalidRequest("--tokens, --heads and --rounds are at least 1")
    devices = Devices(kind="cpu", indices=tuple(range(RANKS)))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        links = stack.enter_context(Links() if any(rates) else nullcontext())
        team = ProjectionTeam(devices, Path("-"), folder, links)
        stack.callback(team.close)
        measured = (
            _measure(team, links, size, rate or None, options.heads, options.rounds)
            for rate in rates
            for size in tokens
        )
        return print_results(measured, as_json=options.json)


def _measure(
    team: ProjectionTeam, links: Links | None, tokens: int, megabits: float | None, heads: int, rounds: int
) -> WaysTaken:
    if links:
        links.limit(megabits)
    requests = {way: ProjectionRequest(tokens=tokens, heads=heads, way=way) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    shuffle = random.Random(0)
    for turn in range(1 + rounds):
        for way in shuffle.sample(WAYS, len(WAYS)):
            slowest = max(result.seconds for result in team.run(requests[way]))
            seconds[way] += [slowest] if turn else []
    return WaysTaken(
        tokens=tokens,
        megabits=megabits,
        seconds={way: min(each) for way, each in seconds.items()},
        ratios={way: _ratio(each, seconds["exchange"]) for way, each in seconds.items()},
    )


def _ratio(seconds: Sequence[float], exchange: Sequence[float]) -> float:
    return statistics.median(this / other for this, other in zip(seconds, exchange, strict=True))
