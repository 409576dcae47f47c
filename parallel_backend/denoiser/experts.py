"""Checkpoints with two transformers, one for high noise and one for low (Wan 2.2 A14B), and the switch between them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..checkpoint.checkpoint import HIGH, LOW, Checkpoint
from ..interfaces.family import Family
from ..interfaces.geometry import TIMESTEP


class Experts:
    """The transformers of a checkpoint on a mesh; ``load`` gives one by its component's name."""

    def __init__(self, checkpoint: Checkpoint, load: Callable[[str], Family]) -> None:
        self._boundary, self._load = checkpoint.boundary(), load
        self._current: Family | None = None

    @property
    def current(self) -> Family:
        """The one of the last timestep, before any that for high noise."""
        self._current = self._current or self._load(HIGH)
        return self._current

    def at(self, timestep: Tensor) -> Family:
        """The one for timesteps ``[B]`` or ``[B, T]`` (0 .. 1000), which all lie on its side of the boundary.

        The switch is that of diffusers' ``WanPipeline``.
        """
        self._current = None  # so that it can make room for the other
        self._current = self._load(self.name(timestep))
        return self._current

    def name(self, timestep: Tensor) -> str:
        """The component that ``at`` would give."""
        return LOW if self._boundary is not None and bool(timestep.max() < self._boundary) else HIGH

    def needs_both(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the timesteps of a ``Forward`` ask for both transformers in one call."""
        if self._boundary is None:
            return False
        times = [tensor.flatten() for name, tensor in tensors.items() if name.endswith(f".{TIMESTEP}")]
        return bool(times) and len(torch.unique(torch.cat(times) < self._boundary)) > 1
