"""ComfyUI's samplers that run in the backend, by ComfyUI's names."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import deterministic, stochastic, unipc
from .interface import Sampler, SamplerRun
from .noise import NoiseKind
from .stochastic import Sampling


def _as_given(sigmas: Tensor) -> Tensor:
    return sigmas


@dataclass(frozen=True, kw_only=True)
class SamplerKind:
    """A sampler before it is bound to a request.

    Attributes:
        run: takes the latent, the sigmas and ``sampling``.
        noise: what it draws.
        schedule: returns the sigmas on which it runs, from those that it is given.
    """

    run: Callable[[Tensor, Tensor, Sampling], SamplerRun]
    noise: NoiseKind = ""
    schedule: Callable[[Tensor], Tensor] = _as_given

    def bind(self, sampling: Sampling) -> Sampler:
        """Return the sampler of a request."""
        return lambda x, sigmas: self.run(x, sigmas, sampling)


def _deterministic(sampler: Sampler, schedule: Callable[[Tensor], Tensor] = _as_given) -> SamplerKind:
    return SamplerKind(run=lambda x, sigmas, sampling: sampler(x, sigmas), schedule=schedule)


SAMPLERS: dict[str, SamplerKind] = {
    "euler": _deterministic(deterministic.euler),
    "euler_ancestral": SamplerKind(run=stochastic.euler_ancestral, noise="gaussian"),
    "heun": _deterministic(deterministic.heun),
    "dpm_2": _deterministic(deterministic.dpm_2),
    "dpmpp_2m": _deterministic(deterministic.dpmpp_2m),
    "dpmpp_2m_sde": SamplerKind(run=stochastic.dpmpp_2m_sde, noise="brownian"),
    "dpmpp_2m_sde_gpu": SamplerKind(run=stochastic.dpmpp_2m_sde, noise="brownian on device"),
    "lcm": SamplerKind(run=stochastic.lcm, noise="gaussian"),
    "ipndm": _deterministic(deterministic.ipndm),
    "res_multistep": _deterministic(deterministic.res_multistep),
    "uni_pc": _deterministic(unipc.uni_pc, unipc.end_of_schedule),
    "uni_pc_bh2": _deterministic(unipc.uni_pc_bh2, unipc.end_of_schedule),
}
