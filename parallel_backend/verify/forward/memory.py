"""What sharded weights cost: ``python -m parallel_backend verify --memory``.

Private memory of all CPU ranks together: before a model of some 2 GB is loaded, at its highest until it is, at its
highest while it computes, and after a forward, in parts of the checkpoint's size. Before means with another small
model of that class loaded, so that what Python modules take is no part of it. While it computes, each rank has whole
blocks beside its part: that comes with sharing weights, and is less of a model with more layers than these few.
"""

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import processes
from ...client.client import Client
from ...client.temporary_backend import temporary_backend
from ...layout.parallel_layout import ParallelLayout
from ...models import FAMILIES
from ...protocol.messages import Devices
from . import examples
from .run import TOLERANCE, forward

LIMIT = 1.3
"""Growth of the private memory that is right, in parts of the checkpoint's size."""

LAYOUTS = ("ulysses=2 shard_weights", "ulysses=4 shard_weights")
_SECONDS = 0.1
"""Between two looks at the memory."""


@dataclass(frozen=True, kw_only=True)
class Large:
    """A model of some 2 GB in float32 with a real one's width, and fewer layers; ``variant`` is a small one's name."""

    class_name: str
    variant: str
    config: Mapping[str, Any] = field(hash=False)
    size: tuple[int, ...]
    text: int = 64


MODELS = (
    Large(
        class_name="WanTransformer3DModel", variant="t2v", size=(3, 17, 30),
        config={
            "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 10, "text_dim": 4096,
        },
    ),
    Large(
        class_name="FluxTransformer2DModel", variant="dev", size=(33, 50),
        config={
            "num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 2, "num_single_layers": 9,
            "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
        },
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Bytes of a checkpoint and by how many the ranks' private memory had grown.

    ``loading`` and ``computing`` are the highest of that time.
    """

    model: str
    layout: str
    checkpoint: int
    loading: int
    computing: int
    after: int
    max_rel_error: float

    @property
    def failed(self) -> bool:
        """Whether it grew by more than ``LIMIT``, or the result is another than one process gives."""
        return max(self.loading, self.after) > LIMIT * self.checkpoint or not self.max_rel_error <= TOLERANCE

    def describe(self) -> str:
        """The same for people."""
        parts = [f"{grown / self.checkpoint:.2f}" for grown in (self.loading, self.computing, self.after)]
        return (
            f"{'FAILED' if self.failed else 'right '}   {self.model}, {self.layout}: checkpoint "
            f"{self.checkpoint / 1e9:.2f} GB, private memory of all ranks grew by {parts[0]} of it while loading, "
            f"{parts[1]} while computing, {parts[2]} after; error {self.max_rel_error:.1e}"
        )


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A large model in a folder, and what its stock forward gives."""

    name: str
    path: Path
    inputs: Mapping[str, Tensor]
    wanted: Tensor

    @property
    def bytes(self) -> int:
        """Size of its weight files."""
        return sum(file.stat().st_size for file in self.path.glob("*/*.safetensors"))


def measure() -> Iterator[Growth]:
    """Measure every model on every layout, each time on a new backend."""
    for model in MODELS:
        with tempfile.TemporaryDirectory(prefix="verify-memory-") as folder:
            small = examples.write(Path(folder) / "small", examples.module(model.class_name, model.variant))
            warm = examples.inputs(model.class_name, model.variant, batch=1)
            written = _write(Path(folder) / "large", model)
            for text in LAYOUTS:
                with temporary_backend(Path(folder)) as client:
                    ranks = _Ranks(client, ParallelLayout.parse(text))
                    ranks.call(small, warm)
                    yield ranks.grow(written)


class _Ranks:
    """The ranks of a layout."""

    def __init__(self, client: Client, layout: ParallelLayout) -> None:
        self.client, self.layout = client, layout
        self.devices = Devices(kind="cpu", indices=tuple(range(layout.ranks)))

    def call(self, model: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the ranks answer for one branch, the time included."""
        return self.client.call(forward(model, "float32", self.layout, self.devices, 1), examples.branches([inputs]))

    def grow(self, model: _Written) -> Growth:
        """Load a model and run it once."""
        pids = [rank.pid for rank in self.client.status().ranks]
        before = _private(pids)
        with _watched(pids) as seen:
            answer = self.call(model.path, model.inputs)
            # What is timed the ranks begin together, when all have loaded.
            computing = time.monotonic() - float(answer["seconds"])
        after, got = _private(pids), answer["0"]
        return Growth(
            model=model.name,
            layout=str(self.layout),
            checkpoint=model.bytes,
            loading=max([before, *(size for moment, size in seen if moment < computing)]) - before,
            computing=max([after, *(size for moment, size in seen if moment >= computing)]) - before,
            after=after - before,
            max_rel_error=float((got - model.wanted).abs().max() / model.wanted.abs().max()),
        )


def _write(folder: Path, model: Large) -> _Written:
    family = FAMILIES[model.class_name]
    variant = examples.variant(model.class_name, model.variant)
    shapes = examples.input_shapes(family, model.config, variant.inputs, batch=1, size=model.size, text=model.text)
    inputs, module = examples.fill(shapes, seed=0), examples.random_module(model.class_name, model.config)
    examples.write(folder, module)
    with torch.no_grad():
        wanted = family(module).stock(inputs)
    return _Written(name=examples.short_name(model.class_name), path=folder, inputs=inputs, wanted=wanted)


def _private(pids: Sequence[int]) -> int:
    return sum(map(processes.private_memory, pids))


@contextmanager
def _watched(pids: Sequence[int]) -> Iterator[list[tuple[float, int]]]:
    """Moments while this is entered, and what the processes' private memory was."""
    seen: list[tuple[float, int]] = []
    end = threading.Event()

    def look() -> None:
        while not end.wait(_SECONDS):
            seen.append((time.monotonic(), _private(pids)))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield seen
    finally:
        end.set()
        looking.join(10)
