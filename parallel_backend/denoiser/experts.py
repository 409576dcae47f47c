"""Checkpoints with two transformers, one for high noise and one for low (Wan 2.2 A14B), and the switch between them."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint
from ..interfaces.family import Family
from ..interfaces.geometry import TIMESTEP
from ..protocol.model_spec import Adapter

Load = Callable[[str, Sequence[Adapter]], Family]


class Experts:
    """The transformers of a checkpoint on one mesh.

    Args:
        load: returns the transformer of a component's name with these LoRAs, and loads it if it is not loaded.

    Attributes:
        adapters: the LoRAs that ``at`` applies.
    """

    def __init__(self, checkpoint: Checkpoint, load: Load, adapters: Sequence[Adapter] = ()) -> None:
        self._boundary, self._load, self.adapters = checkpoint.boundary(), load, adapters
        self._current: Family | None = None
        self._loaded: tuple[str, tuple[Adapter, ...]] | None = None

    @property
    def switch(self) -> bool:
        """Whether there are two transformers."""
        return self._boundary is not None

    @property
    def current(self) -> Family:
        """The transformer of the last timestep; before the first one, the transformer for high noise."""
        return self._current or self._changed_to(HIGH_NOISE)

    def at(self, timestep: Tensor) -> Family:
        """The transformer for timesteps ``[B]`` or ``[B, T]`` (0 .. 1000), which all lie on one side of the boundary.

        It switches as diffusers' ``WanPipeline`` does.
        """
        name = self.name(timestep)
        if self._current is None or self._loaded != (name, tuple(self.adapters)):
            return self._changed_to(name)
        return self._current

    def forget(self) -> None:
        """Ask for the transformer anew at the next call: another request may have freed it or changed its weights."""
        self._current = None

    def _changed_to(self, name: str) -> Family:
        self._current = None  # no reference is left, so the old one can be freed for the new one
        self._loaded = name, tuple(self.adapters)
        self._current = self._load(name, self.adapters)
        return self._current

    def name(self, timestep: Tensor) -> str:
        """The component that ``at`` returns for these timesteps."""
        return LOW_NOISE if self._boundary is not None and bool(timestep.max() < self._boundary) else HIGH_NOISE

    def needs_both(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the timesteps of one ``Forward`` lie on both sides of the boundary."""
        if self._boundary is None:
            return False
        times = [tensor.flatten() for name, tensor in tensors.items() if name.endswith(f".{TIMESTEP}")]
        return bool(times) and len(torch.unique(torch.cat(times) < self._boundary)) > 1
