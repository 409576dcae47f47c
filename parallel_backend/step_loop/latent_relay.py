"""How the latent returns from the last pipeline stage, which runs the sampler, to the first.

The last stage sends the model's next input, patch by patch; after the last call it sends the final latent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.collectives import PendingSends, Work, receive, wait_all
from ..distributed.mesh import Axis
from ..interfaces.family import Family
from ..layout.partition import Partition
from ..samplers.samplers import Sampler, SamplerRun
from .setting import Setting


@dataclass(frozen=True, kw_only=True)
class PatchElements:
    """Which values of a latent belong to which patch.

    Attributes:
        image: number of tokens, by patch.
        by_patch: flat indices into the latent of one sample, by patch.
    """

    image: Partition
    by_patch: tuple[Tensor, ...]

    @classmethod
    def of(cls, family: Family, image: Partition, values: int, size: Sequence[int]) -> "PatchElements":
        """Find where the family's ``unpatchify`` puts the ``values`` values of each token in a latent of ``size``."""
        numbers = torch.arange(image.total * values, dtype=torch.float64).view(1, image.total, values)
        token = family.unpatchify(numbers, size)[0].abs().long().flatten() // values
        by_patch = [
            ((token >= start) & (token < start + length)).nonzero()[:, 0].to(family.device)
            for start, length in zip(image.offsets, image.sizes, strict=True)
        ]
        return cls(image=image, by_patch=tuple(by_patch))


class LastStage:
    """The sending end: one sampler for each patch.

    Args:
        back: process group in which latents travel to the first stage.
        preview: whether the first sample's x0 is sent with every step.
    """

    def __init__(
        self, setting: Setting, sampler: Sampler, elements: PatchElements, back: Axis, *, preview: bool
    ) -> None:
        self.setting, self.elements, self.back, self.preview = setting, elements, back, preview
        x = setting.x.flatten(1)
        self._steps: list[SamplerRun] = [sampler(x[:, indices], setting.sigmas) for indices in elements.by_patch]
        self._calls = [next(steps) for steps in self._steps]
        self._inpainting = [setting.inpainting.select(setting.x.shape, indices) for indices in elements.by_patch]
        self._pending = PendingSends()

    def step(self, unit: Sequence[int], prediction: Tensor) -> None:
        """Give the guided prediction ``[B, C, ...]`` to the samplers of ``unit``, and send their next model inputs."""
        flat, parts, previews = prediction.flatten(1), [], []
        for patch in unit:
            call, inpainting = self._calls[patch], self._inpainting[patch]
            x0 = inpainting.x0(call.x, call.sigma, flat[:, self.elements.by_patch[patch]])
            if call.step is not None and self.preview:
                previews.append(x0[:1])
            try:
                self._calls[patch] = call = self._steps[patch].send(x0)
                parts.append(inpainting.model_input(call.x, call.sigma))
            except StopIteration as end:
                parts.append(end.value)
        message = torch.cat([part.reshape(-1) for part in (*parts, *previews)])
        self._pending.send(message, self.back, 0)

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._pending.finish()


@dataclass(frozen=True, kw_only=True)
class _Expected:
    index: int
    step: int | None
    unit: tuple[int, ...]
    flat: Tensor
    works: Sequence[Work]


class FirstStage:
    """The receiving end.

    Args:
        back: process group in which latents travel to the first stage.
        on_step: called with the index of a finished step and the preview, or the last preview known.
        preview: whether the first sample's x0 arrives with every step.

    Attributes:
        x: next input of the model, ``[B, C, ...]``; after the last call the final latent.
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
        self.x = setting.inpainting.model_input(setting.x, setting.sigmas[0]).clone(
            memory_format=torch.contiguous_format
        )
        self._shown = self.x[:1].clone()
        self._expected: deque[_Expected] = deque()

    def expect(self, index: int, step: int | None, unit: Sequence[int]) -> None:
        """Start to receive the result of a unit of call ``index``; ``step`` is the step that begins with that call."""
        rows = len(self.x) + (1 if self.preview and step is not None else 0)
        flat = self.x.new_empty(rows * sum(len(self.elements.by_patch[patch]) for patch in unit))
        works = receive(flat, self.back, self.back.size - 1)
        self._expected.append(_Expected(index=index, step=step, unit=tuple(unit), flat=flat, works=works))

    def arrive(self, index: int, patch: int) -> None:
        """Wait for the results of all earlier calls, and of call ``index`` up to ``patch``."""
        while self._expected and (self._expected[0].index, self._expected[0].unit[0]) <= (index, patch):
            self._take(self._expected.popleft())

    def finish(self) -> None:
        """Wait for all results."""
        while self._expected:
            self._take(self._expected.popleft())

    def _take(self, result: _Expected) -> None:
        wait_all(result.works)
        batch = len(self.x)
        sizes = [len(self.elements.by_patch[patch]) for patch in result.unit]
        previews = sizes if len(result.flat) > batch * sum(sizes) else []
        parts = result.flat.split([batch * size for size in sizes] + previews)
        for patch, part in zip(result.unit, parts, strict=False):
            self.x.flatten(1)[:, self.elements.by_patch[patch]] = part.view(batch, -1)
        for patch, part in zip(result.unit, parts[len(sizes) :], strict=False):
            self._shown.flatten(1)[:, self.elements.by_patch[patch]] = part.view(1, -1)
        if result.step is not None and result.unit[-1] == len(self.elements.by_patch) - 1:
            self.on_step(result.step, self._shown)
