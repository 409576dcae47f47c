"""Start a backend of fake ranks in a runtime folder, and call it."""

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from parallel_backend.client import launch
from parallel_backend.client.client import Client
from parallel_backend.client.exchange import Timeouts
from parallel_backend.errors import BackendUnavailable
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import Progress, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.private_file import append_to
from parallel_backend.supervisor.limits import Limits, Patience
from scripts.processes import wait_until

TWO_RANKS = ModelSpec(path="/no/such/model", devices=Devices(kind="cpu", indices=(0, 1)))
IMPATIENT = Limits(patience=Patience(hang=3.0), cancel=3.0, agree=1.0, settle=1.0, keepalive_interval=0.5)


def environment(runtime: Path) -> dict[str, str]:
    """The environment of the processes of a runtime folder."""
    return launch.environment(Endpoint(folder=runtime))


def run_command(
    runtime: Path, *arguments: str, program: str = "parallel_backend", timeout: float = 60.0, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m`` the program with these arguments in a runtime folder."""
    return subprocess.run(
        [sys.executable, "-m", program, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(runtime) | variables,
        cwd=runtime,
        check=False,
    )


def start_fake(
    runtime: Path,
    *,
    idle_timeout: float = 60.0,
    limits: Limits = IMPATIENT,
    worker: str = "fake_worker.py",
    prefix: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    certificates: Path | None = None,
    forwarded: bool = False,
) -> Client:
    """Start ``fake_serve``, by the command ``prefix`` and with more ``variables``, and wait until it answers.

    With ``certificates`` it listens at a free port of 127.0.0.1, too. If it is ``forwarded``, clients may be elsewhere.
    """
    command = [*prefix, sys.executable, str(Path(__file__).with_name("fake_serve.py")), str(idle_timeout)]
    command += [msgspec.json.encode(limits).decode(), worker]
    command += [str(certificates)] if certificates else ["forwarded"] if forwarded else []
    client = Client(endpoint=Endpoint(folder=runtime), timeouts=Timeouts(connect=20.0, silence=30.0, cancel=20.0))
    with append_to(client.endpoint.start_log) as log:
        env = environment(runtime) | dict(variables or {})
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=runtime, env=env)
    threading.Thread(target=process.wait, daemon=True).start()
    wait_until(lambda: _answers(client), 20.0, "the backend answers")
    return client


def _answers(client: Client) -> bool:
    try:
        client.status()
    except BackendUnavailable:
        return False
    return True


def sample(kind: str = "steps", *, spec: ModelSpec = TWO_RANKS) -> Sample:
    """A request to ``fake_worker``, which behaves as ``kind`` says."""
    return Sample(model=spec, branches=1, sampler=kind, cfg=1.0)


def tensors(steps: int) -> dict[str, torch.Tensor]:
    """The tensors of a request with this many steps."""
    return {"x": torch.arange(6.0).reshape(2, 3), "sigmas": torch.linspace(1, 0, steps + 1)}


@dataclass(kw_only=True)
class Running:
    """A call in its own thread; setting ``stop`` interrupts it."""

    client: Client
    message: Sample
    tensors: dict[str, torch.Tensor] = field(default_factory=lambda: tensors(1000))
    stop: threading.Event = field(default_factory=threading.Event)
    progress: list[Progress] = field(default_factory=list)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.client.call(
                self.message,
                self.tensors,
                interrupted=self.stop.is_set,
                on_progress=lambda progress, _: self.progress.append(progress),
            )
        except BaseException as error:
            self.error = error

    def in_step(self, seconds: float = 60.0) -> "Running":
        """Wait until the ranks have finished their first step."""
        wait_until(lambda: self.error or self._stepped(), seconds, "the ranks have finished their first step")
        assert self.error is None, self.error
        return self

    def _stepped(self) -> bool:
        return any(progress.phase == "sampling" for progress in self.progress)

    def ended(self, seconds: float) -> BaseException | None:
        """Wait until the call ends; return the error that it ended with."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the call did not end within {seconds} s"
        return self.error
