"""What one stage of a pipeline does with one unit of a denoiser call: a patch, or the whole latent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention.routing import Route, routed
from ..denoiser import attention_chain, stage_boundary
from ..distributed.collectives import join
from ..interfaces.family import Family
from ..interfaces.geometry import IMAGE
from ..interfaces.state import State
from ..layout.partition import Partition
from ..samplers.samplers import ModelCall
from ..strategies.patch_attention import KeyValues, PatchSplit
from ..strategies.token_split import TokenSplit, take
from .setting import Setting

Group = tuple[int, ...]
"""Branches that run as one batch."""

Unit = tuple[int, ...]
"""Patches that are computed at once: one, or all of them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A unit of a denoiser call, for branches that run as one batch.

    Attributes:
        call: its index; ``ask``: what the sampler asks for in it.
        ends: whether the branches are the last of the unit; ``last``: whether that is the call's last.
        keeps: whether keys and values are kept for a later call.
    """

    call: int
    ask: ModelCall
    unit: Unit
    group: Group
    ends: bool
    last: bool
    keeps: bool


class Stage:
    """This stage's blocks, with the keys and values that they keep.

    ``image`` is the cut of the image tokens that all branches have.
    """

    def __init__(self, setting: Setting, image: Partition) -> None:
        self.setting, self.denoiser = setting, setting.denoiser
        mesh, extents = self.denoiser.mesh, self.denoiser.plan.extents
        self.mesh, self._patches = mesh, len(image.sizes)
        self._splits = [PatchSplit.of(extent.streams, image, mesh.sequence) for extent in extents]
        self._family: tuple[int, str] | None = None
        self._forms: dict[Group, dict[str, torch.Size]] = {}
        self._forget()

    def split(self, branch: int, unit: Unit) -> TokenSplit:
        """How a unit's tokens of a branch are cut."""
        split = self._splits[branch]
        return split.whole if len(unit) == self._patches else split.each[unit[0]]

    def shapes(self, task: Task) -> dict[str, torch.Size]:
        """The streams that the stage before hands on."""
        split, rank = self.split(task.group[0], task.unit), self.mesh.sequence.index
        if task.group not in self._forms:  # which are the same in all calls
            self._forms[task.group] = stage_boundary.shapes(self._state(task, self.setting.x))
        return {
            name: torch.Size((rows, split.streams[name].sizes[rank], width))
            for name, (rows, _, width) in self._forms[task.group].items()
        }

    def run(self, task: Task, streams: Mapping[str, Tensor], given: Tensor) -> State:
        """The state after this stage's blocks, of the own tokens.

        Args:
            streams: those of the stage before; of the first stage none.
            given: what the model is given; of other stages any latent.
        """
        family, split = self.family(task), self.split(task.group[0], task.unit)
        if task.unit[0] == 0:
            self.denoiser.on_forward()
        state = split.shard(self._state(task, given))
        if streams:
            state = state.with_streams(**streams)
        elif task.unit[0]:
            tokens = family.image(self._inputs(task, given))
            state = state.with_streams(**{IMAGE: take(tokens, split.streams[IMAGE].of(split.axis.index))})
        with routed(self._seams(task, family, state)):
            return family.run(state)

    def family(self, task: Task) -> Family:
        """The transformer of a call; with another one than before, what was kept is let go of first."""
        if self._family is None or self._family[0] != task.call:
            time = self.setting.time(task.ask.sigma)
            name = self.denoiser.experts.name(time)
            if self._family is not None and self._family[1] != name:
                self._forget()
            self._family = (task.call, name)
            self.denoiser.experts.at(time)
        return self.denoiser.experts.current

    def _forget(self) -> None:
        self._states: dict[Group, tuple[int, State]] = {}
        self._memories: dict[tuple[Group, nn.Module], KeyValues] = {}
        self._routes: dict[tuple[Group, Unit, bool], list[Route]] = {}

    def _inputs(self, task: Task, given: Tensor) -> dict[str, Tensor]:
        branches = self.setting.inputs(given, task.ask.sigma)
        first = branches[task.group[0]]
        return {name: join([branches[i][name] for i in task.group]) for name in first}

    def _state(self, task: Task, given: Tensor) -> State:
        """The whole state before block 0, made once a call: of the image stream only the first patch may be used."""
        found = self._states.get(task.group)
        if found is None or found[0] != task.call:
            found = self._states[task.group] = (task.call, self.family(task).embed(self._inputs(task, given)))
        return found[1]

    def _seams(self, task: Task, family: Family, state: State) -> list[Route]:
        key = (task.group, task.unit, task.keeps)
        if key not in self._routes:
            self._routes[key] = list(self._new_seams(task, family, state))
        return self._routes[key]

    def _new_seams(self, task: Task, family: Family, state: State) -> Iterator[Route]:
        split, kernel = self._splits[task.group[0]], self.denoiser.kernel
        streams_of = {site.streams for site in family.attentions}
        if not task.keeps:
            seams = {
                names: attention_chain.attention(self.mesh, split.whole, names, state.masks, kernel)
                for names in streams_of
            }
            yield from ((site.module, seams[site.streams], site.each_sample) for site in family.attentions)
            return
        patch = None if len(task.unit) == self._patches else task.unit[0]
        kept = {names: attention_chain.whole_row(split.whole, names, state.masks) for names in streams_of}
        for site in family.attentions:
            memory = self._memories.setdefault((task.group, site.module), KeyValues())
            found = attention_chain.patch_attention(
                self.mesh, split, patch, site.streams, kept[site.streams], kernel, memory
            )
            yield site.module, found, site.each_sample
