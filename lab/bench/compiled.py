"""What compiled blocks save of a step: ``python -m lab bench compiled``.

Steps with and without them take turns in one run, so that a machine that slows down over minutes does not matter.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import ModelSpec
from parallel_backend.verify import examples

from .model_file import LATENT, TEXT, write_wan
from .results import add_common, print_results

LIMIT = 1.0
"""Least ratio that passes: nowhere slower."""

HEADS = 24
"""A width of 3,072."""

TEXT_TOKENS, POOLED = 128, 768

CLOSE = 1e-4
"""Largest difference from the blocks as they are, as a share of the largest value."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        family: ``flux`` or ``wan``.
        side: latent positions of a side; a token has two by two.
        layout: the layout, as text.
    """

    family: str
    side: int
    layout: str = "ulysses=1"

    def __str__(self) -> str:
        return f"{self.family}, {(self.side // 2) ** 2:,} image tokens, {self.layout}"

    def inputs(self) -> dict[str, Tensor]:
        """Return the tensors of a step."""
        random = torch.Generator().manual_seed(1)
        text = {"0.encoder_hidden_states": torch.randn(1, TEXT_TOKENS, TEXT, generator=random)}
        latent = torch.randn(1, LATENT, 1, self.side, self.side, generator=random)
        if self.family == "wan":
            return text | {"0.hidden_states": latent, "0.timestep": torch.tensor([500.0])}
        pooled = torch.randn(1, POOLED, generator=random)
        flux = {"0.hidden_states": latent[:, :, 0], "0.timestep": torch.tensor([0.5]), "0.pooled_projections": pooled}
        return text | flux


CASES = (
    Case(family="flux", side=64),
    Case(family="flux", side=128),
    Case(family="wan", side=64),
    Case(family="wan", side=64, layout="ulysses=2"),
    Case(family="wan", side=64, layout="ring=2"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--rounds", type=int, default=15, help="pairs of steps (default %(default)s)")
    parser.add_argument("--heads", type=int, default=HEADS, help="of 128 features each (default %(default)s)")
    parser.add_argument("--case", help="only cases whose names contain this, such as flux")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure what compiled blocks save of a step."""
    cases = [case for case in CASES if (options.case or "") in str(case)]
    return print_results(measure(cases, options.rounds, options.heads, options.devices), as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The time of a step.

    Attributes:
        case: what is measured.
        first: seconds of the first compiled step.
        seconds: of the fastest step with the blocks as they are.
        ratio: of that to the fastest compiled step.
        median: of the ratios of the steps before and after each compiled one to it.
        error: the largest difference of the predictions, as a share of the largest value.
    """

    case: str
    first: float
    seconds: float
    ratio: float
    median: float
    error: float

    @property
    def same(self) -> bool:
        """Whether compiled blocks compute the same."""
        return self.error <= CLOSE

    @property
    def failed(self) -> bool:
        """Whether compiled blocks are slower, or compute something else."""
        return self.ratio < LIMIT or not self.same

    def describe(self) -> str:
        """Format the result as text."""
        outcome = "FAILED" if self.failed else "passed"
        return (
            f"{outcome}   {self.case}: {self.seconds:.2f} s a step, compiled {self.ratio:.3f} times as fast "
            f"(median {self.median:.3f}), after a first step of {self.first:.1f} s; error {self.error:.1e}"
        )


def measure(
    cases: Sequence[Case], rounds: int, heads: int = HEADS, devices_text: str | None = None
) -> Iterator[CompiledStep]:
    """Measure cases; a CPU rank has one thread.

    Raises:
        InvalidRequest: ``devices_text`` does not name enough devices.
    """
    layouts = [ParallelLayout.parse(case.layout) for case in cases]
    chosen = devices.choose_devices(devices_text, devices.ranks_of(layouts))
    with tempfile.TemporaryDirectory(prefix="bench-compiled-") as name:
        paths = {family: _write(Path(name), family, heads) for family in {case.family for case in cases}}
        with temporary_backend(Path(name)) as client:
            for case, layout in zip(cases, layouts, strict=True):
                path, placed = str(paths[case.family]), chosen.first(layout.ranks)
                spec = ModelSpec(path=path, devices=placed, dtype="float32", layout=layout)
                yield _measure(client, case, spec, rounds)


def _write(folder: Path, family: str, heads: int) -> Path:
    """Write a model with a block of each kind, and return its path."""
    path = folder / family
    if family == "wan":
        write_wan(path.with_suffix(".safetensors"), heads=heads, layers=2)
        return path.with_suffix(".safetensors")
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    module = FluxTransformer2DModel(num_layers=1, num_single_layers=1, num_attention_heads=heads)
    return examples.write_checkpoint(path, module)


def _measure(client: Client, case: Case, spec: ModelSpec, rounds: int) -> CompiledStep:
    compiled_spec = replace(spec, compile="blocks")
    _, wanted = _step(client, case, spec)  # loads the weights
    first, got = _step(client, case, compiled_spec)
    plain, compiled = [_step(client, case, spec)[0]], []
    for _ in range(rounds):
        compiled.append(_step(client, case, compiled_spec)[0])
        plain.append(_step(client, case, spec)[0])
    pairs = zip(compiled, pairwise(plain), strict=True)
    return CompiledStep(
        case=str(case),
        first=first,
        seconds=min(plain),
        ratio=min(plain) / min(compiled),
        median=statistics.median(sum(pair) / (2 * each) for each, pair in pairs),
        error=float((got - wanted).abs().max() / wanted.abs().max()),
    )


def _step(client: Client, case: Case, spec: ModelSpec) -> tuple[float, Tensor]:
    answer = client.call(Forward(model=spec, branches=1, measure="seconds"), case.inputs())
    return float(answer["seconds"]), answer["0"]
