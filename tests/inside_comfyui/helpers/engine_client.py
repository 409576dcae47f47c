"""A client over the backend's own engine of one rank, in this process."""

from typing import Any

import torch
from any_folder_name.parallel_backend.engine.engine import Engine
from any_folder_name.parallel_backend.protocol.tensors import describe
from torch import Tensor


class EngineClient:
    """Answers ``call``."""

    def __init__(self) -> None:
        self.engine = Engine(rank=0, world_size=1, device=torch.device("cpu"))

    def status(self) -> None:
        """It runs."""

    def call(
        self, message: Any, tensors: dict[str, Tensor], *, interrupted: Any = None, on_progress: Any = None
    ) -> dict[str, Tensor]:
        """Carry out a request at once."""
        done: dict[str, Tensor] = self.engine.handle(
            message, describe(tensors), tensors, report=on_progress or (lambda *_: None),
            cancelled=interrupted or (lambda: False),
        )  # fmt: skip
        return done
