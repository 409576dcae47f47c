"""The memory that a model file takes on several ranks: ``python -m lab bench memory``.

On the CPU, it sums the proportional memory (``Pss`` in proc(5)) of this process, the supervisor and two ranks. Mapped
pages of the file then count once. On two GPUs, it sums the memory of all processes. It takes the peak of loading a
large file and of a forward, subtracts the peak with a small file, and compares the rest with the file's size.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from lab.sampling import sampled
from parallel_backend import processes
from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.distributed.device_memory import in_use
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec

from .model_file import FORMATS, LATENT, TEXT, suffix, write_wan
from .results import add_common, print_results

LAYOUTS = ("ulysses=2 shard_weights", "tensor=2", "pipe=2 patches=1")
LIMIT = {"cpu": 1.15, "cuda": 1.5}
"""Largest growth that passes, relative to the file's size. On GPUs torch keeps what gathered blocks took for the next
ones."""

SMALL = {"heads": 2, "layers": 2}
HEADS, BYTES_OF_LAYER = 9, 105_000_000
"""The large file's width, and what one of its layers takes in float32: as large a part of 4 GB as one of 40 layers is
of 14B."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the file (default %(default)g)")
    parser.add_argument(
        "--format", choices=("plain", "fp8", "int8", "mxfp8", "nvfp4", "gguf"), default="plain",
        help="how its weights are stored (default %(default)s, which is fp32)",
    )  # fmt: skip
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure the memory that a model file takes on two ranks."""
    return print_results(measure(options.gigabytes, options.format, options.devices), as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class FileMemory:
    """The growth of all processes' memory with one layout.

    Attributes:
        kind: of the devices, see ``Devices``.
        layout: the layout, as text.
        file: bytes of the file.
        peak: largest growth while it is loaded and used.
        after: growth afterwards.
    """

    kind: Literal["cuda", "cpu"]
    layout: str
    file: int
    peak: int
    after: int

    @property
    def failed(self) -> bool:
        """Whether the peak is above ``LIMIT``."""
        return self.peak > LIMIT[self.kind] * self.file

    def describe(self) -> str:
        """Format the result as text."""
        return (
            f"{'FAILED' if self.failed else 'passed'}   {self.layout}: a file of {self.file / 1e9:.2f} GB, peak "
            f"{self.peak / self.file:.2f} of it, afterwards {self.after / self.file:.2f}"
        )


def measure(gigabytes: float, stored_format: str = "plain", devices_text: str | None = None) -> Iterator[FileMemory]:
    """Measure every layout with a file in a format, each file on a new backend.

    Raises:
        InvalidRequest: ``devices_text`` does not name enough devices.
    """
    layouts = [ParallelLayout.parse(text) for text in LAYOUTS]
    ranks = devices.choose_devices(devices_text, devices.ranks_of(layouts))
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        small, large = (Path(folder) / f"{name}{suffix(stored_format)}" for name in ("small", "large"))
        of_layer = BYTES_OF_LAYER * FORMATS[stored_format] / FORMATS["plain"]
        write_wan(small, **SMALL, stored_format=stored_format)
        write_wan(large, heads=HEADS, layers=max(2, round(gigabytes * 1e9 / of_layer)), stored_format=stored_format)
        for layout in layouts:
            (peak, after), (usual_peak, usual) = (
                _memory(Path(folder), ModelSpec(path=str(file), devices=ranks, dtype="float32", layout=layout))
                for file in (large, small)
            )
            yield FileMemory(
                kind=ranks.kind, layout=str(layout), file=large.stat().st_size, peak=peak - usual_peak,
                after=after - usual,
            )  # fmt: skip


def _memory(folder: Path, spec: ModelSpec) -> tuple[int, int]:
    """Return the memory of all processes at its peak, and after a forward."""
    with temporary_backend(folder) as client:
        with sampled(_meter(client, spec.devices)) as samples:
            _forward(client, spec)
        used = [number for _, number in samples]
        return max(used), used[-1]


def _forward(client: Client, spec: ModelSpec) -> None:
    inputs = {
        "0.hidden_states": torch.zeros(1, LATENT, 1, 16, 16),
        "0.timestep": torch.tensor([500.0]),
        "0.encoder_hidden_states": torch.zeros(1, 16, TEXT),
    }
    client.call(Forward(model=spec, branches=1), inputs)


def _meter(client: Client, where: Devices) -> Callable[[], int]:
    """Return a function that measures used memory: of the GPUs, or of this process, the supervisor and all ranks."""
    if where.kind == "cuda":
        return partial(in_use, where.indices)
    pids = [os.getpid(), client.status().pid]

    def cpu() -> int:
        ranks = [rank.pid for rank in client.status().ranks]
        return sum(map(processes.proportional_memory, [*pids, *ranks]))

    return cpu
