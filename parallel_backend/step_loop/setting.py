"""What a step loop works with on this rank: its samples, the inputs and guidance of its branches."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..denoiser.denoiser import Denoiser
from ..denoiser.plan import split_names
from ..distributed.collectives import gather
from ..interfaces.geometry import LATENT, TIMESTEP
from ..layout.partition import Partition
from ..protocol.messages import Progress, Sample
from ..samplers.inpainting import Inpainting
from ..samplers.prediction_types import PREDICTIONS, timestep
from ..samplers.samplers import SAMPLERS, ModelCall, dry
from ..strategies.batch import BatchSplit
from .schedule import whole_calls

Report = Callable[[Progress, Mapping[str, Tensor]], None]


class Setting:
    """What a ``Sample`` comes to on this rank: its samples, and the inputs and guidance of its branches.

    Attributes:
        x: the noised start of the own samples; noise: what happens to it around a prediction.
    """

    def __init__(self, denoiser: Denoiser, message: Sample, tensors: Mapping[str, Tensor]) -> None:
        self.denoiser, self.message = denoiser, message
        self.samples = denoiser.samples(0)
        branches, loop = split_names(tensors, message.branches)
        self.sigmas = loop.pop("sigmas").float()
        self.log_sigmas = loop.pop("log_sigmas", None)
        own = {name: self._own(tensor).float() for name, tensor in loop.items()}
        self.x = own.pop("x")
        self.noise = Inpainting(prediction=PREDICTIONS[message.prediction], inpainting=own)
        self.conditioning = {
            i: {name: tensor[self.samples] for name, tensor in branches[i].items()} for i in denoiser.branches
        }

    def load(self) -> None:
        """Load the weights of the first step, which that does else; none on a rank without samples."""
        if len(self.x):
            self.denoiser.experts.at(self.time(self.sigmas[0]))

    def time(self, sigma: Tensor) -> Tensor:
        """The timestep of a sigma, without dims."""
        return timestep(sigma, scale=self.message.timestep_scale, log_sigmas=self.log_sigmas)

    def calls(self) -> tuple[list[ModelCall], list[bool]]:
        """What the sampler will ask for, and whether each call is to be exact in an approximate layout."""
        asks = dry(SAMPLERS[self.message.sampler], self.sigmas)
        experts = [self.denoiser.experts.name(self.time(ask.sigma)) for ask in asks]
        return asks, whole_calls([ask.step for ask in asks], experts, self.denoiser.plan.layout.warmup)

    def inputs(self, given: Tensor, sigma: Tensor) -> dict[int, dict[str, Tensor]]:
        """The inputs of the own branches, for what the model is given."""
        time = self.time(sigma).expand(len(self.x))
        return {i: {LATENT: given, TIMESTEP: time, **own} for i, own in self.conditioning.items()}

    def guided(self, own: Tensor) -> Tensor:
        """Classifier-free guidance of predictions ``[own branches, ...]``, in float32 on every rank of the group."""
        every = BatchSplit.all_branches(own, self.denoiser.mesh, self.denoiser.plan.branches).float()
        return every[0] if len(every) == 1 else every[1] + (every[0] - every[1]) * self.message.cfg

    def gather(self, own: Tensor) -> dict[str, Tensor]:
        """``samples`` on rank 0, of the own samples of the first rank of each data group; nothing on other ranks."""
        mesh, latent = self.denoiser.mesh, torch.Size(self.denoiser.plan.latents[0])
        parts = Partition.even(latent[0], mesh.layout.data)
        sizes = [0] * mesh.whole.size
        for rank in range(mesh.whole.size):
            place = mesh.layout.coordinates(rank)
            if not any(index for axis, index in place.items() if axis != "data"):
                sizes[rank] = parts.sizes[place["data"]] * latent[1:].numel()
        mine = own if sizes[mesh.whole.index] else own.reshape(-1)[:0]
        received = gather(mine, sizes, mesh.whole)
        return {"samples": torch.cat(received).view(latent)} if mesh.whole.index == 0 else {}

    def tell(self, step: int, denoised: Tensor, report: Report) -> None:
        """Report, on rank 0, that a step is done, and its x0 where previews are asked for."""
        if self.denoiser.mesh.whole.index == 0:
            preview = {"preview": first_frame(denoised).cpu()} if self.message.previews else {}
            report(Progress(phase="sampling", value=step + 1, total=len(self.sigmas) - 1), preview)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[0] == 1 < self.denoiser.plan.latents[0][0] else tensor[self.samples]


def first_frame(denoised: Tensor) -> Tensor:
    """What a preview shows: ``[1, C, H, W]`` of an image, ``[1, C, 1, H, W]`` of a video."""
    return denoised[:1] if denoised.ndim == 4 else denoised[:1, :, :1]
