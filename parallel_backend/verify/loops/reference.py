"""Step loops with stale keys and values on one process: the algorithms that patch parallelism is held to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...denoiser.plan import split_names
from ...interfaces.family import Family
from ...interfaces.geometry import LATENT, TIMESTEP
from ...layout.parallel_layout import ParallelLayout
from ...layout.partition import Partition
from ...protocol.messages import Sample
from ...samplers.inpainting import Inpainting
from ...samplers.prediction_types import PREDICTIONS, timestep
from ...samplers.samplers import SAMPLERS, Sampler, dry
from .reference_attention import Neighbours, Patchwise

Transformer = Callable[[float], Family]
"""That of a timestep."""


class Patches:
    """A sampler for each patch of a latent. Each steps the whole latent, of which the patch's values are used.

    ``given`` is what the model is given, and in the end the latent.
    """

    def __init__(
        self, sampler: Sampler, noise: Inpainting, x: Tensor, sigmas: Tensor, owners: Tensor, count: int
    ) -> None:
        self.noise, self.owners = noise, owners
        self._steps = [sampler(x, sigmas) for _ in range(count)]
        self._asks = [next(steps) for steps in self._steps]
        self.given = noise.given(x, sigmas[0])
        self._following = [self.given] * count

    def take_up(self, unit: Sequence[int]) -> Tensor:
        """Let the model see what patches have come to; what it is given."""
        for patch in unit:
            self.given = torch.where(self.owners == patch, self._following[patch], self.given)
        return self.given

    def step(self, unit: Sequence[int], out: Tensor) -> None:
        """Step patches with a guided prediction of the whole latent."""
        for patch in unit:
            ask = self._asks[patch]
            try:
                ask = self._asks[patch] = self._steps[patch].send(self.noise.x0(ask.x, ask.sigma, out))
                self._following[patch] = self.noise.given(ask.x, ask.sigma)
            except StopIteration as end:
                self._following[patch] = end.value


@dataclass(frozen=True)
class Call:
    """What the sampler asks for at one timestep ``[B]`` of one transformer.

    Attributes:
        whole: whether it is to be on the whole latent; switched: whether the transformer is another than before.
    """

    family: Family
    time: Tensor
    whole: bool
    switched: bool


class Asked:
    """A request, and its calls with some steps of warm-up, which another transformer begins anew."""

    def __init__(self, family: Transformer, message: Sample, tensors: Mapping[str, Tensor], warmup: int) -> None:
        self.family, self.message, self.warmup = family, message, warmup
        branches, loop = split_names(tensors, message.branches)
        self.branches = branches[:1] if message.cfg == 1.0 else branches
        self.sigmas, self.log_sigmas, self.x = loop.pop("sigmas"), loop.pop("log_sigmas", None), loop.pop("x")
        self.sampler = SAMPLERS[message.sampler]
        self.noise = Inpainting(prediction=PREDICTIONS[message.prediction], inpainting=loop)
        first = family(0.0)
        shapes = {name: tuple(t.shape) for name, t in {**branches[0], LATENT: self.x, TIMESTEP: self.x[:, 0]}.items()}
        self.extent = first.extent(first.module.config, shapes)

    def calls(self) -> Iterator[Call]:
        """One after the other."""
        current, since, step = None, 0, 0
        for ask in dry(self.sampler, self.sigmas):
            step = step if ask.step is None else ask.step
            time = timestep(ask.sigma, scale=self.message.timestep_scale, log_sigmas=self.log_sigmas)
            before, current = current, self.family(float(time))
            since = step if before not in (None, current) else since
            yield Call(current, time.expand(len(self.x)), step - since < self.warmup, before is not current)

    def patches(self, owners: Tensor, count: int) -> Patches:
        """The samplers."""
        return Patches(self.sampler, self.noise, self.x, self.sigmas, owners, count)

    def guided(self, outs: Sequence[Tensor]) -> Tensor:
        """Classifier-free guidance."""
        return outs[-1] + (outs[0] - outs[-1]) * self.message.cfg if len(outs) > 1 else outs[0]


@torch.no_grad()
def pipefusion(asked: Asked, image: Partition) -> Tensor:
    """The samples of a request whose patches stream through stages."""
    every, x = range(len(image.sizes)), asked.x
    patches = asked.patches(_owners(asked.family(0.0), image, asked.extent.values, x.shape[2:]), len(every))
    predicted, models = x.new_zeros(len(x), image.total, asked.extent.values), list[Patchwise]()
    for call in asked.calls():
        models = [Patchwise(call.family, image) for _ in asked.branches] if call.switched else models
        for unit in [every] if call.whole else [range(i, i + 1) for i in every]:
            inputs = {LATENT: patches.take_up(unit), TIMESTEP: call.time}
            guided = asked.guided(
                [model({**inputs, **branch}, unit) for model, branch in zip(models, asked.branches, strict=True)]
            )
            start = image.offsets[unit[0]]
            predicted[:, start : start + guided.shape[1]] = guided
            patches.step(unit, call.family.unpatchify(predicted, x.shape[2:]))
    return patches.take_up(every)


@torch.no_grad()
def displaced(asked: Asked, layout: ParallelLayout, tokens: int) -> Tensor:
    """The samples of a request whose patches are computed side by side. ``tokens`` are those of the latent itself."""
    patches, models = asked.patches(torch.zeros(()), 1), list[Neighbours]()
    for call in asked.calls():
        models = [Neighbours(call.family, layout, tokens) for _ in asked.branches] if call.switched else models
        inputs = {LATENT: patches.take_up([0]), TIMESTEP: call.time}
        outs = [
            model({**inputs, **branch}, whole=call.whole) for model, branch in zip(models, asked.branches, strict=True)
        ]
        patches.step([0], call.family.unpatchify(asked.guided(outs), asked.x.shape[2:]))
    return patches.take_up([0])


def _owners(family: Family, image: Partition, values: int, size: Sequence[int]) -> Tensor:
    """The patch of every value of a latent, ``[1, C, ...]``."""
    of_token = torch.arange(len(image.sizes)).repeat_interleave(torch.tensor(image.sizes))
    return family.unpatchify(of_token.double().view(1, -1, 1).repeat(1, 1, values), size).abs()
