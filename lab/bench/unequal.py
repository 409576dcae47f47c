"""What shares by speed gain where one rank is slower: ``python -m lab bench unequal``.

The last rank sleeps so that it takes ``--factor`` times as long (``lab.engine.handicap``). Calls with even shares, with
shares by speed, and on the first rank alone take turns, so that a machine that slows down over minutes does not matter.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lab.verify.vae import kinds
from parallel_backend import env
from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Decode, Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.verify.examples import branches

from .ranks.cases import MODELS, Case, write_model
from .results import add_common, print_results

LAYOUTS = ("ulysses={}", "ring={}", "tensor={}")
VAES = {"VAE": ("image", 32, (16, 64, 48)), "VAE tiles": ("minimax_h3", 8, (24, 1, 30, 58))}
"""VAEs that are timed, the second with tiles of its own: kind, channels of the first level, and shape of a latent."""
GAIN, SUMMED, ERROR = 1.25, 0.9, 1e-5
"""What passes: at least this gain over even shares, on three or more ranks at least this share of the speeds' sum, and
at most this error, relative to the largest value on one rank."""

Call = Callable[[ParallelLayout], tuple[float, Tensor]]
"""Runs in a layout; returns the seconds and the result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--ranks", type=int, default=2, help="the last one is slower (default %(default)s)")
    parser.add_argument("--factor", type=float, default=2.0, help="by which it is slower (default %(default)s)")
    parser.add_argument(
        "--all-slower", type=float, default=1.0, metavar="FACTOR",
        help="by which all ranks are slower, so that more ranks than cores leave each other room (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="calls of each (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="latent tokens (default %(default)s)")
    parser.add_argument("--family", choices=tuple(MODELS), default="flux", help="shape of the model (default flux)")
    parser.add_argument(
        "--layout", action="append", metavar="LAYOUT",
        help='repeatable, with shares of its own in "balance" or without, or "VAE" for the rows of a VAE, or '
        '"VAE tiles" for the tiles of one that has its own (default: ulysses, ring, tensor and both)',
    )  # fmt: skip
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for.

    Raises:
        InvalidRequest: a number is out of range, or a layout has another number of ranks.
    """
    for name, least in (("ranks", 2), ("factor", 1), ("all_slower", 1), ("rounds", 1), ("tokens", 4)):
        if getattr(options, name) < least:
            raise InvalidRequest(f"--{name.replace('_', '-')} {getattr(options, name):g}: at least {least} is needed")
    return print_results(_measure(options), as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What shares by speed gain in one layout.

    Attributes:
        layout: with the speeds.
        even: median seconds with even shares.
        balanced: median seconds with shares by speed.
        alone: median seconds of the first rank alone.
        gain: median over the rounds of the seconds with even shares, divided by those with shares by speed.
        of_sum: median over the rounds of the speed relative to the first rank's, as a share of the sum of all speeds.
        error: largest error of both, relative to the largest value on one rank.
        ranks: number of ranks.
    """

    layout: str
    even: float
    balanced: float
    alone: float
    gain: float
    of_sum: float
    error: float
    ranks: int

    @property
    def failed(self) -> bool:
        """Whether it gains too little, or computes something else."""
        too_slow = self.gain < GAIN or (self.ranks > 2 and self.of_sum < SUMMED)
        return too_slow or not self.error <= ERROR

    def describe(self) -> str:
        """Format the result as text."""
        return (
            f"{'FAILED' if self.failed else 'passed'}   {self.layout}: {self.even:.3f} s with even shares, "
            f"{self.balanced:.3f} s by speed, {self.gain:.2f} times as fast; one rank {self.alone:.3f} s, "
            f"{self.of_sum:.2f} of the speeds' sum; error {self.error:.1e}"
        )


def _measure(options: argparse.Namespace) -> Iterator[Gain]:
    speeds = (1.0,) * (options.ranks - 1) + (1 / options.factor,)
    texts = options.layout or [*(text.format(options.ranks) for text in LAYOUTS), *VAES]
    layouts = [(text, _parsed(text, options.ranks)) for text in texts]
    by_speed = [layout if layout.balance else replace(layout, balance=speeds) for _, layout in layouts]
    chosen = devices.choose_devices(options.devices, {f"--ranks {options.ranks}": options.ranks})
    with _slower(options), tempfile.TemporaryDirectory(prefix="bench-unequal-") as name:
        folder = Path(name)
        with temporary_backend(folder) as client:
            calls: dict[str, Call] = {}
            for (text, even), balanced in zip(layouts, by_speed, strict=True):
                vae = text if text in VAES else ""
                if vae not in calls:
                    decoded = VAES.get(vae)
                    calls[vae] = (
                        _decode(client, chosen, folder, *decoded)
                        if decoded
                        else _forward(client, chosen, folder, options)
                    )
                even = replace(even, balance=(), attention_balance=())
                yield _gain(vae, even, balanced, calls[vae], options.rounds, sum(speeds))


def _parsed(text: str, ranks: int) -> ParallelLayout:
    layout = ParallelLayout(ring=ranks) if text in VAES else ParallelLayout.parse(text)
    if layout.shares_row != ranks or layout.ranks != ranks:
        raise InvalidRequest(f'--layout "{text}": a layout is needed whose {ranks} ranks share a row')
    return layout


@contextmanager
def _slower(options: argparse.Namespace) -> Iterator[None]:
    factors = [options.all_slower] * (options.ranks - 1) + [options.all_slower * options.factor]
    with env.changed({env.HANDICAP.name: " ".join(f"{rank}={factor:g}" for rank, factor in enumerate(factors))}):
        yield


def _gain(
    what: str, even: ParallelLayout, balanced: ParallelLayout, call: Call, rounds: int, speed: float
) -> Gain:  # fmt: skip
    """Measure one layout.

    Args:
        speed: of all ranks together, where the first one's is 1.
    """
    everyone = (ParallelLayout(), even, balanced)
    alone, *others = [call(layout)[1].float() for layout in everyone]  # the first calls load
    error = max(float((other - alone).abs().max() / alone.abs().max()) for other in others)
    seconds = [[call(layout)[0] for layout in everyone] for _ in range(rounds)]
    return Gain(
        layout=f"{what} {balanced}".strip(),
        even=statistics.median(each[1] for each in seconds),
        balanced=statistics.median(each[2] for each in seconds),
        alone=statistics.median(each[0] for each in seconds),
        gain=statistics.median(each[1] / each[2] for each in seconds),
        of_sum=statistics.median(each[0] / each[2] for each in seconds) / speed,
        error=error,
        ranks=balanced.ranks,
    )


def _forward(client: Client, chosen: Devices, folder: Path, options: argparse.Namespace) -> Call:
    """Return what runs one step of a model."""
    case = Case(family=options.family, tokens=options.tokens, text_tokens=128, branches=1)
    inputs = branches([case.inputs()])
    model = write_model(folder / "model", options.family)

    def call(layout: ParallelLayout) -> tuple[float, Tensor]:
        spec = ModelSpec(path=str(model), devices=chosen, dtype="float32", layout=layout)
        return _answer(client.call(Forward(model=spec, branches=1, measure="seconds"), inputs), "0")

    return call


def _decode(client: Client, chosen: Devices, folder: Path, kind: str, width: int, shape: tuple[int, ...]) -> Call:
    """Return what decodes a latent with a VAE."""
    torch.manual_seed(0)
    model = kinds.write(folder / kind, kinds.KINDS[kind].module(width))
    latent = {"latent": torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))}

    def call(layout: ParallelLayout) -> tuple[float, Tensor]:
        spec = ModelSpec(path=str(model), devices=chosen, dtype="float32", layout=layout)
        return _answer(client.call(Decode(model=spec, dtype="float32", measure="seconds"), latent), "pixels")

    return call


def _answer(reply: Mapping[str, Tensor], name: str) -> tuple[float, Tensor]:
    return float(reply["seconds"]), reply[name]
