"""How fast requests and pixels travel, compared with a plain socket copy of the same bytes in the same run."""

import argparse
import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import Any

import torch

from lab.engine.echo import ECHO
from parallel_backend.client import devices as device_list
from parallel_backend.client.client import Client
from parallel_backend.client.constant_tensors import ConstantTensors
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward, Progress, Trial, Unload
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import SOCKET_BUFFER

from .results import add_common, document

PIXELS = 225_000_000
"""Values in the large reply: 0.9 GB of float32."""
LATENT = (1, 16, 1, 128, 128)
"""Shape of the latent that is sent and returned, 1 MiB of float32."""
PATCH = (1, 16, 16)
"""Patch size with which this latent is 64 tokens, so that a forward takes next to no time."""
TEXT = 32
CALLS = 30
CONDITIONING = 105_000_000
"""Bytes that a step of Wan image to video has in common with the step before."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--megabytes", type=int, default=900, help="size of the large reply (default %(default)s)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure how fast requests and pixels are transferred; return the exit status."""
    measured = measure_alone(devices_text=options.devices, pixels=options.megabytes * 250_000)
    print(document([measured]) if options.json else measured.describe())
    return 0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Seconds of an action that was repeated ``CALLS`` times."""

    best: float
    median: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Summarize measured seconds."""
        return cls(best=min(seconds), median=statistics.median(seconds), worst=max(seconds))

    def __str__(self) -> str:
        return f"{self.median * 1e3:6.2f} ms ({self.best * 1e3:.2f} to {self.worst * 1e3:.2f})"


@dataclass(frozen=True, kw_only=True)
class WireMeasurement:
    """The results.

    Attributes:
        reply_bytes: size of the large reply.
        plain_copy: seconds of a plain socket copy of that size.
        reply: seconds of the large reply.
        reply_ratio: ``reply`` divided by ``plain_copy``.
        supervisor_growth: bytes by which the supervisor's memory grew during the large replies.
        echo: seconds of a request that computes nothing.
        here: seconds of a forward in this process.
        forward: by layout, seconds of the same forward through the backend.
        added: by layout, added seconds over the forward in this process in the same round.
        same: by dtype, seconds to see that ``CONDITIONING`` is that of the step before, and of ``torch.equal``.
    """

    reply_bytes: int
    plain_copy: float
    reply: float
    reply_ratio: float
    supervisor_growth: int
    echo: Spread
    here: Spread
    forward: dict[str, Spread]
    added: dict[str, Spread]
    same: dict[str, tuple[float, float]]

    def describe(self) -> str:
        """Format the results as text."""
        lines = [
            f"a reply of {self.reply_bytes / 1e9:.2f} GB: {self.reply:.2f} s, {self.reply_ratio:.2f} times a plain "
            f"socket copy ({self.plain_copy:.2f} s); the supervisor grew by {self.supervisor_growth / 2**20:.1f} MiB",
            f"1 MiB each way, one tiny layer, 64 tokens, one thread per rank; median (best to worst) of {CALLS}:",
            f"{'echo':>24}: {self.echo}, the round trip alone",
            f"{'forward, this process':>24}: {self.here}",
        ]
        for layout, spread in self.forward.items():
            lines.append(f"{'Forward, ' + layout:>24}: {spread}, adds {self.added[layout]}")
        for dtype, (ours, plain) in self.same.items():
            lines.append(
                f"{CONDITIONING / 1e6:.0f} MB of conditioning as in the step before, {dtype}: seen in "
                f"{ours * 1e3:.1f} ms, {ours / plain:.2f} times torch.equal's"
            )
        lines.append("added: the round trip and the checks; on several ranks also splitting, exchanging and gathering")
        return "\n".join(lines)


def measure_alone(*, devices_text: str | None = None, pixels: int = PIXELS) -> WireMeasurement:
    """Measure with a temporary backend.

    Args:
        devices_text: devices of two ranks; see ``client.devices.choose_devices``.
        pixels: values in the large reply.

    Raises:
        InvalidRequest: ``pixels`` is below 1, or there are fewer than two devices.
        BackendError: the backend fails.
    """
    devices = device_list.choose_devices(devices_text, device_list.ranks_of([ParallelLayout(ulysses=2)]))
    if pixels < 1:
        raise InvalidRequest(f"a reply of {pixels} values: at least one is needed")
    with tempfile.TemporaryDirectory(prefix="bench-wire-") as folder, temporary_backend(Path(folder)) as client:
        return measure(client, devices=devices, pixels=pixels)


def measure(client: Client, *, devices: Devices, pixels: int = PIXELS) -> WireMeasurement:
    """Measure with a backend, which starts the ranks.

    Args:
        client: connected to the backend.
        devices: the ranks'. The forward in this process runs on the first.
        pixels: values in the large reply.

    Raises:
        BackendError: the backend fails.
    """
    echo, here, forward = _small_calls(client, devices)
    before = client.status().memory
    plain, reply = _large_replies(client, ModelSpec(path="/", devices=devices), pixels)
    return WireMeasurement(
        reply_bytes=pixels * 4,
        plain_copy=plain,
        reply=reply,
        reply_ratio=reply / plain,
        supervisor_growth=client.status().memory - before,
        echo=Spread.of(echo),
        here=Spread.of(here),
        forward={layout: Spread.of(seconds) for layout, seconds in forward.items()},
        added={layout: Spread.of(list(map(sub, seconds, here))) for layout, seconds in forward.items()},
        same={str(dtype).rpartition(".")[2]: _repeated(dtype) for dtype in (torch.float32, torch.bfloat16)},
    )


def _repeated(dtype: torch.dtype) -> tuple[float, float]:
    """Return the fewest seconds in which conditioning is seen to be the same, and those of a plain comparison."""
    name, text = "0.encoder_hidden_states", torch.randn(CONDITIONING // dtype.itemsize).to(dtype)
    copy, constants = text.clone(), ConstantTensors()
    message = Forward(model=ModelSpec(path="/", devices=Devices(kind="cpu", indices=(0,))), branches=1)
    ours: list[float] = []
    plain: list[float] = []
    constants.describe(message, {name: text})
    for _ in range(CALLS):
        _timed(ours, constants.describe, message, {name: text})
        _timed(plain, torch.equal, text, copy)
    return min(ours), min(plain)


def _small_calls(client: Client, devices: Devices) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Return the seconds of echoes, of forwards in this process, and by layout of the same forwards, interleaved."""
    inputs = _inputs()
    named, latent = {f"0.{name}": tensor for name, tensor in inputs.items()}, {"x": inputs["hidden_states"]}
    echo: list[float] = []
    here: list[float] = []
    layouts = dict.fromkeys((ParallelLayout(), ParallelLayout(ulysses=len(devices.indices))))
    forward: dict[str, list[float]] = {str(layout): [] for layout in layouts}
    with tempfile.TemporaryDirectory(prefix="bench-wire-") as folder, torch.inference_mode(), _one_thread():
        module, path = _tiny_model(Path(folder))
        device = torch.device(devices.of_rank(0))
        module.to(device)
        specs = [ModelSpec(path=path, devices=devices, dtype="float32", layout=layout) for layout in layouts]
        for _ in range(CALLS + 1):
            expected = _timed(here, _forward, module, inputs, device)
            for spec in specs:
                message = Forward(model=spec, branches=1)
                client.call(message, named)  # the steps of the other layout are over: this one begins a run
                _check(_timed(forward[str(spec.layout)], client.call, message, named)["0"], expected)
            client.end_run()
            _check(_timed(echo, client.call, Trial(model=specs[0], name=ECHO), latent)["x"], latent["x"])
        client.call(Unload(model=specs[0]))
    return echo[1:], here[1:], {layout: seconds[1:] for layout, seconds in forward.items()}


def _forward(module: Any, inputs: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Run a forward on a device; as through the backend, inputs and prediction are in the CPU's memory."""
    (prediction,) = module(**{name: tensor.to(device) for name, tensor in inputs.items()}, return_dict=False)
    result: torch.Tensor = prediction.cpu()
    return result


def _timed(seconds: list[float], call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a call returns, and append its duration to ``seconds``."""
    start = time.perf_counter()
    result = call(*arguments, **options)
    seconds.append(time.perf_counter() - start)
    return result


def _check(result: torch.Tensor, expected: torch.Tensor) -> None:
    if result.shape != expected.shape or float((result - expected).abs().max()) > 1e-3 * float(expected.abs().max()):
        raise RuntimeError("the backend returned a wrong result")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread in this process, as a rank does, so that the two can be compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _inputs() -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(LATENT),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 8, TEXT),
    }


def _tiny_model(folder: Path) -> tuple[Any, str]:
    """Write a model to a folder and return both."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "freq_dim": 32, "ffn_dim": 64, "num_layers": 1}
    model = WanTransformer3DModel(patch_size=PATCH, text_dim=TEXT, **sizes)
    model.save_pretrained(folder / "transformer")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return model.eval(), str(folder)


def _large_replies(client: Client, spec: ModelSpec, pixels: int) -> tuple[float, float]:
    """Return the median seconds of the plain copy and of the reply, measured alternately."""
    rounds = [(_plain_copy(pixels * 4), _large_reply(client, spec, pixels)) for _ in range(3)]
    plain, reply = zip(*rounds, strict=True)
    return statistics.median(plain), statistics.median(reply)


def _large_reply(client: Client, spec: ModelSpec, pixels: int) -> float:
    start = [0.0]

    def progressed(progress: Progress, _: dict[str, torch.Tensor]) -> None:
        if progress.phase == "reply":
            start[0] = time.perf_counter()

    values = client.call(Trial(model=spec, name=ECHO, amount=pixels), on_progress=progressed)["made"]
    seconds = time.perf_counter() - start[0]
    if values[0] != 0.5 or values[-1] != 0.5:
        raise RuntimeError("the backend returned wrong values")
    return seconds


def _plain_copy(count: int) -> float:
    """Seconds to copy bytes from one process's memory to a new buffer of another's through a Unix socket."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    child = os.fork()
    if child == 0:
        try:
            source = bytearray(b"\x01") * count
            theirs.sendall(b"!")
            theirs.sendall(source)
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        ours.recv(1)
        start = time.perf_counter()
        fresh: Any = torch.empty(count, dtype=torch.uint8).numpy()  # like a reply's tensor, not zeroed first
        view = memoryview(fresh)
        while view:
            view = view[ours.recv_into(view) :]
        seconds = time.perf_counter() - start
    os.waitpid(child, 0)
    return seconds
