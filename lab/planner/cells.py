"""Some layouts timed here, beside what the planner predicts from a probe: ``python -m lab plan measured``.

A cell is a family, a size and a layout. All cells of a family and a size take turns, and each round begins with a
probe: where the speed of a machine changes within minutes, one probe would count that change as an error too. The
planner chooses by the first probe alone, and in ``fastest`` it tries a few layouts that are predicted to be nearly as
fast in the first steps. Its choice before and after that is compared with the best of all that were timed, and with
what the backend takes without a plan: the regret of a choice is by how much its time exceeds the best one's.

With ``--steps`` a cell is a whole sampling on the ranks, and approximate layouts take part: they begin with exact
steps, so the number of steps decides whether they are the fastest.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lab.bench.ranks.cases import Case, write_model
from lab.bench.results import print_results
from parallel_backend.client.client import Client
from parallel_backend.client.devices import choose_devices
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.engine.layout_trial import fastest
from parallel_backend.errors import InvalidRequest
from parallel_backend.interfaces.geometry import LATENT, TIMESTEP
from parallel_backend.layout.modes import APPROXIMATE, FASTEST
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner import measured, record
from parallel_backend.planner.hardware.description import Hardware
from parallel_backend.planner.models import Model, of_checkpoint
from parallel_backend.planner.planning import Plan, plan, rivals
from parallel_backend.planner.prediction import predict
from parallel_backend.planner.request import Prompt
from parallel_backend.protocol.messages import Forward, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.verify import examples

from . import machines
from .machines import Machine
from .regret import Cell, Cells

FAMILIES = ("flux", "wan", "latte")
"""Families whose small models are timed, by the names of ``lab bench``."""
SIZES = (1024, 4096)
"""Tokens of the latent."""
ROUNDS = 5
_TEXT, _GUIDANCE = 64, 4.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--family", action="append", choices=FAMILIES, help="repeatable (default: all)")
    parser.add_argument("--tokens", action="append", type=int, metavar="N", help=f"repeatable (default: {SIZES})")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default %(default)s)")
    parser.add_argument("--guidance", action="store_true", help="two branches")
    parser.add_argument("--batch", type=int, default=1, help="samples (default %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N",
        help='times samplings of N steps, also in approximate layouts, as mode "allow approximate" plans them '
        "(default: single exact steps)",
    )  # fmt: skip
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
    if options.steps < 0:
        raise InvalidRequest(f"--steps {options.steps}: a number of steps is needed, or 0 for single ones")
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
                steps=options.steps,
                rounds=options.rounds,
                only=[ParallelLayout.parse(text) for text in options.layout or ()],
            )
            for family in options.family or FAMILIES
            for tokens in sizes
        ),
        as_json=options.json,
    )


def timed(
    case: Case, devices: Devices, machine: Machine, *, guided: bool, rounds: int, steps: int = 0,
    only: Sequence[ParallelLayout] = (),
) -> Cells:  # fmt: skip
    """Probe, predict and time all layouts of a family's small model that fit.

    Args:
        case: model and size. Its branches are samples here.
        devices: of the ranks.
        machine: what is different here.
        guided: whether there are two branches.
        rounds: probes, and forwards or samplings of each layout.
        steps: of a sampling; 0 for forwards.
        only: layouts without balance, if not all are timed. One rank is, too.
    """
    inputs = [dict(case.inputs()) for _ in range(2 if guided else 1)]
    with tempfile.TemporaryDirectory(prefix="plan-cells-") as name:
        scratch = Path(name)
        path = write_model(scratch / "model", case.family)
        asked = _prompt(of_checkpoint(path), inputs[0], guided=guided, steps=steps)
        with machine.made(len(devices.indices), scratch), temporary_backend(scratch) as client:
            probe = _Probe(client=client, devices=devices, asked=asked)
            hardware = probe.measure()
            made = plan(asked, hardware, mode=APPROXIMATE if asked.loop else FASTEST)
            tried = _tried([each.layout for each in made.predictions if each.room.fits], only)
            calls = [_call(client, _spec(path, devices, layout), inputs, steps) for layout in tried]
            cells = _cells(tried, calls, probe, rounds)
    return Cells(
        what=_what(case, asked) + f" on {len(devices.indices)} ranks{machine}", cells=cells,
        chosen=str(made.chosen.layout), settled=_settled(made, cells), rule=str(made.rule.layout),
        probing=statistics.median(probe.seconds),
    )  # fmt: skip


def _settled(made: Plan, cells: Sequence[Cell]) -> str:
    """Return what is taken after trials, by the times of the layouts that were timed; "" if nothing is tried."""
    if made.prompt.loop:
        return ""
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
    steps = f", {asked.steps} steps" if asked.loop else ""
    return f"{replace(case, branches=1)}{samples}{', two branches' if asked.guided else ''}{steps}"


def _prompt(model: Model, inputs: dict[str, torch.Tensor], *, guided: bool, steps: int) -> Prompt:
    """Return the prompt of one forward with these inputs, or of a sampling."""
    prompt = Prompt(
        model=model, size=tuple(inputs[LATENT].shape[2:]), steps=steps or 1, guided=guided, dtype=torch.float32,
        samples=len(inputs[LATENT]), loop=steps > 0,
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
    """Time what is called in each layout: the second call each time that it is its turn."""
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


def _spec(path: Path, devices: Devices, layout: ParallelLayout) -> ModelSpec:
    return ModelSpec(path=str(path), devices=devices, dtype="float32", layout=layout)


def _call(
    client: Client, spec: ModelSpec, inputs: Sequence[dict[str, torch.Tensor]], steps: int
) -> Callable[[], float]:
    """Return what runs a forward, or a sampling, and returns its seconds."""
    message: Forward | Sample = Forward(model=spec, branches=len(inputs), measure="seconds")
    tensors = examples.branches(inputs)
    if steps:
        message = Sample(
            model=spec, branches=len(inputs), sampler="euler", cfg=_GUIDANCE if len(inputs) > 1 else 1.0,
            measure="seconds",
        )  # fmt: skip
        constant = [{name: each[name] for name in each if name not in (LATENT, TIMESTEP)} for each in inputs]
        tensors = examples.branches(constant)
        tensors |= {"x": inputs[0][LATENT], "sigmas": torch.linspace(1, 0, steps + 1)}

    def call() -> float:
        return float(client.call(message, tensors)["seconds"])

    return call
