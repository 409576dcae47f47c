"""ComfyUI's samplers that run in the backend, by ComfyUI's names."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import deterministic, stochastic, unipc
from .interface import BEGINNING, Sampler, SamplerRun, Start
from .noise import NoiseKind
from .stochastic import Sampling


def _as_given(sigmas: Tensor) -> Tensor:
    return sigmas


@dataclass(frozen=True, kw_only=True)
class SamplerKind:
    """A sampler before it is bound to a request.

    Attributes:
        run: takes the latent, the sigmas, where to begin, and what else it knows of the request.
        remembers: the most tensors in its ``ModelCall.history``.
        noise: what it draws.
        schedule: returns the sigmas on which it runs, from the given ones.
    """

    run: Callable[[Tensor, Tensor, Start, Sampling], SamplerRun]
    remembers: int = 0
    noise: NoiseKind = ""
    schedule: Callable[[Tensor], Tensor] = _as_given

    def bind(self, sampling: Sampling) -> Sampler:
        """Return the sampler of a request."""
        return lambda x, sigmas, start=BEGINNING: self.run(x, sigmas, start, sampling)


def _deterministic(
    sampler: Sampler, remembers: int = 0, schedule: Callable[[Tensor], Tensor] = _as_given
) -> SamplerKind:
    return SamplerKind(
        run=lambda x, sigmas, start, sampling: sampler(x, sigmas, start), remembers=remembers, schedule=schedule
    )


SAMPLERS: dict[str, SamplerKind] = {
    "euler": _deterministic(deterministic.euler),
    "euler_ancestral": SamplerKind(run=stochastic.euler_ancestral, noise="gaussian"),
    "heun": _deterministic(deterministic.heun),
    "dpm_2": _deterministic(deterministic.dpm_2),
    "dpmpp_2m": _deterministic(deterministic.dpmpp_2m, 1),
    "dpmpp_2m_sde": SamplerKind(run=stochastic.dpmpp_2m_sde, remembers=1, noise="brownian"),
    "dpmpp_2m_sde_gpu": SamplerKind(run=stochastic.dpmpp_2m_sde, remembers=1, noise="brownian on device"),
    "lcm": SamplerKind(run=stochastic.lcm, noise="gaussian"),
    "ipndm": _deterministic(deterministic.ipndm, 3),
    "res_multistep": _deterministic(deterministic.res_multistep, 1),
    "uni_pc": _deterministic(unipc.uni_pc, 1 + unipc.ORDER, unipc.end_of_schedule),
    "uni_pc_bh2": _deterministic(unipc.uni_pc_bh2, 1 + unipc.ORDER, unipc.end_of_schedule),
}
