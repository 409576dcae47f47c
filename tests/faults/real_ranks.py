"""Start a backend of real ranks that fail as a test asks, and call it as the nodes do."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from parallel_backend.client.client import Client
from parallel_backend.client.lost_devices import LostDevices
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.errors import BackendUnavailable
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Progress, RankRequest, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.supervisor.limits import Limits
from scripts.processes import wait_until

from .backend import start_fake
from .losing_rank import SELF, SIGNALS

Tensors = dict[str, torch.Tensor]
STEPS, HALF = 20, 10


def start(folder: Path, *, idle_timeout: float = 600.0) -> Client:
    """Start a backend of real ranks, which may take long to start."""
    started = start_fake(folder, worker="losing_rank.py", idle_timeout=idle_timeout, limits=Limits())
    return Client(endpoint=started.endpoint)


def model(path: str, layout: str | None, ranks: int = 3) -> ModelSpec:
    devices = Devices(kind="cpu", indices=tuple(range(ranks)))
    return ModelSpec(path=path, devices=devices, layout=None if layout is None else ParallelLayout.parse(layout))


def request(spec: ModelSpec, sampler: str = "euler") -> tuple[Sample, Tensors]:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 16, 1, 9, 7), "sigmas": torch.linspace(1, 0, STEPS + 1)}
    inputs |= {f"{i}.encoder_hidden_states": torch.randn(2, 6 - i, 32) for i in range(2)}
    return Sample(model=spec, branches=2, sampler=sampler, cfg=3.0), inputs


@dataclass(kw_only=True)
class Call:
    """A call whose ranks fail, with what it reports.

    Attributes:
        stands_still_at: the step after which it reads nothing until the backend has given it up; 0 for none.
        until_it_ends: it stands still until the backend has ended, too.
        before_asking: called when the call has noticed a failure and will ask again.
    """

    client: Client
    stands_still_at: int = 0
    until_it_ends: bool = False
    before_asking: Callable[[], None] = lambda: None
    lost: LostDevices = field(default_factory=LostDevices)
    steps: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)

    def run(self, message: RankRequest, tensors: Tensors) -> Tensors:
        recovery = Recovery(notify=self._notified, lost=self.lost)
        return RetriedRequest(self.client, message, tensors, on_progress=self._progressed, recovery=recovery).run()

    def _progressed(self, progress: Progress, tensors: Tensors) -> None:
        if progress.phase == "sampling":
            assert not tensors, "what is kept does not reach the caller"
            self.steps.append(progress.value)
            self.notes.add(progress.note)
            if progress.value == self.stands_still_at:
                self.stands_still_at = 0
                wait_until(self._given_up, 60.0, "the backend has given the request up")

    def _given_up(self) -> bool:
        try:
            return self.client.status().state == "idle" and not self.until_it_ends
        except BackendUnavailable:
            return True

    def _notified(self, sentence: str) -> None:
        self.said.append(sentence)
        self.before_asking()


def let_die(client: Client, *deaths: tuple[int, int | str], target: str = SELF, number: int = signal.SIGKILL) -> None:
    """Let ranks, or the supervisor, get a signal after steps of ranks: pairs of rank and step (see ``SIGNALS``), in
    order."""
    lines = [f"{rank} {step} {target} {int(number)}" for rank, step in deaths]
    (client.endpoint.folder / SIGNALS).write_text("\n".join(lines))


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())
