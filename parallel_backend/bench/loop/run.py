"""Whole step loops: layouts against one rank, interleaved, on links as they are or as slow as is asked for."""

import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.benchmark import Timer

from ...interfaces.geometry import LATENT, TIMESTEP
from ...layout.parallel_layout import ParallelLayout
from ...models import FAMILIES
from ..ranks.cases import SUBJECTS, Case, write_model
from ..ranks.peers import Peer
from ..ranks.rank import Answer
from ..ranks.team import TURN_PATIENCE, Team
from .links import Links
from .rank import LoopTurn

Say = Callable[[str], None]
ONE = ParallelLayout()
STEP_PATIENCE = 60.0
"""Seconds that a step may take."""


@dataclass(frozen=True, kw_only=True)
class LoopRow:
    """What came of a layout on links of so many megabits a second, None for those of the machine itself.

    Attributes:
        seconds: median of its loops; ``all_seconds``: each of them, by round.
        speedup: median over the rounds of one rank's seconds by its own.
        bound: that which no pipeline that streams patches can pass; None for layouts that are more or less.
        hidden: seconds of all steps for which bytes travel while attention is computed, as a ring has them.
        max_rel_difference: of the samples, to those of one rank.
        sent_bytes: by rank, in all steps.
    """

    layout: str
    megabits: float | None
    seconds: float
    all_seconds: tuple[float, ...]
    speedup: float
    bound: float | None
    hidden: float
    max_rel_difference: float
    sent_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Loops:
    """A case in so many steps: one row a layout and link."""

    case: Case
    steps: int
    rows: tuple[LoopRow, ...]

    def steady(self, row: LoopRow) -> float:
        """A row's seconds on a machine that is equally fast throughout: links are measured one after the other, and
        what else runs on the machine meanwhile slows one rank as well."""
        return statistics.median(one.seconds for one in self.rows if one.layout == str(ONE)) / row.speedup


class LoopTeam(Team):
    """Ranks that hold engines, in namespaces of their own if there are links."""

    module = "parallel_backend.bench.loop.rank"

    def __init__(self, ranks: int, model: Path, folder: Path, links: Links | None) -> None:
        super().__init__(Peer(name="layouts", ranks=ranks), model, folder)
        self._network = links

    def loop(self, turn: LoopTurn, steps: int) -> list[Answer]:
        """What each rank says of a step loop."""
        return self.run(turn, max(TURN_PATIENCE, steps * STEP_PATIENCE))

    def _prefix(self, rank: int) -> list[str]:
        return self._network.prefix(rank) if self._network else []

    def _environment(self, rank: int) -> Mapping[str, str]:
        chosen = {"GLOO_SOCKET_IFNAME": self._network.interfaces[rank]} if self._network else {}
        return {**super()._environment(rank), **chosen}


def measure(
    cases: Sequence[Case],
    layouts: Sequence[ParallelLayout],
    *,
    steps: int,
    rounds: int,
    megabits: Sequence[float],
    say: Say,
) -> list[Loops]:
    """Time all layouts in all cases, of one family; ``megabits`` are those of links, empty for the machine's own.

    Raises:
        InvalidRequest: there can be no such links here.
        RankFailed: a rank raised, ended or missed its deadline.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        links = stack.enter_context(Links()) if megabits else None
        model = write_model(folder / "model", cases[0].family)
        team = LoopTeam(max(layout.ranks for layout in layouts), model, folder, links)
        stack.callback(team.close)
        rates: list[float | None] = [None, *megabits]
        return [
            Loops(case=case, steps=steps, rows=tuple(
                row for rate in rates for row in _at(rate, team, links, case, layouts, steps, rounds, folder, say)
            ))
            for case in cases
        ]  # fmt: skip


def _at(
    megabits: float | None, team: LoopTeam, links: Links | None, case: Case, layouts: Sequence[ParallelLayout],
    steps: int, rounds: int, folder: Path, say: Say,
) -> list[LoopRow]:  # fmt: skip
    """The rows of one link."""
    inputs, output = folder / "inputs.safetensors", folder / "samples.safetensors"
    save_file(_tensors(case, steps), inputs)
    everyone, firsts = [ONE, *layouts], dict[str, Mapping[str, Tensor]]()
    where = f"{case}, {steps} steps" + (f", {megabits:g} Mbit/s" if megabits else "")
    if links:
        links.limit(megabits)
    for layout in everyone:
        say(f"{where}: {layout}")
        team.loop(LoopTurn(inputs=str(inputs), layout=str(layout), output=str(output)), steps)
        firsts[str(layout)] = load_file(output)
    seconds: dict[str, list[float]] = {str(layout): [] for layout in everyone}
    shuffle = random.Random(0)
    for turn in range(rounds):
        say(f"{where}: round {turn + 1} of {rounds}")
        for layout in shuffle.sample(everyone, len(everyone)):
            answers = team.loop(LoopTurn(inputs=str(inputs), layout=str(layout)), steps)
            seconds[str(layout)].append(answers[0].seconds)
    return [_row(layout, megabits, case, steps, seconds, firsts) for layout in everyone]


def _row(
    layout: ParallelLayout, megabits: float | None, case: Case, steps: int, seconds: Mapping[str, Sequence[float]],
    firsts: Mapping[str, Mapping[str, Tensor]],
) -> LoopRow:  # fmt: skip
    one, own = seconds[str(ONE)], seconds[str(layout)]
    wanted, got = firsts[str(ONE)]["samples"], firsts[str(layout)]
    return LoopRow(
        layout=str(layout),
        megabits=megabits,
        seconds=statistics.median(own),
        all_seconds=tuple(own),
        speedup=statistics.median(a / b for a, b in zip(one, own, strict=True)),
        bound=bound(layout, steps) if layout.approximation and layout.pipe == layout.ranks else None,
        hidden=steps * hidden(case, layout) if layout.ring > 1 and not layout.stale else 0.0,
        max_rel_difference=float((got["samples"] - wanted).abs().max() / wanted.abs().max()),
        sent_bytes=tuple(got["sent"].tolist()),
    )


def bound(layout: ParallelLayout, steps: int) -> float:
    """How many times as fast as one rank a pipeline is whose stages never wait but to fill up, and send for nothing."""
    stages, warmup = layout.pipe, min(layout.warmup, steps)
    patches = layout.patches or 2 * stages
    return steps / (warmup + (steps - warmup) / stages + (stages - 1) / (stages * patches))


def hidden(case: Case, layout: ParallelLayout) -> float:
    """Seconds that a rank of a ring attends, in a step, to blocks while others travel: all of them but the last."""
    subject = SUBJECTS[case.family]
    family, attending = FAMILIES[subject.class_name], 0.0
    shapes = {name: tuple(tensor.shape) for name, tensor in case.inputs().items()}
    streams = family.extent(subject.config, shapes).streams
    for site in family.describe(subject.config).sites:
        block = sum(streams[name] for name in site.streams) // layout.sequence
        q = torch.randn(1, site.heads, block, site.head_dim)
        attending += (
            site.count * (layout.ring - 1) * Timer("sdpa(q, q, q)", globals={"sdpa": sdpa, "q": q}).timeit(5).mean
        )
    return attending


def _tensors(case: Case, steps: int) -> dict[str, Tensor]:
    inputs = case.inputs()
    texts = {f"0.{name}": tensor for name, tensor in inputs.items() if name not in (LATENT, TIMESTEP)}
    return {"x": inputs[LATENT], "sigmas": torch.linspace(1, 0, steps + 1), **texts}
