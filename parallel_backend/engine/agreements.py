"""Agreements of the ranks for later requests, so that they need not ask each other again.

Every rank of a mesh, or of the world, holds the same agreements. They are added after all ranks agreed, and removed by
requests that all ranks run. Loaded models are not among them, since a rank may free its own alone.
"""

from dataclasses import dataclass, field, replace

import torch

from ..attention.kernels import Kernel
from ..distributed.mesh import Axis, RankMesh
from ..distributed.trials import Trials
from ..layout.parallel_layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class KernelKey:
    """Decides whether a rank has a kernel: its mesh, by serial number, and the kernel's task.

    Attributes:
        compiled: whether it also needs a compiler.
    """

    mesh: int
    attention: str
    dtype: torch.dtype
    head_sizes: frozenset[int]
    compiled: bool


@dataclass(frozen=True, kw_only=True)
class LayoutKey:
    """A model, by its identity, stamp and dtype, and the layout that suits roomy devices."""

    model: str
    stamp: str
    dtype: torch.dtype
    layout: ParallelLayout


@dataclass(frozen=True, kw_only=True)
class ChosenLayout:
    """The layout for requests whose tensors take at most ``work`` bytes on a rank."""

    work: int
    layout: ParallelLayout


@dataclass(frozen=True, kw_only=True)
class Agreements:
    """Agreements of the ranks.

    Attributes:
        world: all ranks.
        kernels: the attention kernel of each kind of request.
        layouts: what ``auto`` chose. The most recently used is last.
        trials: what ranks that exchange heads have tried, by the mesh's serial number.
    """

    world: Axis
    kernels: dict[KernelKey, Kernel] = field(default_factory=dict)
    layouts: dict[LayoutKey, ChosenLayout] = field(default_factory=dict)
    trials: dict[int, Trials] = field(default_factory=dict)

    def trials_of(self, mesh: RankMesh) -> Trials:
        """Return the trials of a mesh."""
        return self.trials.setdefault(mesh.serial, Trials())

    def use_layout(self, key: LayoutKey, chosen: ChosenLayout) -> None:
        """Keep what ``auto`` chose, as the most recently used."""
        self.layouts.pop(key, None)
        self.layouts[key] = chosen

    def latest_layout(self, key: LayoutKey) -> ChosenLayout | None:
        """Return the most recently used layout of the key's model, whatever layout suits roomy devices."""
        of_model = (each for other, each in reversed(self.layouts.items()) if replace(other, layout=key.layout) == key)
        return next(of_model, None)

    def forget_layouts(self, model: str) -> None:
        """Forget the layouts of a model that was unloaded: there may be more room now."""
        for key in [key for key in self.layouts if key.model == model]:
            del self.layouts[key]
