"""A client whose requests the backend's engine executes in this process, on one rank."""

from pathlib import Path
from typing import Any

import torch
from any_folder_name.parallel_backend.client.exchange import Timeouts
from any_folder_name.parallel_backend.engine.engine import Engine
from any_folder_name.parallel_backend.protocol.endpoint import Endpoint
from any_folder_name.parallel_backend.protocol.tensors import describe
from torch import Tensor


class EngineClient:
    """Executes requests when ``attempt`` sends them."""

    remote, endpoint, timeouts = False, Endpoint(folder=Path("/nowhere")), Timeouts()

    def __init__(self) -> None:
        self.engine = Engine(rank=0, world_size=1, device=torch.device("cpu"))

    def hosts(self) -> tuple[()]:
        """Say that there is no other host."""
        return ()

    def status(self) -> None:
        """Say that the backend runs."""

    def expect(self, devices: Any) -> None:
        """Do nothing: there are no ranks."""

    def end_run(self) -> None:
        """Do nothing: each step is a request."""

    def attempt(
        self, message: Any, tensors: dict[str, Tensor], *, interrupted: Any = None, on_progress: Any = None
    ) -> dict[str, Tensor]:
        """Execute a request."""
        answer: dict[str, Tensor] = self.engine.handle(
            message, describe(tensors), tensors, report=on_progress or (lambda *_: None),
            cancelled=interrupted or (lambda: False),
        )  # fmt: skip
        return answer
