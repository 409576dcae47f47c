"""What another layout costs, beside loading the model for it: ``python -m lab bench relayout``.

Both take turns. The file is in the page cache, and the ranks have loaded a model before, so that neither reads a disk
or imports anything.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor

from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward, Unload
from parallel_backend.protocol.model_spec import ModelSpec

from .model_file import LATENT, TEXT, write_wan
from .results import add_common, print_results

LAYOUTS = ("ulysses=2", "ring=2", "tensor=2")
LIMIT, TOLERANCE = 1 / 3, 1e-5
"""Largest part of a load where each rank holds all weights already, and largest difference of the predictions relative
to the largest value, that pass."""
HEADS, BYTES_OF_LAYER = 12, 186_000_000
"""The width, 1,536, and what one layer takes in float32."""
SIDE, TEXT_TOKENS = 8, 16
"""Latent positions of a side: a step takes next to no time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="changes of each kind (default %(default)s)")
    parser.add_argument(
        "--layout", action="append", metavar="LAYOUT", help=f"two or more, each to each other (default: {LAYOUTS})"
    )
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for.

    Raises:
        InvalidRequest: a number is out of range.
    """
    layouts = list(dict.fromkeys(ParallelLayout.parse(text) for text in options.layout or LAYOUTS))
    if options.rounds < 1:
        raise InvalidRequest(f"--rounds {options.rounds}: at least 1 is needed")
    if not options.gigabytes > 0:
        raise InvalidRequest(f"--gigabytes {options.gigabytes:g}: more than 0 is needed")
    if len(layouts) < 2:
        raise InvalidRequest(f"--layout {layouts[0]}: two different ones are needed")
    measured = measure(layouts, options.gigabytes, options.rounds, options.devices)
    return print_results(measured, as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one layout after another costs.

    Attributes:
        before: the first layout.
        after: the second one.
        change: median seconds until the first step is done in it, less those of a step.
        back: the same for the first layout again.
        load: the same for ranks without a model.
        ratio: the median of the change divided by the load.
        held: whether each rank holds all weights of the second one already, and may go on with them.
        error: largest difference of the two first predictions, relative to the largest value.
    """

    before: str
    after: str
    change: float
    back: float
    load: float
    ratio: float
    error: float
    held: bool

    @property
    def failed(self) -> bool:
        """Whether it costs more than ``LIMIT`` without need, or the predictions differ."""
        return (self.held and not self.ratio < LIMIT) or not self.error <= TOLERANCE

    def describe(self) -> str:
        """Format the result as text."""
        outcome = "FAILED" if self.failed else "passed"
        return (
            f"{outcome}   {self.before} to {self.after}, {'all' if self.held else 'some'} weights held: "
            f"{self.change:.3f} s, {self.ratio:.2f} of a load's {self.load:.3f} s, and {self.back:.3f} s back; "
            f"predictions differ by {self.error:.1e}"
        )


def measure(
    layouts: Sequence[ParallelLayout], gigabytes: float, rounds: int, devices_text: str | None = None
) -> Iterator[Change]:
    """Measure every change between two of these layouts.

    Raises:
        InvalidRequest: ``devices_text`` does not name enough devices.
    """
    chosen = devices.choose_devices(devices_text, devices.ranks_of(layouts))
    with tempfile.TemporaryDirectory(prefix="bench-relayout-") as name, temporary_backend(Path(name)) as client:
        file = Path(name) / "model.safetensors"
        write_wan(file, heads=HEADS, layers=max(1, round(gigabytes * 1e9 / BYTES_OF_LAYER)))
        spec = ModelSpec(path=str(file), devices=chosen, dtype="float32")
        for before, after in permutations([replace(spec, layout=layout) for layout in layouts], 2):
            _call(client, before)
            yield _summary(before, after, [_round(client, before, after) for _ in range(rounds)])


def _round(client: Client, before: ModelSpec, after: ModelSpec) -> tuple[float, float, float, float]:
    """Return the seconds of a change, of the way back and of a load, and the difference of their predictions."""
    client.call(Unload(model=before))
    loaded, wanted = _first(client, after)
    client.call(Unload(model=after))
    _call(client, before)
    changed, got = _first(client, after)
    back, _ = _first(client, before)
    return changed, back, loaded, float((got - wanted).abs().max() / wanted.abs().max())


def _summary(before: ModelSpec, after: ModelSpec, rounds: Sequence[tuple[float, float, float, float]]) -> Change:
    changes, backs, loads, errors = zip(*rounds, strict=True)
    layouts = [each.layout for each in (before, after) if each.layout is not None]
    return Change(
        before=str(before.layout), after=str(after.layout), error=max(errors),
        change=statistics.median(changes), back=statistics.median(backs), load=statistics.median(loads),
        ratio=statistics.median(change / load for change, _, load, _ in rounds),
        held=not layouts[0].splits_weights and not layouts[1].shard_weights,
    )  # fmt: skip


def _first(client: Client, spec: ModelSpec) -> tuple[float, Tensor]:
    """Return the seconds until the first prediction, less those of the second, and the prediction."""
    first, prediction = _call(client, spec)
    return first - _call(client, spec)[0], prediction


def _call(client: Client, spec: ModelSpec) -> tuple[float, Tensor]:
    random = torch.Generator().manual_seed(1)
    inputs = {
        "0.hidden_states": torch.randn(1, LATENT, 1, SIDE, SIDE, generator=random),
        "0.timestep": torch.tensor([500.0]),
        "0.encoder_hidden_states": torch.randn(1, TEXT_TOKENS, TEXT, generator=random),
    }
    start = time.perf_counter()
    prediction = client.call(Forward(model=spec, branches=1), inputs)["0"]
    return time.perf_counter() - start, prediction
