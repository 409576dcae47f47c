"""Timing whole step loops: layouts against one rank, interleaved, on unlimited and on limited links."""

import random
import statistics
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.benchmark import Timer

from parallel_backend.families.registry import family_of
from parallel_backend.interfaces.geometry import LATENT, TIMESTEP
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices

from ..ranks.cases import MODELS, Case, write_model
from ..ranks.peers import Peer
from ..ranks.rank import Result
from ..ranks.team import STEP_PATIENCE, Team
from .links import Links
from .rank import LoopRequest

Log = Callable[[str], None]
ONE_RANK = ParallelLayout()
LOOP_STEP_PATIENCE = 60.0
"""Seconds that one step of a loop may take."""


@dataclass(frozen=True, kw_only=True)
class LoopRow:
    """The result of one layout on one link.

    Attributes:
        layout: the layout, as text.
        megabits: limit of the link, in megabits a second; None for the machine's own, unlimited link.
        seconds: median over its loops.
        all_seconds: its loops, by round.
        speedup: median over the rounds of one rank's seconds divided by this layout's.
        bound: the highest speedup that a pipeline of patches can reach; None for layouts that are not just a pipeline.
        hidden: seconds of all steps during which bytes travel while attention is computed, as in a ring.
        max_rel_difference: of the samples, relative to one rank's.
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
class LoopTable:
    """The results of one case: one row per layout and link.

    Attributes:
        case: what was timed.
        steps: of each loop.
        rows: by link, then by layout.
    """

    case: Case
    steps: int
    rows: tuple[LoopRow, ...]

    def steady(self, row: LoopRow) -> float:
        """A row's seconds, corrected for changes in the machine's speed while links are measured one after the other.

        Other work that slows a layout slows one rank on the same link as well, so this is the median over all links of
        one rank's seconds, divided by the row's speedup.
        """
        return statistics.median(one.seconds for one in self.rows if one.layout == str(ONE_RANK)) / row.speedup


class LoopTeam(Team):
    """Ranks that hold engines, each in its own network namespace if there are links."""

    module = "lab.bench.loop.rank"

    def __init__(self, devices: Devices, model: Path, folder: Path, links: Links | None) -> None:
        super().__init__(Peer(name="layouts", ranks=len(devices.indices)), devices, model, folder)
        self._network = links

    def loop(self, request: LoopRequest, steps: int) -> list[Result]:
        """Run a step loop and return each rank's result."""
        return self.run(request, max(STEP_PATIENCE, steps * LOOP_STEP_PATIENCE))

    def _prefix(self, rank: int) -> list[str]:
        return self._network.prefix(rank) if self._network else []

    def _environment(self, rank: int) -> Mapping[str, str]:
        interface = {"GLOO_SOCKET_IFNAME": self._network.interfaces[rank]} if self._network else {}
        return {**super()._environment(rank), **interface}


def measure(
    cases: Sequence[Case],
    layouts: Sequence[ParallelLayout],
    devices: Devices,
    *,
    steps: int,
    rounds: int,
    megabits: Sequence[float],
    log: Log,
) -> Generator[LoopTable, None, None]:
    """Time all layouts in each case and yield its table when it is complete.

    All cases share a family. The ranks live until the generator ends or is closed.

    Args:
        cases: what to time.
        layouts: beside one rank.
        devices: as many as the largest layout has ranks.
        steps: of each loop.
        rounds: timed loops of each layout.
        megabits: limits of further links, in megabits a second; empty for only the unlimited link.
        log: called with the current work.

    Raises:
        InvalidRequest: links cannot be created here.
        RankFailed: a rank raised, ended or missed its deadline.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        links = stack.enter_context(Links()) if megabits else None
        model = write_model(folder / "model", cases[0].family)
        team = LoopTeam(devices, model, folder, links)
        stack.callback(team.close)
        rates: list[float | None] = [None, *megabits]
        for case in cases:
            yield LoopTable(case=case, steps=steps, rows=tuple(
                row for rate in rates for row in _at(rate, team, links, case, layouts, steps, rounds, folder, log)
            ))  # fmt: skip


def _at(
    megabits: float | None, team: LoopTeam, links: Links | None, case: Case, layouts: Sequence[ParallelLayout],
    steps: int, rounds: int, folder: Path, log: Log,
) -> list[LoopRow]:  # fmt: skip
    """Time all layouts on one link."""
    inputs, output = folder / "inputs.safetensors", folder / "samples.safetensors"
    save_file(_tensors(case, steps), inputs)
    everyone, outputs = [ONE_RANK, *layouts], dict[str, Mapping[str, Tensor]]()
    title = f"{case}, {steps} steps" + (f", {megabits:g} Mbit/s" if megabits else "")
    if links:
        links.limit(megabits)
    for layout in everyone:
        log(f"{title}: {layout}")
        team.loop(LoopRequest(inputs=str(inputs), layout=str(layout), output=str(output)), steps)
        outputs[str(layout)] = load_file(output)
    seconds: dict[str, list[float]] = {str(layout): [] for layout in everyone}
    shuffle = random.Random(0)
    for index in range(rounds):
        log(f"{title}: round {index + 1} of {rounds}")
        for layout in shuffle.sample(everyone, len(everyone)):
            results = team.loop(LoopRequest(inputs=str(inputs), layout=str(layout)), steps)
            seconds[str(layout)].append(results[0].seconds)
    device = torch.device(team.devices.of_rank(0))
    return [_row(layout, megabits, case, steps, seconds, outputs, device) for layout in everyone]


def _row(
    layout: ParallelLayout, megabits: float | None, case: Case, steps: int, seconds: Mapping[str, Sequence[float]],
    outputs: Mapping[str, Mapping[str, Tensor]], device: torch.device,
) -> LoopRow:  # fmt: skip
    one_rank, this = seconds[str(ONE_RANK)], seconds[str(layout)]
    reference, output = outputs[str(ONE_RANK)]["samples"], outputs[str(layout)]
    return LoopRow(
        layout=str(layout),
        megabits=megabits,
        seconds=statistics.median(this),
        all_seconds=tuple(this),
        speedup=statistics.median(a / b for a, b in zip(one_rank, this, strict=True)),
        bound=bound(layout, steps) if layout.approximation and layout.pipe == layout.ranks else None,
        hidden=steps * hidden(case, layout, device) if layout.ring > 1 and not layout.stale else 0.0,
        max_rel_difference=float((output["samples"] - reference).abs().max() / reference.abs().max()),
        sent_bytes=tuple(output["sent"].tolist()),
    )


def bound(layout: ParallelLayout, steps: int) -> float:
    """The speedup over one rank of a pipeline whose stages wait only while it fills, and whose transfers are free."""
    stages, warmup = layout.pipe, min(layout.warmup, steps)
    patches = layout.patches or 2 * stages
    return steps / (warmup + (steps - warmup) / stages + (stages - 1) / (stages * patches))


def hidden(case: Case, layout: ParallelLayout, device: torch.device) -> float:
    """Seconds of a step that a ring's rank spends on attention while other blocks travel.

    Blocks travel during attention to every block but the last.
    """
    model = MODELS[case.family]
    family, seconds = family_of(model.class_name), 0.0
    shapes = {name: tuple(tensor.shape) for name, tensor in case.inputs().items()}
    streams = family.extent(model.config, shapes).streams
    for site in (site for site in family.describe(model.config).sites if site.queries is None):
        block = sum(streams[name] for name in site.streams) // layout.sequence
        q = torch.randn(1, site.heads, block, site.head_dim, device=device)
        seconds += (
            site.count * (layout.ring - 1) * Timer("sdpa(q, q, q)", globals={"sdpa": sdpa, "q": q}).timeit(5).mean
        )
    return seconds


def _tensors(case: Case, steps: int) -> dict[str, Tensor]:
    inputs = case.inputs()
    texts = {f"0.{name}": tensor for name, tensor in inputs.items() if name not in (LATENT, TIMESTEP)}
    return {"x": inputs[LATENT], "sigmas": torch.linspace(1, 0, steps + 1), **texts}
