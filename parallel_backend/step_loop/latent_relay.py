"""How the latent returns from the last pipeline stage, which runs the sampler, to the first.

The last stage sends the sampler's next latent unit by unit, and the first makes the model's input of it. A unit is one
patch, or all patches in a call on the whole latent. After the last call it sends the final latent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.collectives import PendingSends, Work, receive, wait_all
from ..distributed.mesh import Axis
from ..interfaces.family import Family
from ..interfaces.geometry import Shape
from ..layout.partition import Partition
from ..samplers.interface import SamplerRun
from .sampling_context import SamplingContext


@dataclass(frozen=True, kw_only=True)
class PatchIndices:
    """Which values of a latent belong to which patch.

    Attributes:
        tokens: the image tokens of each patch.
        indices_by_patch: flat indices into the latent of one sample, by patch.
    """

    tokens: Partition
    indices_by_patch: tuple[Tensor, ...]

    @classmethod
    def of(cls, family: Family, tokens: Partition, values_per_token: int, sizes: Sequence[Shape]) -> "PatchIndices":
        """Find which latent positions hold each patch's tokens, by running ``prediction`` on numbered values.

        ``sizes`` are those that ``prediction`` needs.
        """
        # Predict running numbers to see where each value lands. abs(): some families negate. float64: exact for
        # large indices.
        value_ids = torch.arange(tokens.total * values_per_token, dtype=torch.float64)
        value_ids = value_ids.view(1, tokens.total, values_per_token)
        token_ids = family.prediction(value_ids, sizes)[0].abs().long().flatten() // values_per_token
        indices_by_patch = [
            ((token_ids >= start) & (token_ids < start + length)).nonzero()[:, 0].to(family.device)
            for start, length in zip(tokens.offsets, tokens.sizes, strict=True)
        ]
        return cls(tokens=tokens, indices_by_patch=tuple(indices_by_patch))


class LastStage:
    """The sending end: one sampler for each patch.

    Args:
        return_axis: axis over which the last stage sends latents to the first.
        preview: whether the first sample's x0 is sent with every step.
    """

    def __init__(self, setting: SamplingContext, patches: PatchIndices, return_axis: Axis, *, preview: bool) -> None:
        self.setting, self.return_axis, self.preview = setting, return_axis, preview
        self.indices_by_patch = patches.indices_by_patch
        self._steps: list[SamplerRun] = [setting.part(indices) for indices in self.indices_by_patch]
        self._calls = [next(steps) for steps in self._steps]
        self._inpainting = [setting.inpainting.select(setting.x.shape, indices) for indices in self.indices_by_patch]
        self._pending = PendingSends()

    def step(self, unit: Sequence[int], prediction: Tensor) -> None:
        """Advance the samplers of the patches in ``unit`` with the guided prediction ``[B, C, ...]``.

        Send their next noised latents (or final latents) and previews.
        """
        flat, parts, previews = prediction.flatten(1), [], []
        for patch in unit:
            call, indices = self._calls[patch], self.indices_by_patch[patch]
            x0 = self.setting.x0(call.x, call.sigma, flat[:, indices], (self._inpainting[patch], indices))
            if call.step is not None and self.preview:
                previews.append(x0[:1])
            try:
                self._calls[patch] = call = self._steps[patch].send(x0)
                parts.append(call.x)
            except StopIteration as end:
                parts.append(end.value)
        message = torch.cat([part.reshape(-1) for part in (*parts, *previews)])
        self._pending.send(message, self.return_axis, 0)

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._pending.finish()


@dataclass(frozen=True, kw_only=True)
class _PendingReceive:
    """A receive in flight.

    Attributes:
        index: the call whose result is received.
        unit: the patches.
        flat: batch x values of the unit's patches, then the preview's if there is one.
        pending: the operations to wait for.
    """

    index: int
    unit: tuple[int, ...]
    flat: Tensor
    pending: Sequence[Work]


class FirstStage:
    """The receiving end.

    Args:
        sigmas: of all calls.
        return_axis: axis over which the last stage sends latents to the first.
        on_call: called with the index of a finished call and the first sample's x0 of the step's first call, or, with
            ``preview=False``, the initial model input (``[1, C, ...]``).
        preview: whether the first sample's x0 arrives with every step.

    Attributes:
        x: next input of the model, ``[B, C, ...]``; after the last call the final latent.
        noised: the noised latent that it is made of.
    """

    def __init__(
        self,
        setting: SamplingContext,
        patches: PatchIndices,
        sigmas: Sequence[Tensor],
        return_axis: Axis,
        on_call: Callable[[int, Tensor], None],
        *,
        preview: bool,
    ) -> None:
        self.indices_by_patch, self.return_axis = patches.indices_by_patch, return_axis
        self.on_call, self.preview = on_call, preview
        call = setting.first_call()
        self.noised = call.x.clone(memory_format=torch.contiguous_format)
        self.x = setting.inpainting.model_input(call.x, call.sigma).clone(memory_format=torch.contiguous_format)
        self._sigmas = sigmas
        self._inpainting = [setting.inpainting.select(setting.x.shape, indices) for indices in self.indices_by_patch]
        self._preview = self.x[:1].clone()
        self._receives: deque[_PendingReceive] = deque()

    def expect(self, index: int, unit: Sequence[int], *, begins_step: bool) -> None:
        """Start to receive the result of a unit of call ``index``."""
        rows = len(self.x) + (1 if self.preview and begins_step else 0)
        flat = self.x.new_empty(rows * sum(len(self.indices_by_patch[patch]) for patch in unit))
        pending = receive(flat, self.return_axis, self.return_axis.size - 1)
        self._receives.append(_PendingReceive(index=index, unit=tuple(unit), flat=flat, pending=pending))

    def wait_until(self, index: int, patch: int) -> None:
        """Wait for the results of all earlier calls, and of call ``index`` up to ``patch``."""
        while self._receives and (self._receives[0].index, self._receives[0].unit[0]) <= (index, patch):
            self._store(self._receives.popleft())

    def finish(self) -> None:
        """Wait for all results."""
        while self._receives:
            self._store(self._receives.popleft())

    def _store(self, result: _PendingReceive) -> None:
        wait_all(result.pending)
        batch = len(self.x)
        sizes = [len(self.indices_by_patch[patch]) for patch in result.unit]
        previews = sizes if len(result.flat) > batch * sum(sizes) else []
        parts = result.flat.split([batch * size for size in sizes] + previews)
        following = result.index + 1
        for patch, part in zip(result.unit, parts, strict=False):
            noised, indices = part.view(batch, -1), self.indices_by_patch[patch]
            self.noised.flatten(1)[:, indices] = noised
            if following < len(self._sigmas):
                noised = self._inpainting[patch].model_input(noised, self._sigmas[following])
            self.x.flatten(1)[:, indices] = noised
        for patch, part in zip(result.unit, parts[len(sizes) :], strict=False):
            self._preview.flatten(1)[:, self.indices_by_patch[patch]] = part.view(1, -1)
        if result.unit[-1] == len(self.indices_by_patch) - 1:
            self.on_call(result.index, self._preview)
