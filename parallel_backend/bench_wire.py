"""How fast requests and pixels travel, against a plain socket copy of the same bytes in the same run."""

import os
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .client import Client
from .messages import Devices, Echo, ModelSpec, Progress
from .own_backend import own_backend
from .payload import SOCKET_BUFFER

PIXELS = 225_000_000
"""Values of the large reply: 0.9 GB of float32."""
LATENT = 262_144
"""Values of the small request and its reply: 1 MiB of float32."""
CALLS = 50


@dataclass(frozen=True, kw_only=True)
class WireMeasurement:
    """Seconds, and bytes by which the supervisor grew while the large reply passed."""

    reply_bytes: int
    plain_copy: float
    reply: float
    reply_ratio: float
    forward_overhead_best: float
    forward_overhead: float
    forward_overhead_worst: float
    supervisor_growth: int

    def describe(self) -> str:
        """The same for people."""
        return (
            f"a reply of {self.reply_bytes / 1e9:.2f} GB: {self.reply:.2f} s, {self.reply_ratio:.2f} times a plain "
            f"socket copy ({self.plain_copy:.2f} s); the supervisor grew by {self.supervisor_growth / 2**20:.1f} MiB\n"
            f"a call with 1 MiB both ways: {self.forward_overhead * 1e3:.2f} ms (median of {CALLS}), "
            f"{self.forward_overhead_best * 1e3:.2f} ms at best, {self.forward_overhead_worst * 1e3:.2f} ms at worst"
        )


def measure_alone(*, ranks: int = 2) -> WireMeasurement:
    """Measure through a backend of its own, which is stopped at the end.

    Raises:
        BackendError: the backend fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-wire-") as folder, own_backend(Path(folder)) as client:
        return measure(client, ranks=ranks)


def measure(client: Client, *, ranks: int = 2, pixels: int = PIXELS) -> WireMeasurement:
    """Measure through a backend with ``ranks`` CPU ranks, which it starts.

    Raises:
        BackendError: the backend fails.
    """
    spec = ModelSpec(path="/", devices=Devices(kind="cpu", indices=tuple(range(ranks))))
    calls = _small_calls(client, spec)
    plain, reply = [], []
    before = client.status().memory
    for _ in range(3):
        plain.append(_plain_copy(pixels * 4))
        reply.append(_large_reply(client, spec, pixels))
    return WireMeasurement(
        reply_bytes=pixels * 4,
        plain_copy=statistics.median(plain),
        reply=statistics.median(reply),
        reply_ratio=statistics.median(reply) / statistics.median(plain),
        forward_overhead_best=min(calls),
        forward_overhead=statistics.median(calls),
        forward_overhead_worst=max(calls),
        supervisor_growth=client.status().memory - before,
    )


def _small_calls(client: Client, spec: ModelSpec) -> list[float]:
    latent = {"x": torch.randn(LATENT)}
    seconds = []
    for _ in range(CALLS + 1):
        start = time.perf_counter()
        result = client.call(Echo(model=spec), latent)
        seconds.append(time.perf_counter() - start)
        if not torch.equal(result["x"], latent["x"]):
            raise RuntimeError("the backend returned other bytes than it was sent")
    return seconds[1:]


def _large_reply(client: Client, spec: ModelSpec, pixels: int) -> float:
    start = [0.0]

    def progressed(progress: Progress, _: dict[str, torch.Tensor]) -> None:
        if progress.phase == "reply":
            start[0] = time.perf_counter()

    made = client.call(Echo(model=spec, make=pixels), on_progress=progressed)["made"]
    seconds = time.perf_counter() - start[0]
    if made[0] != 0.5 or made[-1] != 0.5:
        raise RuntimeError("the backend returned other bytes than it made")
    return seconds


def _plain_copy(count: int) -> float:
    """Seconds from one process's memory to another's fresh buffer through a Unix socket."""
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
        view = memoryview(bytearray(count))
        while view:
            view = view[ours.recv_into(view) :]
        seconds = time.perf_counter() - start
    os.waitpid(child, 0)
    return seconds
