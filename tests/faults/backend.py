"""Starting a backend for a test in a runtime folder of its own, and finding every process of it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from parallel_backend.client.client import Client, Timeouts
from parallel_backend.errors import BackendUnavailable
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import Devices, ModelSpec, Progress, Sample
from parallel_backend.supervisor.rank_set import Patience
from parallel_backend.supervisor.supervisor import Limits

ROOT = Path(__file__).resolve().parent.parent.parent
TWO = ModelSpec(path="/no/such/model", devices=Devices(kind="cpu", indices=(0, 1)))
QUICK = Limits(patience=Patience(hang=3.0), cancel=3.0, agree=1.0, sign_of_life=0.5)


def environment(runtime: Path) -> dict[str, str]:
    """For processes of ours that use this runtime folder."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PARALLEL_DIT_RUNTIME": str(runtime), "PYTHONPATH": os.pathsep.join(path)}


def processes(runtime: Path) -> list[psutil.Process]:
    """Every process that runs in this runtime folder's name, but this one."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.pid != os.getpid() and process.environ().get("PARALLEL_DIT_RUNTIME") == str(runtime):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The condition's value once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


def start_fake(runtime: Path, *, idle_timeout: float = 60.0, limits: Limits = QUICK) -> Client:
    """Start ``fake_serve`` and wait until it answers."""
    command = [sys.executable, str(Path(__file__).with_name("fake_serve.py")), str(idle_timeout)]
    command.append(msgspec.json.encode(limits).decode())
    client = Client(endpoint=Endpoint(folder=runtime), timeouts=Timeouts(connect=20.0, silence=30.0, cancel=20.0))
    with client.endpoint.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=runtime, env=environment(runtime))
    threading.Thread(target=process.wait, daemon=True).start()
    wait_until(lambda: _answers(client), 20.0, "the backend answers")
    return client


def _answers(client: Client) -> bool:
    try:
        client.status()
    except BackendUnavailable:
        return False
    return True


def sample(kind: str = "steps", *, spec: ModelSpec = TWO) -> Sample:
    """A request to ``fake_worker``."""
    return Sample(model=spec, branches=1, sampler=kind, cfg=1.0)


def tensors(steps: int) -> dict[str, torch.Tensor]:
    """For so many steps."""
    return {"x": torch.arange(6.0).reshape(2, 3), "sigmas": torch.linspace(1, 0, steps + 1)}


@dataclass(kw_only=True)
class Running:
    """A call in a thread of its own."""

    client: Client
    message: Sample
    steps: int = 1000
    stop: threading.Event = field(default_factory=threading.Event)
    seen: list[Progress] = field(default_factory=list)
    result: dict[str, torch.Tensor] | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self.client.call(
                self.message,
                tensors(self.steps),
                interrupted=self.stop.is_set,
                on_progress=lambda progress, _: self.seen.append(progress),
            )
        except BaseException as error:
            self.error = error

    def in_step(self) -> "Running":
        """Wait until the ranks are stepping."""
        wait_until(lambda: self.error or any(p.phase == "sample" for p in self.seen), 60.0, "the first step")
        assert self.error is None, self.error
        return self

    def ended(self, seconds: float) -> BaseException | None:
        """Wait for the end; the error it ended with."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the call did not end within {seconds} s"
        return self.error
