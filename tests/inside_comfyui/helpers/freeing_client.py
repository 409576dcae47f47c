"""A client of a real backend that can free all weights that it has asked for."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from any_folder_name.parallel_backend.client.client import Client
from any_folder_name.parallel_backend.protocol.endpoint import Endpoint
from any_folder_name.parallel_backend.protocol.messages import RankRequest, Unload
from any_folder_name.parallel_backend.protocol.model_spec import ModelSpec
from any_folder_name.parallel_backend.protocol.status import Status


class FreeingClient(Client):
    """A client that knows which models the ranks may hold."""

    def __init__(self, folder: Path, *, idle_timeout: float) -> None:
        super().__init__(endpoint=Endpoint(folder=folder), idle_timeout=idle_timeout)
        self._models: dict[tuple[str, str, str], ModelSpec] = {}  # those that the ranks hold once, once

    def attempt(self, message: RankRequest, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        """See ``Client``. A request to free a model is no reason to free it again."""
        if not isinstance(message, Unload):
            model = message.model
            self._models[model.path, model.stamp, model.dtype] = model
        return super().attempt(message, *args, **options)

    def settled(self) -> Status:
        """The status once nothing runs: an answer arrives before rank 0 has reported its status after it."""
        deadline = time.monotonic() + 10.0
        while (status := self.status()).state != "idle":
            assert time.monotonic() < deadline, f"the backend is {status.state} for 10 seconds"
            time.sleep(0.01)
        return status

    def free(self) -> None:
        """Free the weights on all ranks."""
        models, self._models = list(self._models.values()), {}
        held = {model.path for rank in self.status().ranks for model in rank.models} if models else set()
        for model in models:
            if os.path.abspath(model.path) in held:
                super().call(Unload(model=model))
