"""Step loops with stale keys and values in one process: the reference algorithms for PipeFusion and displaced patch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_backend.denoiser.plan import split_names
from parallel_backend.interfaces.family import Family
from parallel_backend.interfaces.geometry import TIMESTEP, Shape
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.partition import Partition
from parallel_backend.protocol.messages import Sample
from parallel_backend.protocol.packing import unpack
from parallel_backend.samplers.inpainting import Inpainting
from parallel_backend.samplers.prediction_types import PREDICTIONS, timestep
from parallel_backend.step_loop.request_sampler import RequestSampler

from .reference_attention import DisplacedModel, PipeFusionModel

Transformer = Callable[[float], Family]
"""Returns the transformer for a timestep."""


class PatchSamplers:
    """One sampler per patch of a latent. Each steps the whole latent, but only its patch's values are used.

    Attributes:
        model_input: the latent as the model sees it; after the last step, the sampled latent.
        noise: scales the latent for the model, and blends inpainted parts.
        owners: index of the patch that each value of the latent belongs to.
    """

    def __init__(self, sampler: RequestSampler, noise: Inpainting, x: Tensor, owners: Tensor, count: int) -> None:
        self.noise, self.owners = noise, owners
        self._steps = [sampler.of_part(lambda whole: whole)(x, sampler.sigmas) for _ in range(count)]
        self._model_calls = [next(steps) for steps in self._steps]
        self.model_input = noise.model_input(self._model_calls[0].x, self._model_calls[0].sigma)
        self._next_inputs = [self.model_input] * count

    def refresh(self, patches: Sequence[int]) -> Tensor:
        """Replace patches of the model's input by their newest values, and return the input."""
        for patch in patches:
            self.model_input = torch.where(self.owners == patch, self._next_inputs[patch], self.model_input)
        return self.model_input

    def step(self, patches: Sequence[int], prediction: Tensor) -> None:
        """Step patches with a guided prediction of the whole latent."""
        for patch in patches:
            call = self._model_calls[patch]
            try:
                denoised = self.noise.x0(call.x, call.sigma, prediction)
                call = self._model_calls[patch] = self._steps[patch].send(denoised)
                self._next_inputs[patch] = self.noise.model_input(call.x, call.sigma)
            except StopIteration as end:
                self._next_inputs[patch] = end.value


@dataclass(frozen=True)
class Call:
    """One model call of a sampler.

    Attributes:
        family: the transformer.
        time: the timestep, ``[B]``.
        whole: whether the call is on the whole latent, as in warm-up steps.
        switched: whether the previous call, if any, was of another transformer.
    """

    family: Family
    time: Tensor
    whole: bool
    switched: bool


class LoopRequest:
    """A sampling request and its model calls. The warm-up begins again when the transformer changes.

    Attributes:
        branches: inputs of each guidance branch.
        extent: token counts of the first branch.
        x: the noised latent; several are packed.
        sizes: what ``Family.prediction`` needs.
    """

    def __init__(self, family: Transformer, message: Sample, tensors: Mapping[str, Tensor], warmup: int) -> None:
        self.family, self.message, self.warmup = family, message, warmup
        branches, loop = split_names(tensors, message.branches)
        self.branches = branches[:1] if message.cfg == 1.0 else branches
        self.sigmas, self.log_sigmas, self.x = loop.pop("sigmas"), loop.pop("log_sigmas", None), loop.pop("x")
        self.sampler = RequestSampler(message, self.sigmas, self.x.shape)
        self.noise = Inpainting(prediction=PREDICTIONS[message.prediction], inpainting=loop)
        first = family(0.0)
        self.shapes = message.latent_shapes or (tuple(self.x.shape[1:]),)
        picture, *others = self.shapes
        self.sizes: tuple[Shape, ...] = (picture[1:], *others)
        inputs = {**branches[0], **self.latents(self.x), TIMESTEP: self.x[:, 0]}
        self.extent = first.extent(first.module.config, {name: tuple(each.shape) for name, each in inputs.items()})

    def latents(self, x: Tensor) -> dict[str, Tensor]:
        """Return the latents that the model's input ``x`` holds, by their inputs' names."""
        return dict(zip(self.family(0.0).latents, unpack(x, self.shapes), strict=True))

    def calls(self) -> Iterator[Call]:
        """Yield the sampler's model calls in order."""
        current, first_step, step = None, 0, 0
        for call in self.sampler.calls():
            step = step if call.step is None else call.step
            time = timestep(call.sigma, scale=self.message.timestep_scale, log_sigmas=self.log_sigmas)
            previous, current = current, self.family(float(time))
            first_step = step if previous not in (None, current) else first_step
            yield Call(current, time.expand(len(self.x)), step - first_step < self.warmup, previous is not current)

    def patch_samplers(self, owners: Tensor, count: int) -> PatchSamplers:
        """Create the samplers; see ``PatchSamplers``."""
        return PatchSamplers(self.sampler, self.noise, self.x, owners, count)

    def guided(self, predictions: Sequence[Tensor]) -> Tensor:
        """Apply classifier-free guidance to the predictions of all branches."""
        if len(predictions) == 1:
            return predictions[0]
        return predictions[-1] + (predictions[0] - predictions[-1]) * self.message.cfg


@torch.no_grad()
def pipefusion(request: LoopRequest, image: Partition) -> Tensor:
    """Return the samples of a request whose patches stream through pipeline stages.

    Args:
        request: the request.
        image: image tokens of each patch.
    """
    every_patch, x = range(len(image.sizes)), request.x
    owners = _owners(request.family(0.0), image, request.extent.values, request.sizes)
    samplers = request.patch_samplers(owners, len(every_patch))
    predicted, models = x.new_zeros(len(x), image.total, request.extent.values), list[PipeFusionModel]()
    for call in request.calls():
        models = [PipeFusionModel(call.family, image) for _ in request.branches] if call.switched else models
        for patches in [every_patch] if call.whole else [range(i, i + 1) for i in every_patch]:
            inputs = {**request.latents(samplers.refresh(patches)), TIMESTEP: call.time}
            guided = request.guided(
                [model({**inputs, **branch}, patches) for model, branch in zip(models, request.branches, strict=True)]
            )
            start = image.offsets[patches[0]]
            predicted[:, start : start + guided.shape[1]] = guided
            samplers.step(patches, call.family.prediction(predicted, request.sizes))
    return samplers.refresh(every_patch)


@torch.no_grad()
def displaced(request: LoopRequest, layout: ParallelLayout, tokens: int) -> Tensor:
    """Return the samples of a request whose patches are computed side by side.

    Args:
        request: the request.
        layout: a displaced or naive patch layout.
        tokens: image tokens of the latent, without tokens that the family appends.
    """
    samplers, models = request.patch_samplers(torch.zeros(()), 1), list[DisplacedModel]()
    for call in request.calls():
        models = [DisplacedModel(call.family, layout, tokens) for _ in request.branches] if call.switched else models
        inputs = {**request.latents(samplers.refresh([0])), TIMESTEP: call.time}
        pairs = zip(models, request.branches, strict=True)
        predictions = [model({**inputs, **branch}, whole=call.whole) for model, branch in pairs]
        samplers.step([0], call.family.prediction(request.guided(predictions), request.sizes))
    return samplers.refresh([0])


def _owners(family: Family, image: Partition, values: int, sizes: Sequence[Shape]) -> Tensor:
    """Return the index of the patch that each value of a latent belongs to, ``[1, C, ...]``."""
    patch_of_token = torch.arange(len(image.sizes)).repeat_interleave(torch.tensor(image.sizes))
    return family.prediction(patch_of_token.double().view(1, -1, 1).repeat(1, 1, values), sizes).abs()
