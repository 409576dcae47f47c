"""The latent's way from the last stage of a pipeline, which takes the sampler's steps, back to the first.

What travels is what the model is given next, patch by patch; after the last call, the latent itself.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.collectives import PendingSends, Work, receive, wait
from ..distributed.mesh import Axis
from ..interfaces.family import Family
from ..layout.partition import Partition
from ..samplers.samplers import Sampler, Steps
from .setting import Setting


@dataclass(frozen=True, kw_only=True)
class PatchElements:
    """Which values of a latent belong to a patch.

    Attributes:
        image: tokens by patch.
        by_patch: flat indices into a sample's latent.
    """

    image: Partition
    by_patch: tuple[Tensor, ...]

    @classmethod
    def of(cls, family: Family, image: Partition, values: int, size: Sequence[int]) -> "PatchElements":
        """Ask the family where the values of its tokens go."""
        places = torch.arange(image.total * values, dtype=torch.float64).view(1, image.total, values)
        token = family.unpatchify(places, size)[0].abs().long().flatten() // values
        by_patch = [
            ((token >= start) & (token < start + length)).nonzero()[:, 0].to(family.device)
            for start, length in zip(image.offsets, image.sizes, strict=True)
        ]
        return cls(image=image, by_patch=tuple(by_patch))

    def of_unit(self, unit: Sequence[int]) -> Tensor:
        """Those of several patches, one after the other."""
        return torch.cat([self.by_patch[patch] for patch in unit])


class LastStage:
    """The last stage's end: a sampler for each patch.

    ``preview`` says whether the first sample's x0 goes along with every step.
    """

    def __init__(
        self, setting: Setting, sampler: Sampler, elements: PatchElements, back: Axis, *, preview: bool
    ) -> None:
        self.setting, self.elements, self.back, self.preview = setting, elements, back, preview
        x = setting.x.flatten(1)
        self._steps: list[Steps] = [sampler(x[:, own], setting.sigmas) for own in elements.by_patch]
        self._asks = [next(steps) for steps in self._steps]
        self._noise = [setting.noise.part(setting.x.shape, own) for own in elements.by_patch]
        self._leaving = PendingSends()

    def step(self, unit: Sequence[int], out: Tensor) -> None:
        """Answer the samplers of some patches with the guided prediction ``[B, C, ...]``, and send what they ask."""
        flat, parts, shown = out.flatten(1), [], []
        for patch in unit:
            ask, noise = self._asks[patch], self._noise[patch]
            x0 = noise.x0(ask.x, ask.sigma, flat[:, self.elements.by_patch[patch]])
            if ask.step is not None and self.preview:
                shown.append(x0[:1])
            try:
                self._asks[patch] = ask = self._steps[patch].send(x0)
                parts.append(noise.given(ask.x, ask.sigma))
            except StopIteration as end:
                parts.append(end.value)
        whole = torch.cat([part.reshape(-1) for part in (*parts, *shown)])
        self._leaving.send(whole, self.back, 0)

    def finish(self) -> None:
        """Wait until all has left."""
        self._leaving.finish()


@dataclass(frozen=True, kw_only=True)
class _Expected:
    call: int
    step: int | None
    unit: tuple[int, ...]
    flat: Tensor
    works: Sequence[Work]


class FirstStage:
    """The first stage's end.

    Attributes:
        x: what the model is given next, ``[B, C, ...]``; in the end the latent.
    """

    def __init__(
        self,
        setting: Setting,
        elements: PatchElements,
        back: Axis,
        on_step: Callable[[int, Tensor], None],
        *,
        preview: bool,
    ) -> None:
        self.elements, self.back, self.on_step, self.preview = elements, back, on_step, preview
        self.x = setting.noise.given(setting.x, setting.sigmas[0]).clone(memory_format=torch.contiguous_format)
        self._shown = self.x[:1].clone()
        self._expected: deque[_Expected] = deque()

    def expect(self, call: int, step: int | None, unit: Sequence[int]) -> None:
        """Start to receive what comes of a unit of a call, whose first look at a step it may be."""
        rows = len(self.x) + (1 if self.preview and step is not None else 0)
        flat = self.x.new_empty(rows * sum(len(self.elements.by_patch[patch]) for patch in unit))
        works = receive(flat, self.back, self.back.size - 1)
        self._expected.append(_Expected(call=call, step=step, unit=tuple(unit), flat=flat, works=works))

    def arrive(self, call: int, patch: int) -> None:
        """Wait for what came of a call up to a patch, and of all calls before."""
        while self._expected and (self._expected[0].call, self._expected[0].unit[0]) <= (call, patch):
            self._take(self._expected.popleft())

    def finish(self) -> None:
        """Wait for all."""
        while self._expected:
            self._take(self._expected.popleft())

    def _take(self, one: _Expected) -> None:
        wait(one.works)
        batch = len(self.x)
        sizes = [len(self.elements.by_patch[patch]) for patch in one.unit]
        shown = sizes if len(one.flat) > batch * sum(sizes) else []
        parts = one.flat.split([batch * size for size in sizes] + shown)
        for patch, part in zip(one.unit, parts, strict=False):
            self.x.flatten(1)[:, self.elements.by_patch[patch]] = part.view(batch, -1)
        for patch, part in zip(one.unit, parts[len(sizes) :], strict=False):
            self._shown.flatten(1)[:, self.elements.by_patch[patch]] = part.view(1, -1)
        if one.step is not None and one.unit[-1] == len(self.elements.by_patch) - 1:
            self.on_step(one.step, self._shown)
