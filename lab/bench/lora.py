"""The cost of a LoRA in a step: ``python -m lab bench lora``.

Steps without, with and again without a LoRA on every linear layer of the blocks take turns. Their ratios are compared,
so that a machine that slows down over minutes does not matter.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint import adapter_file
from parallel_backend.checkpoint.adapter_file import AdapterLayer
from parallel_backend.checkpoint.safetensors_file import read_header
from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Adapter, ModelSpec

from .model_file import LATENT, TEXT, write_wan
from .results import add_common, print_results

LAYOUTS = ("ulysses=1", "ulysses=2", "tensor=2")
LIMIT = 1.04
"""Largest ratio that passes."""

HEADS, LAYERS, RANK = 24, 1, 32
"""A width of 3,072. The ratio does not depend on the number of layers."""

SIDE, TEXT_TOKENS = 64, 128
"""Latent positions of a side, which are 1,024 image tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--rounds", type=int, default=9, help="pairs of steps (default %(default)s)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure the cost of a LoRA in a step."""
    return print_results(measure(options.rounds, options.devices), as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class LoraCost:
    """The time of a step with one layout.

    Attributes:
        layout: the layout, as text.
        seconds: the median of a step without LoRA.
        ratio: the median ratio of a step with the LoRA to the steps before and after it.
        removed: the median ratio of a step after the LoRA to the one before it.
    """

    layout: str
    seconds: float
    ratio: float
    removed: float

    @property
    def failed(self) -> bool:
        """Whether the LoRA costs more than ``LIMIT``."""
        return self.ratio > LIMIT

    def describe(self) -> str:
        """Format the result as text."""
        outcome = "FAILED" if self.failed else "passed"
        return (
            f"{outcome}   {self.layout}: {self.seconds:.2f} s a step, {self.ratio:.3f} of it with a LoRA of rank "
            f"{RANK}, {self.removed:.3f} after it is removed"
        )


def measure(rounds: int, devices_text: str | None = None) -> Iterator[LoraCost]:
    """Measure every layout; a CPU rank has one thread.

    Raises:
        InvalidRequest: ``devices_text`` does not name enough devices.
    """
    layouts = [ParallelLayout.parse(text) for text in LAYOUTS]
    chosen = devices.choose_devices(devices_text, devices.ranks_of(layouts))
    with tempfile.TemporaryDirectory(prefix="bench-lora-") as name:
        folder = Path(name)
        model, lora = folder / "model.safetensors", folder / "lora.safetensors"
        write_wan(model, heads=HEADS, layers=LAYERS)
        _write_lora(lora, {name: each.shape for name, each in read_header(model).tensors.items()})
        adapter = Adapter(path=str(lora), id="bench", strength=0.8)
        with temporary_backend(folder) as client:
            for layout in layouts:
                spec = ModelSpec(path=str(model), devices=chosen.first(layout.ranks), dtype="float32", layout=layout)
                yield _measure(client, spec, adapter, rounds)


def _write_lora(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    random = torch.Generator().manual_seed(0)
    weights = [name for name, shape in shapes.items() if name.startswith("blocks.") and len(shape) == 2]
    tensors = {}
    for i, name in enumerate(weights):
        rows, columns = shapes[name]
        tensors[f"{i}.up"] = torch.randn(rows, RANK, generator=random) * 0.01
        tensors[f"{i}.down"] = torch.randn(RANK, columns, generator=random) * 0.01
    layers = [AdapterLayer(weight=name, start=0, scale=1.0) for name in weights]
    save_file(tensors, path, adapter_file.metadata(layers, shapes, "bench"))


def _measure(client: Client, spec: ModelSpec, adapter: Adapter, rounds: int) -> LoraCost:
    for adapters in ((), (adapter,), ()):  # loads the weights, and reads the factors
        _step(client, spec, adapters)
    plain = [_step(client, spec, ())]
    changed = []
    for _ in range(rounds):
        changed.append(_step(client, spec, (adapter,)))
        plain.append(_step(client, spec, ()))
    around = list(pairwise(plain))
    return LoraCost(
        layout=str(spec.layout),
        seconds=statistics.median(plain),
        ratio=statistics.median(2 * each / sum(pair) for each, pair in zip(changed, around, strict=True)),
        removed=statistics.median(after / before for before, after in around),
    )


def _step(client: Client, spec: ModelSpec, adapters: tuple[Adapter, ...]) -> float:
    random = torch.Generator().manual_seed(1)
    inputs = {
        "0.hidden_states": torch.randn(1, LATENT, 1, SIDE, SIDE, generator=random),
        "0.timestep": torch.tensor([500.0]),
        "0.encoder_hidden_states": torch.randn(1, TEXT_TOKENS, TEXT, generator=random),
    }
    answer = client.call(Forward(model=spec, branches=1, adapters=(adapters,), measure="seconds"), inputs)
    return float(answer["seconds"])
