"""The cost of streaming blocks in a step: ``python -m lab bench streaming``.

Each rank's memory is limited: the weights are 2.5 times the memory of all ranks. A step is compared with a step whose
weights stay on the devices, plus a plain copy of the streamed bytes. The three take turns, so that a machine that slows
down over minutes does not matter.
"""

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from torch import Tensor

from parallel_backend import env, processes
from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import BackendFailure
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec

from .model_file import LATENT, TEXT, write_wan
from .results import add_common, print_results

LAYOUT = ParallelLayout(ulysses=2)
TIMES = 2.5
"""The weights' bytes divided by the memory of all ranks."""
LIMIT, TOLERANCE = 1.05, 1e-5
"""Largest ratio of the seconds, and largest difference of the predictions relative to the largest value, that pass."""

HEADS, BYTES_OF_LAYER = 4, 21_200_000
"""The width, and what one layer takes in float32."""
SIDE, TEXT_TOKENS = 40, 64
"""Latent positions of a side, which are 400 image tokens."""

_SOURCE = 1 << 28
"""Bytes that a plain copy reads over and over: more than any cache."""
_PATIENCE = 120.0
"""Seconds that the copying processes may take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each kind (default %(default)s)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure the cost of streaming blocks in a step."""
    return print_results([measure(options.gigabytes, options.rounds, options.devices)], as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class StreamingCost:
    """The time of a step.

    Attributes:
        weights: bytes of the model.
        streamed: seconds of a step whose blocks stream.
        whole: seconds of a step whose weights stay.
        copied: seconds of a plain copy of the streamed bytes.
        ratio: the median of ``streamed / (whole + copied)``.
        error: largest difference of the predictions, relative to the largest value.
        note: the backend's note about the blocks.
    """

    weights: int
    streamed: float
    whole: float
    copied: float
    ratio: float
    error: float
    note: str

    @property
    def failed(self) -> bool:
        """Whether it costs more than ``LIMIT``, or the predictions differ."""
        return not (self.ratio <= LIMIT and self.error <= TOLERANCE)

    def describe(self) -> str:
        """Format the result as text."""
        outcome = "FAILED" if self.failed else "passed"
        return (
            f"{outcome}   {LAYOUT}: weights of {self.weights / 1e9:.2f} GB, {TIMES} times the ranks' memory, "
            f"{self.note}: {self.streamed:.2f} s a step, {self.ratio:.2f} of {self.whole:.2f} s with whole weights and "
            f"{self.copied:.2f} s of copying; predictions differ by {self.error:.1e}"
        )


def measure(gigabytes: float, rounds: int, devices_text: str | None = None) -> StreamingCost:
    """Measure a model of this size.

    Raises:
        InvalidRequest: ``devices_text`` does not name enough devices.
    """
    chosen = devices.choose_devices(devices_text, devices.ranks_of([LAYOUT])).first(LAYOUT.ranks)
    with tempfile.TemporaryDirectory(prefix="bench-streaming-") as name, ExitStack() as stack:
        folder, file = Path(name), Path(name) / "model.safetensors"
        write_wan(file, heads=HEADS, layers=max(20, round(gigabytes * 1e9 / BYTES_OF_LAYER)))
        weights = file.stat().st_size
        spec = ModelSpec(path=str(file), devices=chosen, dtype="float32", layout=LAYOUT)
        roomy = stack.enter_context(temporary_backend(_made(folder / "roomy")))
        with env.changed({env.MEMORY_LIMIT.name: str(int(weights / TIMES / LAYOUT.ranks))}):
            small = stack.enter_context(temporary_backend(_made(folder / "small")))
        copy = stack.enter_context(_copying(chosen))
        wanted, got = (_step(client, spec)[0] for client in (roomy, small))
        return _summary(spec, weights, small, [
            (_step(small, spec)[1], _step(roomy, spec)[1], copy(weights)) for _ in range(rounds)
        ], float((got - wanted).abs().max() / wanted.abs().max()))  # fmt: skip


def _summary(
    spec: ModelSpec, weights: int, small: Client, rounds: list[tuple[float, float, float]], error: float
) -> StreamingCost:
    streamed, whole, copied = (statistics.median(each) for each in zip(*rounds, strict=True))
    notes = {model.note for rank in small.status().ranks for model in rank.models if model.path == spec.path}
    return StreamingCost(
        weights=weights, streamed=streamed, whole=whole, copied=copied, error=error, note=" and ".join(sorted(notes)),
        ratio=statistics.median(step / (plain + copy) for step, plain, copy in rounds),
    )  # fmt: skip


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _step(client: Client, spec: ModelSpec) -> tuple[Tensor, float]:
    """Return the prediction and the seconds of one forward."""
    random = torch.Generator().manual_seed(1)
    inputs = {
        "0.hidden_states": torch.randn(1, LATENT, 1, SIDE, SIDE, generator=random),
        "0.timestep": torch.tensor([500.0]),
        "0.encoder_hidden_states": torch.randn(1, TEXT_TOKENS, TEXT, generator=random),
    }
    answer = client.call(Forward(model=spec, branches=1, measure="seconds"), inputs)
    return answer["0"], float(answer["seconds"])


@contextmanager
def _copying(chosen: Devices) -> Iterator[Callable[[int], float]]:
    """Yield a function that copies bytes to all devices at once and returns the seconds of the slowest."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(LAYOUT.ranks)
    ends = [context.Pipe() for _ in range(LAYOUT.ranks)]
    started = [
        context.Process(target=_copy_process, args=(rank, chosen.of_rank(rank), barrier, end), daemon=True)
        for rank, (_, end) in enumerate(ends)
    ]
    for process in started:
        process.start()

    def copy(nbytes: int) -> float:
        for pipe, _ in ends:
            pipe.send(nbytes)
        return max(float(_received(pipe)) for pipe, _ in ends)

    try:
        yield copy
    finally:
        for process in started:
            process.kill()
            process.join(_PATIENCE)


def _received(pipe: Connection) -> float:
    if not pipe.poll(_PATIENCE):
        raise BackendFailure(f"a process did not copy within {_PATIENCE:g} s")
    seconds: float = pipe.recv()
    return seconds


def _copy_process(rank: int, device_name: str, barrier: Barrier, pipe: Connection) -> None:
    torch.set_num_threads(1)
    processes.pin_to_core_share(rank, LAYOUT.ranks)
    device = torch.device(device_name)
    source = torch.ones(_SOURCE, dtype=torch.uint8, pin_memory=device.type == "cuda")
    chunks, target = source.split(BYTES_OF_LAYER)[:-1], torch.empty(BYTES_OF_LAYER, dtype=torch.uint8, device=device)
    while True:
        nbytes = pipe.recv()
        barrier.wait(_PATIENCE)
        start = time.perf_counter()
        for _, chunk in zip(range(0, nbytes, BYTES_OF_LAYER), itertools.cycle(chunks), strict=False):
            target.copy_(chunk, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pipe.send(time.perf_counter() - start)
