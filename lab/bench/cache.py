"""What a step cache saves of a step loop: ``python -m lab bench cache``.

Loops with and without it take turns, on one rank and in further layouts, so that a machine that slows down over minutes
does not matter.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import FORECASTS, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.step_cache.settings import PRESETS, preset

from .model_file import TEXT, write_wan
from .results import add_common, print_results

LAYOUTS = ("", "ulysses=2")
LATENT = (1, 16, 1, 64, 64)
"""1,024 tokens."""
TEXT_TOKENS = 64
HEADS, LAYERS = 4, 4
STEPS = 24
LEAST = 0.9
"""The part of the saved calls that a loop on one rank has to save of its time."""
OFF = "off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--rounds", type=int, default=3, help="loops of each row (default %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each loop (default %(default)s)")
    parser.add_argument(
        "--layout", action="append", metavar="LAYOUT", help="repeatable (default: one rank, and ulysses=2)"
    )
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure what caches save."""
    layouts = [ParallelLayout.parse(text) for text in options.layout or LAYOUTS]
    rows = measure(layouts, options.steps, options.rounds, options.devices)
    return print_results(rows, as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class CachedLoop:
    """The result of one layout and preset.

    Attributes:
        layout: as text.
        mode: the preset, or ``off``.
        seconds: of a loop, the median.
        speedup: over the layout's loop without a cache, the median of the rounds' ratios.
        over_one_rank: over the first layout's loop without a cache, likewise.
        saved: calls divided by the computed ones.
        ranks: of the layout.
    """

    layout: str
    mode: str
    seconds: float
    speedup: float
    over_one_rank: float
    saved: float
    ranks: int

    @property
    def failed(self) -> bool:
        """Whether one rank gains less than ``LEAST`` of what the calls say."""
        return self.ranks == 1 and self.speedup < LEAST * self.saved

    def describe(self) -> str:
        """Format the result as text."""
        outcome = "FAILED" if self.failed else "passed"
        return (
            f"{outcome}   {self.layout or 'one rank'}, cache {self.mode}: {self.seconds:.2f} s, {self.speedup:.2f}x "
            f"over all steps ({self.saved:.2f}x by calls), {self.over_one_rank:.2f}x over one rank"
        )


def measure(
    layouts: Sequence[ParallelLayout], steps: int, rounds: int, devices_text: str | None = None
) -> list[CachedLoop]:
    """Measure loops of ``steps`` steps in each layout, with each preset and without.

    Raises:
        InvalidRequest: there are too few rounds or steps, or ``devices_text`` names too few devices.
        BackendError: the backend fails.
    """
    if rounds < 1:
        raise InvalidRequest(f"--rounds {rounds}: at least one is needed")
    if any(preset(mode, steps) is None for mode in PRESETS):
        raise InvalidRequest(f"--steps {steps}: all of them are computed; from 12 on a cache saves some")
    chosen = devices.choose_devices(devices_text, devices.ranks_of(layouts))
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as name, temporary_backend(Path(name)) as client:
        file = Path(name) / "model.safetensors"
        write_wan(file, heads=HEADS, layers=LAYERS)
        cases = [(layout, mode) for layout in layouts for mode in (OFF, *PRESETS)]
        for layout in layouts:
            _loop(client, file, chosen, layout, OFF, 12)
        timed = [{case: _loop(client, file, chosen, *case, steps) for case in cases} for _ in range(rounds)]
    return [_row(case, layouts[0], timed) for case in cases]


Case = tuple[ParallelLayout, str]
Timed = Mapping[Case, tuple[float, float]]


def _row(case: Case, first: ParallelLayout, timed: Sequence[Timed]) -> CachedLoop:
    layout, mode = case

    def over(other: Case) -> float:
        return statistics.median(each[other][0] / each[case][0] for each in timed)

    return CachedLoop(
        layout=str(layout),
        mode=mode,
        seconds=statistics.median(each[case][0] for each in timed),
        speedup=over((layout, OFF)),
        over_one_rank=over((first, OFF)),
        saved=timed[0][case][1],
        ranks=layout.ranks,
    )


def _loop(
    client: Client, file: Path, chosen: Devices, layout: ParallelLayout, mode: str, steps: int
) -> tuple[float, float]:
    """Return the seconds of a loop, and its calls divided by the computed ones."""
    spec = ModelSpec(path=str(file), devices=chosen, dtype="float32", layout=layout)
    cache = None if mode == OFF else preset(mode, steps)
    message = Sample(model=spec, branches=2, sampler="euler", cfg=4.0, cache=cache, measure="seconds")
    inputs = {"x": torch.randn(LATENT), "sigmas": torch.linspace(1, 0, steps + 1)}
    inputs |= {f"{i}.encoder_hidden_states": torch.randn(1, TEXT_TOKENS, TEXT) for i in range(2)}
    reply = client.call(message, inputs)
    forecasts, calls = reply.get(FORECASTS, torch.tensor([0, steps])).tolist()
    return float(reply["seconds"]), calls / (calls - forecasts)
