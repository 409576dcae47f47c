"""Latents in other dtypes than float32: ComfyUI converts them, and so do our nodes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, parallel_sampler, relative_error

import nodes

CONVERTED = pytest.mark.newest
"""For dtypes in which older versions of ComfyUI sample, or cannot."""


@pytest.mark.parametrize(
    "dtype", [torch.float64, *(pytest.param(each, marks=CONVERTED) for each in (torch.bfloat16, torch.int64))], ids=str
)
@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
@pytest.mark.parametrize("masked", [False, True])
def test_samplers_take_any(
    masked: bool,
    sample: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    native: Any,
    load_remote: Callable[..., Loaded],
) -> None:
    samples = 3 * torch.randn(empty_latent()["samples"].shape, generator=torch.Generator().manual_seed(1))
    latent = {"samples": samples.to(dtype)}
    if masked:
        latent["noise_mask"] = torch.ones(1, 6, 5, dtype=torch.float64).triu()
    wanted = ksampler(native, latent, denoise=0.6)
    ours = sample(load_remote().model, latent, denoise=0.6)
    assert ours.dtype == wanted.dtype == torch.float32
    assert relative_error(ours, wanted) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
def test_a_vae_takes_any(dtype: torch.dtype, load_remote: Callable[..., Loaded]) -> None:
    vae, samples = load_remote().vae, 3 * torch.randn(1, 16, 1, 4, 4)
    [pixels] = nodes.VAEDecode().decode(vae, {"samples": samples.to(dtype)})
    assert torch.equal(pixels, nodes.VAEDecode().decode(vae, {"samples": samples.to(dtype).float()})[0])
