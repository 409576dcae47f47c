"""UniPC, a predictor and corrector of up to third order (https://arxiv.org/abs/2302.04867).

It is ComfyUI's ``comfy/extra_samplers/uni_pc.py``: multistep, of data prediction, on the variance-preserving form of
the latent, and with its float32 formulas. At the last sigma their rounding is a few percent of a coefficient, so other
formulas for the same coefficients would give other samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import BEGINNING, ModelCall, SamplerRun, Start

LAST_SIGMA = 0.001
"""Where the schedule ends instead of at zero."""
ORDER = 3


def end_of_schedule(sigmas: Tensor) -> Tensor:
    """Return the sigmas on which UniPC runs."""
    last = sigmas[-1:]
    return torch.cat([sigmas[:-1], torch.where(last == 0, LAST_SIGMA, last)])


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """Scales of signal and noise, and half the log of their ratio's square, by sigma, ``[steps + 1]``."""

    alpha: Tensor
    std: Tensor
    half_log_snr: Tensor

    @classmethod
    def of(cls, sigmas: Tensor) -> "_Schedule":
        log_alpha = 0.5 * torch.log(1 / (sigmas * sigmas + 1))
        variance = 1.0 - torch.exp(2.0 * log_alpha)
        return cls(alpha=log_alpha.exp(), std=variance.sqrt(), half_log_snr=log_alpha - 0.5 * variance.log())


def _uni_pc(x: Tensor, sigmas: Tensor, start: Start, *, second_variant: bool) -> SamplerRun:
    """``second_variant`` is B2(h) of the paper, otherwise B1(h)."""
    sigmas = end_of_schedule(sigmas)
    schedule, steps = _Schedule.of(sigmas), len(sigmas) - 1
    order = min(ORDER, steps - 1)
    scaled = x / (1.0 + sigmas[start.step] ** 2.0) ** 0.5
    x, *past = start.history or (scaled,)
    for i in range(start.step, steps):
        update, history = None, (x, *past)
        if past:
            update = _Update(schedule, past, i, min(order, len(past), steps + 1 - i), second_variant=second_variant)
            x_next = update.predicted(x)
        else:
            x_next = x
        noised = x_next * (sigmas[i] ** 2 + 1.0) ** 0.5
        denoised = yield ModelCall(noised, sigmas[i], i, history)
        # x0 by way of the noise, as in ComfyUI: at a sigma of thousands the detour rounds off more than the difference
        # between two ways to compute the same prediction.
        denoised = (x_next - schedule.std[i] * ((noised - denoised) / sigmas[i])) / schedule.alpha[i]
        x = update.corrected(x, denoised) if update else x
        past = [denoised, *past][:ORDER]
    if order:
        x = _Update(schedule, past, steps, 1, second_variant=second_variant).predicted(x)
    return x / schedule.alpha[-1]


class _Update:
    """One step to sigma ``i``, from the latent and the x0 of the steps before it, newest first."""

    def __init__(
        self, schedule: _Schedule, past: Sequence[Tensor], i: int, order: int, *, second_variant: bool
    ) -> None:
        snr = schedule.half_log_snr
        self.order, self.newest = order, past[0]
        self.scale, self.alpha = schedule.std[i] / schedule.std[i - 1], schedule.alpha[i]
        h = snr[i] - snr[i - 1]
        ratios = [(snr[i - 1 - k] - snr[i - 1]) / h for k in range(1, order)]
        self.slopes = [(x0 - past[0]) / ratio for x0, ratio in zip(past[1:order], ratios, strict=True)]
        self.phi = (-h).expm1()
        self.step = self.phi if second_variant else -h
        self.powers = torch.stack(
            [torch.stack([*(ratio**k for ratio in ratios), snr.new_ones(())]) for k in range(order)]
        )
        self.targets, phi, factorial = [], self.phi / -h - 1, 1
        for k in range(1, order + 1):
            self.targets.append(phi * factorial / self.step)
            factorial *= k + 1
            phi = phi / -h - 1 / factorial

    def predicted(self, x: Tensor) -> Tensor:
        """The latent at sigma ``i`` without its prediction."""
        n = self.order - 1
        weights = [0.5] if n == 1 else self._solved(n)
        return self._stepped(x, self._sum(weights))

    def corrected(self, x: Tensor, denoised: Tensor) -> Tensor:
        """The latent at sigma ``i`` given its x0."""
        weights = [0.5] if self.order == 1 else self._solved(self.order)
        return self._stepped(x, self._sum(weights[:-1]) + weights[-1] * (denoised - self.newest))

    def _solved(self, n: int) -> Sequence[Tensor]:
        return torch.linalg.solve(self.powers[:n, :n], torch.stack(self.targets[:n])).unbind() if n else ()

    def _sum(self, weights: Sequence[Tensor | float]) -> Tensor:
        start = torch.zeros_like(self.newest)
        return sum((weight * slope for weight, slope in zip(weights, self.slopes, strict=True)), start)

    def _stepped(self, x: Tensor, correction: Tensor) -> Tensor:
        first_order = self.scale * x - self.alpha * self.phi * self.newest
        return first_order - self.alpha * self.step * correction


def uni_pc(x: Tensor, sigmas: Tensor, start: Start = BEGINNING) -> SamplerRun:
    """UniPC with B1(h)."""
    return _uni_pc(x, sigmas, start, second_variant=False)


def uni_pc_bh2(x: Tensor, sigmas: Tensor, start: Start = BEGINNING) -> SamplerRun:
    """UniPC with B2(h)."""
    return _uni_pc(x, sigmas, start, second_variant=True)
