"""What one pipeline stage computes: its blocks, on one patch of the latent or on the whole latent."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.routing import Route, routed
from ..denoiser import stage_boundary
from ..denoiser.attention_views import CachedView, FullView
from ..interfaces.family import Family
from ..interfaces.geometry import IMAGE
from ..interfaces.state import State
from ..layout.partition import Partition
from ..samplers.interface import ModelCall
from ..strategies.patch_attention import PatchSplit
from ..strategies.token_split import TokenSplit, take_slices
from .sampling_context import SamplingContext

Group = tuple[int, ...]
"""Branches that run as one batch."""

Unit = tuple[int, ...]
"""Patches that run at once: one patch, or all of them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One unit of a denoiser call, for one group of branches.

    Attributes:
        index: index of the denoiser call.
        call: what the sampler asks for in that call.
        ends_unit: whether this is the last group of the unit.
        ends_call: whether this is the last task of the call.
        caches: whether keys and values are kept for a later call.
    """

    index: int
    call: ModelCall
    unit: Unit
    group: Group
    ends_unit: bool
    ends_call: bool
    caches: bool


class Stage:
    """This stage's blocks, with the keys and values that they cache.

    Args:
        image: sizes of the patches, in image tokens that all branches have.
    """

    def __init__(self, setting: SamplingContext, image: Partition) -> None:
        self.setting, self.denoiser = setting, setting.denoiser
        mesh, extents = self.denoiser.mesh, self.denoiser.plan.extents
        self.mesh, self._patches = mesh, len(image.sizes)
        self._splits = [PatchSplit.of(extent.streams, image, mesh.sequence, extent.whole) for extent in extents]
        self._full_view = FullView(mesh, [split.whole for split in self._splits])
        self._family: tuple[int, str] | None = None
        self._shapes: dict[Group, dict[str, torch.Size]] = {}
        self._forget()

    def split(self, branch: int, unit: Unit) -> TokenSplit:
        """How the ranks of the sequence split the tokens of a unit."""
        split = self._splits[branch]
        return split.whole if len(unit) == self._patches else split.each[unit[0]]

    def shapes(self, task: Task) -> dict[str, torch.Size]:
        """Shapes of the streams that the previous stage sends for a task."""
        split = self.split(task.group[0], task.unit)
        if task.group not in self._shapes:  # equal in all calls
            self._shapes[task.group] = stage_boundary.shapes(self._state(task, self.setting.x))
        return {
            name: torch.Size((rows, split.held(name), width))
            for name, (rows, _, width) in self._shapes[task.group].items()
        }

    def run(self, task: Task, streams: Mapping[str, Tensor], latent: Tensor) -> State:
        """The state of this rank's tokens after this stage's blocks.

        Args:
            streams: streams from the previous stage; empty on the first stage.
            latent: input latent of the model. Stages after the first need its shape only.
        """
        family, split = self.family(task), self.split(task.group[0], task.unit)
        if task.unit[0] == 0:
            self.denoiser.on_forward()
        state = split.shard(self._state(task, latent))
        if streams:
            state = state.with_streams(**streams)
        elif task.unit[0]:
            tokens = family.image(self._inputs(task, latent))
            state = state.with_streams(**{IMAGE: take_slices(tokens, split.streams[IMAGE].of(split.axis.index))})
        with routed(self._routes_of(task, family, state)):
            return family.run(state)

    def family(self, task: Task) -> Family:
        """The transformer of a call. Caches of another transformer are released first."""
        if self._family is None or self._family[0] != task.index:
            time = self.setting.time(task.call.sigma)
            name = self.denoiser.experts.name(time)
            if self._family is not None and self._family[1] != name:
                self._forget()
            self._family = (task.index, name)
            self.denoiser.experts.at(time)
        return self.denoiser.experts.current

    def _forget(self) -> None:
        self._states: dict[Group, tuple[int, State]] = {}
        self._cached_view = CachedView(self.mesh, self._splits)
        self._routes: dict[tuple[Group, Unit, bool], list[Route]] = {}

    def _inputs(self, task: Task, latent: Tensor) -> Mapping[str, Tensor]:
        branches = self.setting.inputs(latent, task.call.sigma)
        return self.denoiser.joined([branches[i] for i in task.group])

    def _state(self, task: Task, latent: Tensor) -> State:
        """The whole state before block 0, computed once a call, when only the first patch of the latent is new."""
        known = self._states.get(task.group)
        if known is None or known[0] != task.index:
            state = self.denoiser.embed(self.family(task), self._inputs(task, latent))
            known = self._states[task.group] = (task.index, state)
        return known[1]

    def _routes_of(self, task: Task, family: Family, state: State) -> list[Route]:
        """Where attention goes in a task; equal in all calls, so built once."""
        key = (task.group, task.unit, task.caches)
        if key not in self._routes:
            branch, kernel = task.group[0], self.denoiser.kernel
            if task.caches:
                patch = None if len(task.unit) == self._patches else task.unit[0]
                self._routes[key] = self._cached_view.routes(family, branch, state, kernel, patch)
            else:
                self._routes[key] = self._full_view.routes(family, branch, state, kernel)
        return self._routes[key]
