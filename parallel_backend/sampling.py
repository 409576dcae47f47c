"""A whole step loop on the ranks: guidance, inpainting, progress, cancelling."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .collectives import agree, gather
from .denoiser import Denoiser
from .errors import Cancelled
from .geometry import LATENT, TIMESTEP
from .messages import Progress, Sample
from .partition import Partition
from .predictions import PREDICTIONS, timestep
from .samplers import SAMPLERS
from .strategies import BatchSplit
from .validation import split_names

Report = Callable[[Progress, Mapping[str, Tensor]], None]


class SampleLoop:
    """One ``Sample`` on this rank: its samples, for which all ranks of the group keep the same latent."""

    def __init__(
        self,
        denoiser: Denoiser,
        message: Sample,
        tensors: Mapping[str, Tensor],
        *,
        report: Report,
        cancelled: Callable[[], bool],
    ) -> None:
        self.denoiser, self.message, self.report, self.cancelled = denoiser, message, report, cancelled
        self.samples = denoiser.samples(0)
        branches, loop = split_names(tensors, message.branches)
        self.sigmas = loop.pop("sigmas").float()
        self.log_sigmas = loop.pop("log_sigmas", None)
        self.prediction = PREDICTIONS[message.prediction]
        self.loop = {name: self._own(tensor).float() for name, tensor in loop.items()}
        self.conditioning = {
            i: {name: tensor[self.samples] for name, tensor in branches[i].items()} for i in denoiser.branches
        }

    def run(self) -> dict[str, Tensor]:
        """Run all steps.

        Returns:
            ``samples`` on rank 0, nothing on other ranks.

        Raises:
            Cancelled: on all ranks alike, before the next denoiser call.
        """
        sampler = SAMPLERS[self.message.sampler]
        own = sampler(self.denoise, self.loop["x"], self.sigmas, self._on_step)
        return self._gather(own)

    def denoise(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The guided x0 at ``sigma``; with a mask, what is kept is put in before and after.

        The order is that of ComfyUI's ``KSamplerX0Inpaint`` around ``cfg_function``. Without ``noise`` what is kept
        is given to the model clean, as video models that know by the timestep what is kept are used to.
        """
        self._check_cancelled()
        mask = self.loop.get("mask")
        if mask is None:
            return self._x0(x, sigma)
        latent, noise = self.loop["latent"], self.loop.get("noise")
        kept = latent if noise is None else self.prediction.noised(sigma, noise, latent)
        denoised = self._x0(x * mask + kept * (1.0 - mask), sigma)
        return denoised * mask + latent * (1.0 - mask)

    def _x0(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.prediction.x0(x, sigma, self._guided(self.prediction.scaled(x, sigma), sigma))

    def _guided(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The prediction with classifier-free guidance, in float32 on every rank of the group.

        Guidance is applied to each rank's tokens before they are gathered, which sends half of what gathering
        both branches would.
        """
        mesh, plan = self.denoiser.mesh, self.denoiser.plan
        time = timestep(sigma, scale=self.message.timestep_scale, log_sigmas=self.log_sigmas).expand(x.shape[0])
        inputs = {i: {LATENT: x, TIMESTEP: time, **own} for i, own in self.conditioning.items()}
        own = self.denoiser.comparable(self.denoiser.shards(inputs))
        every = BatchSplit.all_branches(own, mesh, plan.branches).float()
        guided = every[0] if plan.branches == 1 else every[1] + (every[0] - every[1]) * self.message.cfg
        return self.denoiser.latent(guided)

    def _on_step(self, index: int, denoised: Tensor) -> None:
        if self.denoiser.mesh.whole.index != 0:
            return
        first = denoised[:1] if denoised.ndim == 4 else denoised[:1, :, :1]
        preview = {"preview": first.cpu()} if self.message.previews else {}
        self.report(Progress(phase="sampling", value=index + 1, total=len(self.sigmas) - 1), preview)

    def _check_cancelled(self) -> None:
        if self.sigmas.is_cuda:
            torch.cuda.current_stream().synchronize()  # else the host runs steps ahead, and a cancel comes late
        whole = self.denoiser.mesh.whole
        if agree(int(whole.index == 0 and self.cancelled()), whole):
            raise Cancelled("sampling was cancelled")

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[0] == 1 < self.denoiser.plan.latents[0][0] else tensor[self.samples]

    def _gather(self, own: Tensor) -> dict[str, Tensor]:
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
