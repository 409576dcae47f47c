"""What happens when ranks are killed or stopped, a request is cancelled, or the card is full; memory afterwards.

Two ranks share the first GPU. Without one they are CPU ranks, and checks that need a card are left out.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lab.bench.ranks.cases import Case, write_model
from lab.gpu_check.two_ranks import two_ranks
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import BackendError
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Sample
from parallel_backend.protocol.model_spec import ModelSpec

STEPS, DELAY = 2000, 2.0
"""Steps of a request that is disturbed, and seconds after which it is."""
TOKENS, LARGE = 1024, 65536
"""Tokens of a request, and of one for which a nearly full card has no room."""
IN_TIME = 30.0
"""Seconds within which a disturbed request has to end."""
LEFT = 50e6
"""Bytes of the card's memory that may be missing after the backend has ended."""
FREE = 700e6
"""Bytes that are free on a full card."""


class Failures:
    """Disturbed requests to a backend of two ranks. After each, an undisturbed request has to be right."""

    def __init__(self, client: Client, model: Path) -> None:
        self.client, self.model = client, model
        self.found: dict[str, str] = {}
        self.reference = self._run(2)

    def _run(self, steps: int, cancelled: Callable[[], bool] = lambda: False, tokens: int = TOKENS) -> Tensor:
        inputs = Case(family="flux", tokens=tokens, text_tokens=128, branches=1).inputs()
        latent = inputs.pop("hidden_states")
        tensors = {"x": latent, "sigmas": torch.linspace(1.0, 0.0, steps + 1)}
        tensors |= {f"0.{name}": each for name, each in inputs.items() if name != "timestep"}
        spec = ModelSpec(
            path=str(self.model), devices=two_ranks(), dtype="float32", layout=ParallelLayout.parse("ulysses=2")
        )
        message = Sample(model=spec, branches=1, sampler="euler", cfg=1.0)
        return self.client.call(message, tensors, interrupted=cancelled)["samples"]

    def disturb(self, name: str, disturbance: Callable[[], None]) -> None:
        """Disturb a request after ``DELAY`` seconds, and note how it ends."""
        timer = threading.Timer(DELAY, disturbance)
        started = time.monotonic()
        timer.start()
        try:
            self._run(STEPS)
            ended = "WRONG: it was not disturbed"
        except BackendError as error:
            ended = f"{type(error).__name__}: {error}"
        took = time.monotonic() - started - DELAY
        timer.join()
        late = f"WRONG: after {took:.0f} s: " if took > IN_TIME else ""
        self._note(name, f"{late}{ended} ({took:.1f} s later)")

    def cancel(self) -> None:
        """Cancel a request."""
        started = time.monotonic()
        try:
            self._run(STEPS, cancelled=lambda: time.monotonic() > started + DELAY)
            ended = "WRONG: it was not cancelled"
        except BackendError as error:
            ended = f"{type(error).__name__} ({time.monotonic() - started - DELAY:.1f} s later)"
        self._note("cancel", ended)

    def fill_the_card(self) -> None:
        """Ask for more memory than a nearly full card has."""
        filler = torch.empty(int(torch.cuda.mem_get_info(0)[0] - FREE), dtype=torch.uint8, device="cuda:0")
        try:
            self._run(2, tokens=LARGE)
            ended = "it had room"
        except BackendError as error:
            ended = f"{type(error).__name__}: {error}"
        del filler
        torch.cuda.empty_cache()
        self._note("full card", ended)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.client.status().ranks[rank].pid, number)

    def _note(self, name: str, ended: str) -> None:
        """Note how a request ended, and whether the next one is right."""
        again = self._run(2)
        same = float((again - self.reference).abs().max() / self.reference.abs().max()) < 1e-4
        self.found[name] = f"{ended}; the next request is {'right' if same else 'WRONG'}"


def main() -> int:
    """Print what happened as JSON, and fail if something was wrong."""
    on_card = torch.cuda.is_available()
    before = torch.cuda.mem_get_info(0)[0] if on_card else 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, temporary_backend(Path(folder)) as client:
        failures = Failures(client, write_model(Path(folder) / "model", "flux"))
        for rank in (1, 0):
            failures.disturb(f"SIGKILL of rank {rank}", partial(failures.signal_rank, rank, signal.SIGKILL))
        failures.disturb("SIGSTOP of rank 1", partial(failures.signal_rank, 1, signal.SIGSTOP))
        failures.cancel()
        if on_card:
            failures.fill_the_card()
    if on_card:
        missing = before - torch.cuda.mem_get_info(0)[0]
        failures.found["memory afterwards"] = f"{'WRONG: ' if missing > LEFT else ''}{missing / 1e6:.0f} MB are missing"
    print(json.dumps(failures.found))
    return int(any("WRONG" in text for text in failures.found.values()))


if __name__ == "__main__":
    sys.exit(main())
