"""The ranks' samplers and padding against ComfyUI's own functions, with a toy denoiser."""

import comfy.k_diffusion.sampling
import comfy.ldm.common_dit
import pytest
import torch
from any_folder_name.parallel_backend.models.wan import pad_to_patch
from any_folder_name.parallel_backend.samplers.samplers import SAMPLERS, run_sampler

SIGMAS = {
    "to zero": [1.0, 0.93, 0.8, 0.55, 0.31, 0.12, 0.0],
    "stopped early": [1.0, 0.93, 0.8, 0.55, 0.31, 0.12],
    "started late": [0.62, 0.4, 0.25, 0.1, 0.0],
    "one step": [0.9, 0.0],
}


def toy(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return an x0 that depends on ``x`` and on ``sigma``, which is a scalar or per sample."""
    sigma = sigma.view(-1, *[1] * (x.ndim - 1))
    return torch.tanh(1.3 * x + 0.4) * (1.0 - 0.5 * sigma) + 0.1 * sigma


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("schedule", SIGMAS)
def test_sampler_equals_comfyui(sampler: str, schedule: str) -> None:
    sigmas = torch.tensor(SIGMAS[schedule])
    x = torch.randn(2, 4, 1, 3, 3, generator=torch.Generator().manual_seed(3))
    steps: list[tuple[int, torch.Tensor]] = []
    core_steps: list[tuple[int, torch.Tensor]] = []
    core = getattr(comfy.k_diffusion.sampling, f"sample_{sampler}")
    expected = core(toy, x, sigmas, callback=lambda s: core_steps.append((s["i"], s["denoised"])), disable=True)
    samples = run_sampler(SAMPLERS[sampler], toy, x, sigmas, lambda i, denoised: steps.append((i, denoised)))
    torch.testing.assert_close(samples, expected, rtol=1e-6, atol=1e-6)
    assert [i for i, _ in steps] == [i for i, _ in core_steps]
    for (_, denoised), (_, core_denoised) in zip(steps, core_steps, strict=True):
        torch.testing.assert_close(denoised, core_denoised, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("patch", [(1, 2, 2), (2, 2, 2), (1, 4, 4)])
@pytest.mark.parametrize("size", [(1, 4, 4), (3, 5, 7), (2, 6, 5)])
def test_padding_equals_comfyui(patch: tuple[int, int, int], size: tuple[int, int, int]) -> None:
    latent = torch.randn(2, 3, *size)
    assert torch.equal(pad_to_patch(latent, patch), comfy.ldm.common_dit.pad_to_patch_size(latent, patch))
