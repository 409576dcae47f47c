"""Memory that sharded weights need: ``python -m lab verify --memory``.

Measures the private memory of all CPU ranks together, or the memory of all GPUs, for a model of about 2 GB: the peak
while it is loaded, the peak while it computes, and the memory after a forward. Each is given as growth relative to the
checkpoint's size. A small model of the same class is loaded before, so that the memory of Python modules does not
count. While it computes, each rank gathers whole blocks in addition to its shard. In a model with more layers, a block
is a smaller share of the model.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.sampling import sampled
from parallel_backend import processes
from parallel_backend.client import devices as device_list
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.distributed.device_memory import in_use
from parallel_backend.families.registry import family_of
from parallel_backend.interfaces.input_shapes import input_shapes
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.verify import examples
from parallel_backend.verify.report import TOLERANCE
from parallel_backend.verify.run import forward_request

LIMIT = 1.3
"""Largest growth that passes, relative to the checkpoint's size. On GPUs only while it is loaded: torch keeps what
gathered blocks took for the next ones."""

LAYOUTS = ("ulysses=2 shard_weights", "ulysses=4 shard_weights")


@dataclass(frozen=True, kw_only=True)
class LargeModel:
    """A model of about 2 GB in float32, as wide as a real one but with fewer layers.

    Attributes:
        class_name: class of diffusers.
        variant: name of a small variant with the same inputs.
        config: arguments of the class.
        size: of the latent.
        text: text tokens.
    """

    class_name: str
    variant: str
    config: Mapping[str, Any] = field(hash=False)
    size: tuple[int, ...]
    text: int = 64


MODELS = (
    LargeModel(
        class_name="WanTransformer3DModel", variant="t2v", size=(3, 17, 30),
        config={
            "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 10, "text_dim": 4096,
        },
    ),
    LargeModel(
        class_name="FluxTransformer2DModel", variant="dev", size=(33, 50),
        config={
            "num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 2, "num_single_layers": 9,
            "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
        },
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The size of a checkpoint, and the growth in bytes of all ranks' private memory, or of all GPUs' memory.

    Attributes:
        on_gpus: whether it is the GPUs' memory.
        model: short name of the family.
        layout: the layout, as text.
        checkpoint: bytes of its weight files.
        loading: peak growth while it is loaded.
        computing: peak growth while it computes.
        after: growth after the forward.
        max_rel_error: of the prediction, relative to one process's.
    """

    on_gpus: bool
    model: str
    layout: str
    checkpoint: int
    loading: int
    computing: int
    after: int
    max_rel_error: float

    @property
    def failed(self) -> bool:
        """Whether memory grows by more than ``LIMIT``, or the prediction differs from one process's."""
        grown = self.loading if self.on_gpus else max(self.loading, self.after)
        return grown > LIMIT * self.checkpoint or not self.max_rel_error <= TOLERANCE

    def describe(self) -> str:
        """Format the result as text."""
        memory = "the memory of the GPUs" if self.on_gpus else "private memory of all ranks"
        parts = [f"{grown / self.checkpoint:.2f}" for grown in (self.loading, self.computing, self.after)]
        return (
            f"{'FAILED' if self.failed else 'passed'}   {self.model}, {self.layout}: checkpoint "
            f"{self.checkpoint / 1e9:.2f} GB, {memory} grew by {parts[0]} of that while loading, "
            f"{parts[1]} while computing, {parts[2]} afterwards; relative error {self.max_rel_error:.1e}"
        )


@dataclass(frozen=True, kw_only=True)
class _SavedModel:
    """A large model in a folder, with inputs and the stock forward's prediction."""

    name: str
    path: Path
    inputs: Mapping[str, Tensor]
    expected: Tensor

    @property
    def bytes(self) -> int:
        """Size of its weight files."""
        return sum(file.stat().st_size for file in self.path.glob("*/*.safetensors"))


def measure(devices_text: str | None = None) -> Iterator[Growth]:
    """Measure every model in every layout, each on a new backend.

    Raises:
        InvalidRequest: ``devices_text`` does not name enough devices.
    """
    layouts = [ParallelLayout.parse(text) for text in LAYOUTS]
    there = device_list.parse_devices(devices_text or "all")
    if there.kind == "cuda":
        layouts = [layout for layout in layouts if layout.ranks <= len(there.indices)] or layouts[:1]
    devices = device_list.choose_devices(devices_text, device_list.ranks_of(layouts))
    for model in MODELS:
        with tempfile.TemporaryDirectory(prefix="verify-memory-") as folder:
            small = examples.write_checkpoint(Path(folder) / "small", examples.module(model.class_name, model.variant))
            small_inputs = examples.inputs(model.class_name, model.variant, batch=1)
            large = _write(Path(folder) / "large", model)
            for layout in layouts:
                with temporary_backend(Path(folder)) as client:
                    ranks = _Ranks(client, layout, devices.first(layout.ranks))
                    ranks.call(small, small_inputs)
                    yield ranks.measure_growth(large)


class _Ranks:
    """The ranks of a layout."""

    def __init__(self, client: Client, layout: ParallelLayout, devices: Devices) -> None:
        self.client, self.layout, self.devices = client, layout, devices

    def call(self, model: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a timed forward of one branch and return the reply."""
        return self.client.call(
            forward_request(model, "float32", self.layout, self.devices, 1), examples.branches([inputs])
        )

    def measure_growth(self, model: _SavedModel) -> Growth:
        """Load a model, run it once, and compare the memory before and after."""
        used, on_gpus = self._meter(), self.devices.kind == "cuda"
        before = used()
        with sampled(used) as samples:
            reply = self.call(model.path, model.inputs)
            # The timed part begins when all ranks have loaded the model.
            computing = time.monotonic() - float(reply["seconds"])
        after, prediction = used(), reply["0"]
        return Growth(
            on_gpus=on_gpus,
            model=model.name,
            layout=str(self.layout),
            checkpoint=model.bytes,
            loading=max([before, *(size for moment, size in samples if moment < computing)]) - before,
            computing=max([after, *(size for moment, size in samples if moment >= computing)]) - before,
            after=after - before,
            max_rel_error=float((prediction - model.expected).abs().max() / model.expected.abs().max()),
        )

    def _meter(self) -> Callable[[], int]:
        """Return a function that measures used memory."""
        if self.devices.kind == "cuda":
            return partial(in_use, self.devices.indices)
        return partial(_private, [rank.pid for rank in self.client.status().ranks])


def _write(folder: Path, model: LargeModel) -> _SavedModel:
    family = family_of(model.class_name)
    variant = examples.variant(model.class_name, model.variant)
    shapes = input_shapes(family, model.config, variant.inputs, batch=1, size=model.size, text=model.text)
    inputs, module = examples.fill(shapes, seed=0), examples.random_module(model.class_name, model.config)
    examples.write_checkpoint(folder, module)
    with torch.no_grad():
        expected = family(module).stock(inputs)
    return _SavedModel(name=examples.short_name(model.class_name), path=folder, inputs=inputs, expected=expected)


def _private(pids: Sequence[int]) -> int:
    return sum(map(processes.private_memory, pids))
