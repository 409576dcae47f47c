"""What compiled blocks save of a step: ``python -m lab bench compiled``.

Steps with and without them take turns in one run, so that a machine that slows down over minutes does not matter.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import ModelSpec

from .model_file import LATENT, TEXT, write_wan
from .results import add_common, print_results

LAYOUTS = ("ulysses=1", "ulysses=2", "ring=2")
LIMIT = 1.0
"""Largest ratio that passes: nowhere slower."""

HEADS, LAYERS = 24, 2
"""A width of 3,072."""

SIDE, TEXT_TOKENS = 64, 128
"""Latent positions of a side, which are 1,024 image tokens."""

CLOSE = 1e-4
"""Largest difference from the blocks as they are, as a share of the largest value."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--rounds", type=int, default=9, help="pairs of steps (default %(default)s)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure what compiled blocks save of a step."""
    return print_results(measure(options.rounds, options.devices), as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The time of a step with one layout.

    Attributes:
        layout: the layout, as text.
        first: seconds of the first compiled step.
        seconds: the median of a step with the blocks as they are.
        ratio: the median ratio of a compiled step to the steps before and after it.
        error: the largest difference of the predictions, as a share of the largest value.
    """

    layout: str
    first: float
    seconds: float
    ratio: float
    error: float

    @property
    def failed(self) -> bool:
        """Whether compiled blocks are slower, or compute something else."""
        return self.ratio > LIMIT or self.error > CLOSE

    def describe(self) -> str:
        """Format the result as text."""
        outcome = "FAILED" if self.failed else "passed"
        return (
            f"{outcome}   {self.layout}: {self.seconds:.2f} s a step, {self.ratio:.3f} of it compiled, after "
            f"a first step of {self.first:.1f} s; error {self.error:.1e}"
        )


def measure(rounds: int, devices_text: str | None = None) -> Iterator[CompiledStep]:
    """Measure every layout; a CPU rank has one thread.

    Raises:
        InvalidRequest: ``devices_text`` does not name enough devices.
    """
    layouts = [ParallelLayout.parse(text) for text in LAYOUTS]
    chosen = devices.choose_devices(devices_text, devices.ranks_of(layouts))
    with tempfile.TemporaryDirectory(prefix="bench-compiled-") as name:
        model = Path(name) / "model.safetensors"
        write_wan(model, heads=HEADS, layers=LAYERS)
        with temporary_backend(Path(name)) as client:
            for layout in layouts:
                spec = ModelSpec(path=str(model), devices=chosen.first(layout.ranks), dtype="float32", layout=layout)
                yield _measure(client, spec, rounds)


def _measure(client: Client, spec: ModelSpec, rounds: int) -> CompiledStep:
    compiled_spec = replace(spec, compile="blocks")
    _, wanted = _step(client, spec)  # loads the weights
    first, got = _step(client, compiled_spec)
    plain, compiled = [_step(client, spec)[0]], []
    for _ in range(rounds):
        compiled.append(_step(client, compiled_spec)[0])
        plain.append(_step(client, spec)[0])
    return CompiledStep(
        layout=str(spec.layout),
        first=first,
        seconds=statistics.median(plain),
        ratio=statistics.median(2 * each / sum(pair) for each, pair in zip(compiled, pairwise(plain), strict=True)),
        error=float((got - wanted).abs().max() / wanted.abs().max()),
    )


def _step(client: Client, spec: ModelSpec) -> tuple[float, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    inputs = {
        "0.hidden_states": torch.randn(1, LATENT, 1, SIDE, SIDE, generator=random),
        "0.timestep": torch.tensor([500.0]),
        "0.encoder_hidden_states": torch.randn(1, TEXT_TOKENS, TEXT, generator=random),
    }
    answer = client.call(Forward(model=spec, branches=1, measure="seconds"), inputs)
    return float(answer["seconds"]), answer["0"]
