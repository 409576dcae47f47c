"""A client of a real backend that can free all weights that it has asked for."""

from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from any_folder_name.parallel_backend.client.client import Client
from any_folder_name.parallel_backend.protocol.endpoint import Endpoint
from any_folder_name.parallel_backend.protocol.messages import RankRequest, Unload
from any_folder_name.parallel_backend.protocol.model_spec import ModelSpec


class FreeingClient(Client):
    """A client that knows which models the ranks may hold.

    Attributes:
        all: every client that is in use.
    """

    all: ClassVar[WeakSet["FreeingClient"]] = WeakSet()

    def __init__(self, folder: Path, *, idle_timeout: float) -> None:
        super().__init__(endpoint=Endpoint(folder=folder), idle_timeout=idle_timeout)
        FreeingClient.all.add(self)
        self._models: dict[tuple[str, str, str], ModelSpec] = {}  # those that the ranks hold once, once

    def attempt(self, message: RankRequest, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        """See ``Client``. A request to free a model is no reason to free it again."""
        if not isinstance(message, Unload):
            model = message.model
            self._models[model.path, model.stamp, model.dtype] = model
        return super().attempt(message, *args, **options)

    def free(self) -> None:
        """Free the weights on all ranks."""
        while self._models:
            super().call(Unload(model=self._models.popitem()[1]))
