"""The cost of keeping each step's state, from which a run can go on: ``python -m lab bench resume``.

Runs of an image of 1024 x 1024 pixels with and without it take turns, so that a machine that slows down over minutes
does not matter.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol import request_log
from parallel_backend.protocol.deadlines import Deadline
from parallel_backend.protocol.messages import KEPT, Progress, Sample
from parallel_backend.protocol.model_spec import ModelSpec
from parallel_backend.protocol.request_log import RequestLine

from .model_file import TEXT, write_wan
from .results import add_common, print_results

LAYOUT = ParallelLayout(ulysses=2)
LIMIT = 0.01
"""The largest part of a step that passes."""
SAMPLER = "dpmpp_2m"
"""It remembers one prediction, so two latents are kept."""
LATENT = (1, 16, 1, 128, 128)
"""1 MiB in float32."""
TEXT_TOKENS = 64
HEADS, LAYERS = 4, 2
STEPS = 4
_PATIENCE, _POLL = 20.0, 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--rounds", type=int, default=15, help="pairs of runs (default %(default)s)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure the cost of keeping each step's state."""
    return print_results([measure(options.rounds, options.devices)], as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """The results.

    Attributes:
        nbytes: kept of each step.
        step: seconds of a step without it.
        sending: seconds of a step in which rank 0 sends it.
        longer: added time, as a part of a step, in the fastest runs, which other processes disturb least.
    """

    nbytes: int
    step: float
    sending: float
    longer: float

    @property
    def failed(self) -> bool:
        """Whether it costs more than ``LIMIT``."""
        return max(self.longer, self.sending / self.step) > LIMIT

    def describe(self) -> str:
        """Format the result as text."""
        outcome = "FAILED" if self.failed else "passed"
        return (
            f"{outcome}   {LAYOUT}, {SAMPLER}: {self.nbytes / 2**20:.2f} MiB are kept of each step of "
            f"{self.step:.2f} s; rank 0 sends them in {self.sending * 1e3:.2f} ms ({self.sending / self.step:.2%}), "
            f"and the fastest run's step takes {self.longer:+.2%} longer"
        )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One run: seconds of a step, seconds in which rank 0 sends to the client, and the kept bytes of a step."""

    step: float
    client: float
    nbytes: int


def measure(rounds: int, devices_text: str | None = None) -> KeptState:
    """Measure on two ranks.

    Raises:
        InvalidRequest: ``rounds`` is below 1, or ``devices_text`` does not name two devices.
        BackendError: the backend fails.
    """
    if rounds < 1:
        raise InvalidRequest(f"--rounds {rounds}: at least one is needed")
    chosen = devices.choose_devices(devices_text, devices.ranks_of([LAYOUT])).first(LAYOUT.ranks)
    with tempfile.TemporaryDirectory(prefix="bench-resume-") as name, temporary_backend(Path(name)) as client:
        file = Path(name) / "model.safetensors"
        write_wan(file, heads=HEADS, layers=LAYERS)
        spec = ModelSpec(path=str(file), devices=chosen, dtype="float32", layout=LAYOUT)
        _run(client, spec, keep=True)
        pairs = [_pair(client, spec, first=bool(i % 2)) for i in range(rounds)]
    return KeptState(
        nbytes=pairs[0][1].nbytes,
        step=statistics.median(plain.step for plain, _ in pairs),
        sending=statistics.median(kept.client - plain.client for plain, kept in pairs),
        longer=min(kept.step for _, kept in pairs) / min(plain.step for plain, _ in pairs) - 1,
    )


def _pair(client: Client, spec: ModelSpec, *, first: bool) -> tuple[_Run, _Run]:
    """Run without and with kept state, the latter first if ``first``."""
    runs = {keep: _run(client, spec, keep=keep) for keep in (first, not first)}
    return runs[False], runs[True]


def _run(client: Client, spec: ModelSpec, *, keep: bool) -> _Run:
    message = Sample(model=spec, branches=1, sampler=SAMPLER, cfg=1.0, keep=keep)
    inputs = {"x": torch.randn(LATENT), "sigmas": torch.linspace(1, 0, STEPS + 1)}
    inputs["0.encoder_hidden_states"] = torch.randn(1, TEXT_TOKENS, TEXT)
    kept = 0

    def count(progress: Progress, tensors: dict[str, Tensor]) -> None:
        nonlocal kept
        kept = max(kept, sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(KEPT)))

    start = time.perf_counter()
    client.call(message, inputs, on_progress=count)
    seconds = time.perf_counter() - start
    spent = _line(client, message.request_id).seconds
    return _Run(step=seconds / STEPS, client=spent.get("client", 0.0) / STEPS, nbytes=kept)


def _line(client: Client, request_id: str) -> RequestLine:
    """The request's line in the log, which is written after the reply."""
    deadline = Deadline(_PATIENCE, "waiting for a request's line in the log")
    while True:
        lines = (line for line in request_log.read(client.endpoint.request_log) if line.id == request_id)
        with contextlib.suppress(FileNotFoundError):
            if line := next(lines, None):
                return line
        time.sleep(min(_POLL, deadline.remaining()))
