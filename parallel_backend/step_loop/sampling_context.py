"""What every step loop needs on this rank: sigmas, samples, conditioning, guidance."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..denoiser.denoiser import Denoiser
from ..denoiser.plan import split_names
from ..distributed.collectives import gather
from ..interfaces.geometry import TIMESTEP
from ..progress import PROGRESS
from ..protocol.messages import HISTORY, KEPT, Progress, Sample
from ..protocol.packing import unpack
from ..samplers.inpainting import Inpainting
from ..samplers.interface import Denoise, ModelCall, OnStep, SamplerRun, Start, run_sampler
from ..samplers.prediction_types import PREDICTIONS, timestep
from ..strategies.batch import BatchSplit
from .request_sampler import RequestSampler
from .schedule import whole_calls

Report = Callable[[Progress, Mapping[str, Tensor]], None]
"""Takes progress, and tensors that go with it: a preview, and what another request needs to go on after this step."""


class SamplingContext:
    """One ``Sample`` request on this rank.

    Attributes:
        x: noised latent of this rank's samples with which the first step begins.
        start: where the sampler begins.
        inpainting: what happens to the latent before and after each prediction.
        conditioning: inputs of this rank's samples beside latent and timestep, by branch.
    """

    def __init__(self, denoiser: Denoiser, message: Sample, tensors: Mapping[str, Tensor]) -> None:
        self.denoiser, self.message = denoiser, message
        self.samples = denoiser.samples[0]
        branches, loop = split_names(tensors, message.branches)
        self.sigmas = loop.pop("sigmas").float()
        self.log_sigmas = loop.pop("log_sigmas", None)
        local = {name: self._local(tensor).float() for name, tensor in loop.items()}
        self.x = local.pop("x")
        history = sorted(name for name in local if name.startswith(HISTORY))
        self.start = Start(step=message.first_step, history=tuple(local.pop(name) for name in history))
        self._sampler = RequestSampler(message, self.sigmas, denoiser.plan.whole_latent)
        self.inpainting = Inpainting(prediction=PREDICTIONS[message.prediction], inpainting=local)
        self.conditioning = {i: denoiser.own(i, branches[i]) for i in denoiser.branches}

    def load(self) -> None:
        """Load the weights of the first step, now instead of lazily. A rank without samples loads none."""
        if len(self.x):
            self.denoiser.experts.at(self.time(self.first_call().sigma))

    def time(self, sigma: Tensor) -> Tensor:
        """The timestep of a sigma, as a 0-dim tensor."""
        return timestep(sigma, scale=self.message.timestep_scale, log_sigmas=self.log_sigmas)

    def calls(self) -> tuple[list[ModelCall], list[bool]]:
        """All calls that the sampler will make, and which of them are exact even in an approximate layout."""
        calls = self._sampler.calls()
        experts = [self.denoiser.experts.name(self.time(call.sigma)) for call in calls]
        return calls, whole_calls([call.step for call in calls], experts, self.denoiser.plan.layout.warmup)

    def run(self, denoise: Denoise, on_step: OnStep) -> Tensor:
        """Run the sampler on this rank's samples, answering its calls with ``denoise``; return the final latent."""
        sampler = self._sampler.of_part(lambda whole: whole[self.samples])
        return run_sampler(sampler, denoise, self.x, self.sigmas, on_step, self.start)

    def part(self, elements: Tensor) -> SamplerRun:
        """The sampler's run on some elements of this rank's samples (flat indices into a sample)."""

        def select(samples: Tensor) -> Tensor:
            return samples.flatten(1)[:, elements]

        sampler = self._sampler.of_part(lambda whole: select(whole[self.samples]))
        start = replace(self.start, history=tuple(map(select, self.start.history)))
        return sampler(select(self.x), self.sigmas, start)

    def first_call(self) -> ModelCall:
        """The first call of the sampler on this rank's samples."""
        return self._sampler.first_call(self.x, self.start)

    def inputs(self, latent: Tensor, sigma: Tensor) -> dict[int, dict[str, Tensor]]:
        """All inputs of this rank's branches, for one input latent of the model."""
        time = self.time(sigma).expand(len(self.x))
        plan = self.denoiser.plan
        latents = dict(zip(plan.latents[0], unpack(latent, plan.shapes()), strict=True))
        return {i: {**latents, TIMESTEP: time, **inputs} for i, inputs in self.conditioning.items()}

    def guided(self, local: Tensor) -> Tensor:
        """Apply classifier-free guidance to predictions ``[local branches, ...]``, in float32."""
        branches = BatchSplit.all_branches(local, self.denoiser.mesh, self.denoiser.plan.branches).float()
        return branches[0] if len(branches) == 1 else branches[1] + (branches[0] - branches[1]) * self.message.cfg

    def x0(self, x: Tensor, sigma: Tensor, out: Tensor, part: tuple[Inpainting, Tensor] | None = None) -> Tensor:
        """The denoised latent, from the noised latent ``x`` and the guided prediction for it.

        Args:
            part: flat indices into a sample if ``x`` and ``out`` are ``[B, indices]``, and the inpainting of these.
        """
        inpainting, elements = part or (self.inpainting, None)
        factors = self._followed(sigma)
        if factors is not None:
            of_out, of_input = (each if elements is None else each[:, elements] for each in factors)
            model_input = inpainting.model_input(x, sigma)
            # A patch of references alone has no element, of which no size could be inferred.
            out = of_out.view(out.shape) * out + of_input.view(out.shape) * model_input
        return inpainting.x0(x, sigma, out)

    def _followed(self, sigma: Tensor) -> tuple[Tensor, Tensor] | None:
        """See ``Family.followed``."""
        shapes = self.denoiser.plan.shapes()
        if len(shapes) == 1:
            return None
        inputs = next(iter(self.inputs(self.x, sigma).values()))
        return self.denoiser.experts.current.followed(inputs, shapes)

    def gather(self, local: Tensor) -> dict[str, Tensor]:
        """``samples`` of all data groups on rank 0; empty on other ranks. The first rank of each group sends."""
        mesh, latent = self.denoiser.mesh, torch.Size(self.denoiser.plan.whole_latent)
        parts = mesh.split.samples(latent[0])
        sizes = [0] * mesh.all_ranks.size
        for rank in range(mesh.all_ranks.size):
            place = mesh.layout.coordinates(rank)
            if not any(index for axis, index in place.items() if axis != "data"):
                sizes[rank] = parts.sizes[place["data"]] * latent[1:].numel()
        sent = local if sizes[mesh.all_ranks.index] else local.reshape(-1)[:0]
        received = gather(sent, sizes, mesh.all_ranks)
        return {"samples": torch.cat(received).view(latent)} if mesh.all_ranks.index == 0 else {}

    def kept(self, call: ModelCall) -> dict[str, Tensor]:
        """On rank 0, what another request needs to begin with this call, by name; empty on other ranks.

        Collective with data groups, for the first rank of each.
        """
        tensors = {f"{KEPT}x": call.x, **{f"{KEPT}{HISTORY}{i}": tensor for i, tensor in enumerate(call.history)}}
        mesh, latent = self.denoiser.mesh, torch.Size(self.denoiser.plan.whole_latent)
        if any(index for axis, index in mesh.layout.coordinates(mesh.all_ranks.index).items() if axis != "data"):
            return {}
        if mesh.layout.data == 1:
            return tensors
        sizes = [samples * latent[1:].numel() for samples in mesh.split.samples(latent[0]).sizes]
        gathered = {name: gather(tensor, sizes, mesh.axes["data"]) for name, tensor in tensors.items()}
        if mesh.all_ranks.index:
            return {}
        return {name: torch.cat(parts).view(latent) for name, parts in gathered.items()}

    def report_step(self, step: int, denoised: Tensor, kept: Mapping[str, Tensor], report: Report) -> None:
        """Count a step that is done. Rank 0 reports it, with a preview of its x0 if the request asks for previews."""
        PROGRESS.step(step + 1, len(self.sigmas) - 1)
        if self.denoiser.mesh.all_ranks.index == 0:
            picture = unpack(denoised, self.denoiser.plan.shapes())[0]
            preview = {"preview": first_frame(picture)} if self.message.previews else {}
            extra = {name: tensor.cpu() for name, tensor in (preview | dict(kept)).items()}
            report(Progress(phase="sampling", value=step + 1, total=len(self.sigmas) - 1), extra)

    def _local(self, tensor: Tensor) -> Tensor:
        """This rank's samples of a tensor; the whole tensor if it broadcasts over the batch."""
        broadcasts = tensor.shape[0] == 1 < self.denoiser.plan.samples[0]
        return tensor if broadcasts else tensor[self.samples]


def first_frame(denoised: Tensor) -> Tensor:
    """The part of a latent that a preview shows: ``[1, C, H, W]`` of an image, ``[1, C, 1, H, W]`` of a video."""
    return denoised[:1] if denoised.ndim == 4 else denoised[:1, :, :1]
