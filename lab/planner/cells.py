"""Some layouts timed here, beside what the planner predicts from a probe: ``python -m lab plan measured``.

A cell is a family, a size and a layout. All cells of a family and a size take turns, and each round begins with a
probe: where the speed of a machine changes within minutes, one probe would count that change as an error too. The
planner chooses by the first probe alone, and in ``fastest`` it tries a few layouts that are predicted to be nearly as
fast in the first steps. Its choice before and after that is compared with the best of all that were timed, and with
what the backend takes without a plan: the regret of a choice is by how much its time exceeds the best one's.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lab.bench.ranks.cases import Case, write_model
from lab.bench.results import print_results
from parallel_backend.client.client import Client
from parallel_backend.client.devices import choose_devices
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.engine.layout_trial import fastest
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.modes import FASTEST
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner import measured, record
from parallel_backend.planner.hardware.description import Hardware
from parallel_backend.planner.models import Model, of_checkpoint
from parallel_backend.planner.planning import Plan, plan, rivals
from parallel_backend.planner.prediction import predict
from parallel_backend.planner.request import Prompt
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.verify import examples

from . import machines
from .machines import Machine

FAMILIES = ("flux", "wan", "latte")
"""Families whose small models are timed, by the names of ``lab bench``."""
SIZES = (1024, 4096)
"""Tokens of the latent."""
ROUNDS = 5
_TEXT = 64


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A layout that was timed.

    Attributes:
        layout: the layout.
        predicted: seconds of a forward, the median of all probes.
        measured: the same, the median of all rounds.
    """

    layout: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Cells:
    """All layouts of a family and a size.

    Attributes:
        what: family, tokens and guidance.
        cells: by layout.
        chosen: what the planner takes.
        settled: what it takes after it has tried that beside its rivals, by the times here.
        rule: what the backend takes without a plan.
        probing: seconds of a probe, the median.
    """

    what: str
    cells: tuple[Cell, ...]
    chosen: str
    settled: str
    rule: str
    probing: float

    @property
    def failed(self) -> bool:
        """Nothing is a failure: errors are reported."""
        return False

    def regret(self, layout: str) -> float:
        """By how much a layout's time exceeds the best one's."""
        by_layout = {cell.layout: cell.measured for cell in self.cells}
        return by_layout[layout] / min(by_layout.values()) - 1

    def _over(self, layout: str) -> str:
        timed = layout in {cell.layout for cell in self.cells}
        return f"{100 * self.regret(layout):.0f} % over" if timed else "which was not timed beside"

    def describe(self) -> str:
        """Format the cells as a table."""
        lines = [f"{self.what}: {'predicted':>10} {'measured':>10} {'error':>7}"]
        lines += [
            f"{cell.layout:34} {1e3 * cell.predicted:8.1f} ms {1e3 * cell.measured:8.1f} ms {100 * cell.error:6.0f}%"
            for cell in self.cells
        ]
        error = statistics.median(abs(cell.error) for cell in self.cells)
        lines.append(
            f'median error {100 * error:.0f} %; a probe takes {self.probing:.1f} s; the planner takes "{self.chosen}", '
            f'{self._over(self.chosen)} the best, and "{self.settled}" when it has tried, {self._over(self.settled)} '
            f'it; without a plan "{self.rule}" is taken, {self._over(self.rule)} it'
        )
        return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--family", action="append", choices=FAMILIES, help="repeatable (default: all)")
    parser.add_argument("--tokens", action="append", type=int, metavar="N", help=f"repeatable (default: {SIZES})")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default %(default)s)")
    parser.add_argument("--guidance", action="store_true", help="two branches")
    parser.add_argument("--batch", type=int, default=1, help="samples (default %(default)s)")
    machines.add_arguments(parser)
    parser.add_argument(
        "--layout", action="append", metavar="LAYOUT",
        help="times only this one, with every balance, and one rank; repeatable (default: all that fit)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="probes, and forwards of each layout (default %(default)s)"
    )
    parser.add_argument("--devices", metavar="LIST", help="devices of the ranks")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Time what the options ask for; return the exit status."""
    for name in ("rounds", "batch"):
        if getattr(options, name) < 1:
            raise InvalidRequest(f"--{name} {getattr(options, name)}: at least 1 is needed")
    machine = machines.of(options)
    devices = choose_devices(options.devices, {f"--ranks {options.ranks}": options.ranks})
    sizes = options.tokens or SIZES
    return print_results(
        (
            timed(
                Case(family=family, tokens=tokens, text_tokens=_TEXT, branches=options.batch),
                devices,
                machine,
                guided=options.guidance,
                rounds=options.rounds,
                only=[ParallelLayout.parse(text) for text in options.layout or ()],
            )
            for family in options.family or FAMILIES
            for tokens in sizes
        ),
        as_json=options.json,
    )


def timed(
    case: Case, devices: Devices, machine: Machine, *, guided: bool, rounds: int, only: Sequence[ParallelLayout] = ()
) -> Cells:
    """Probe, predict and time all layouts of a family's small model that fit.

    Args:
        case: model and size. Its branches are samples here.
        devices: of the ranks.
        machine: what is different here.
        guided: whether there are two branches.
        rounds: probes, and forwards of each layout.
        only: layouts without balance, if not all are timed. One rank is, too.
    """
    inputs = [dict(case.inputs()) for _ in range(2 if guided else 1)]
    with tempfile.TemporaryDirectory(prefix="plan-cells-") as name:
        scratch = Path(name)
        path = write_model(scratch / "model", case.family)
        asked = _prompt(of_checkpoint(path), inputs[0], guided=guided)
        with machine.made(len(devices.indices), scratch), temporary_backend(scratch) as client:
            probe = _Probe(client=client, devices=devices, asked=asked)
            hardware = probe.measure()
            made = plan(asked, hardware, mode=FASTEST)
            tried = _tried([each.layout for each in made.predictions if each.room.fits], only)
            calls = [_call(client, path, devices, layout, inputs) for layout in tried]
            cells = _cells(tried, calls, probe, rounds)
    return Cells(
        what=_what(case, asked) + f" on {len(devices.indices)} ranks{machine}", cells=cells,
        chosen=str(made.chosen.layout), settled=_settled(made, cells), rule=str(made.rule.layout),
        probing=statistics.median(probe.seconds),
    )  # fmt: skip


def _settled(made: Plan, cells: Sequence[Cell]) -> str:
    """Return what is taken after trials, by the times of the layouts that were timed."""
    measured = {cell.layout: cell.measured for cell in cells}
    tried = [each for each in (made.chosen.layout, *rivals(made)) if str(each) in measured]
    return str(fastest(tried[0], {each: measured[str(each)] for each in tried}) if tried else made.chosen.layout)


def _tried(fitting: Sequence[ParallelLayout], only: Sequence[ParallelLayout]) -> list[ParallelLayout]:
    """Return the layouts that are timed: those of ``only`` with every balance, and one rank, or all.

    Raises:
        InvalidRequest: one of ``only`` is not among those that fit.
    """
    without = {layout: replace(layout, balance=(), attention_balance=()) for layout in fitting}
    for each in only:
        if each not in without.values():
            choices = ", ".join(f'"{layout}"' for layout in dict.fromkeys(without.values()))
            raise InvalidRequest(f'--layout "{each}" does not work here; choices: {choices}')
    return [layout for layout, bare in without.items() if not only or bare in (ParallelLayout(), *only)]


def _what(case: Case, asked: Prompt) -> str:
    samples = f", {asked.samples} samples" if asked.samples > 1 else ""
    return f"{replace(case, branches=1)}{samples}{', two branches' if asked.guided else ''}"


def _prompt(model: Model, inputs: dict[str, torch.Tensor], *, guided: bool) -> Prompt:
    """Return the prompt of one forward with these inputs."""
    prompt = Prompt(
        model=model, size=tuple(inputs["hidden_states"].shape[2:]), steps=1, guided=guided, dtype=torch.float32,
        samples=len(inputs["hidden_states"]), loop=False,
    )  # fmt: skip
    prompt.__dict__["shapes"] = {name: (1, *tensor.shape[1:]) for name, tensor in inputs.items()}
    return prompt


class _Probe:
    """Measures the machine for a prompt, again and again."""

    def __init__(self, *, client: Client, devices: Devices, asked: Prompt) -> None:
        self._client, self._devices, self._asked = client, devices, asked
        self._names = record.facts_of(devices).devices
        self.seconds: list[float] = []
        self.found: list[Hardware] = []

    def measure(self) -> Hardware:
        """Measure it now."""
        begin = time.perf_counter()
        found = measured.measure(self._client, self._devices, self._asked, self._names)
        self.found.append(measured.limited(found))
        self.seconds.append(time.perf_counter() - begin)
        return self.found[-1]

    def predicted(self, layout: ParallelLayout) -> float:
        """Return the seconds of the prompt in a layout, the median of all probes.

        The first one says how much memory is free: before the later ones, models were loaded.
        """
        first, taken = self.found[0], list[float]()
        for each in self.found:
            hardware = each.with_memory([device.memory for device in first.devices], first.host_memory)
            taken.append(predict(self._asked, layout, hardware).sampling)
        return statistics.median(taken)


def _cells(
    tried: Sequence[ParallelLayout], calls: Sequence[Callable[[], float]], probe: _Probe, rounds: int
) -> tuple[Cell, ...]:
    """Time a forward in each layout: the second one each time that it is its turn."""
    found: list[list[float]] = [[] for _ in tried]
    for number in range(rounds):
        if number:
            probe.measure()
        for call, seconds in zip(calls, found, strict=True):
            call()
            seconds.append(call())
    return tuple(
        Cell(layout=str(layout), predicted=probe.predicted(layout), measured=statistics.median(seconds))
        for layout, seconds in zip(tried, found, strict=True)
    )


def _call(
    client: Client, path: Path, devices: Devices, layout: ParallelLayout, inputs: Sequence[dict[str, torch.Tensor]]
) -> Callable[[], float]:
    spec = ModelSpec(path=str(path), devices=devices, dtype="float32", layout=layout)
    message = Forward(model=spec, branches=len(inputs), measure="seconds")

    def call() -> float:
        return float(client.call(message, examples.branches(inputs))["seconds"])

    return call
