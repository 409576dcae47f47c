"""Noise that samplers draw on a GPU: the numbers that ComfyUI draws there from the same seed."""

import sys
from itertools import pairwise

import pytest
import torch

from parallel_backend.samplers.noise import brownian, gaussian
from scripts import comfy_paths

SHAPE, SEED = (2, 4, 1, 5, 7), 2**63 + 7
SIGMAS = torch.tensor([0.98, 0.8, 0.55, 0.3, 0.1, 0.0])
KINDS = ("euler_ancestral", "dpmpp_2m_sde_gpu")


def ours(kind, device):
    if kind == "euler_ancestral":
        return gaussian(SHAPE, torch.device(device), SEED)
    return brownian(SHAPE, torch.device(device), SEED, SIGMAS.to(device))


def of_comfyui(kind, device):
    """ComfyUI's own noise."""
    sys.path.append(str(max(comfy_paths.candidates(), key=comfy_paths.release)))
    from comfy.k_diffusion.sampling import BrownianTreeNoiseSampler, default_noise_sampler

    x, positive = torch.zeros(SHAPE, device=device), SIGMAS[SIGMAS > 0].to(device)
    if kind == "euler_ancestral":
        return default_noise_sampler(x, seed=SEED)
    return BrownianTreeNoiseSampler(x, positive.min(), positive.max(), seed=SEED, cpu=False)


def of_torch(kind, device):
    """What ComfyUI does for its noise, in torch and torchsde alone."""
    x, positive = torch.zeros(SHAPE, device=device), SIGMAS[SIGMAS > 0]
    if kind == "euler_ancestral":
        generator = torch.Generator(device=device).manual_seed(SEED + (device == "cpu"))
        return lambda sigma, next_sigma: torch.randn(SHAPE, device=device, generator=generator)
    import torchsde

    tree = torchsde.BrownianTree(positive.min(), x, positive.max(), entropy=SEED)
    return lambda sigma, next_sigma: -tree(next_sigma.cpu(), sigma.cpu()) / (sigma - next_sigma).sqrt()


def differences(kind, device, reference):
    """The largest difference in each step, and the noise's standard deviation there."""
    sigmas = SIGMAS.to(device)
    pairs = list(pairwise(sigmas[:-1]))
    draws = [[draw(*pair) for pair in pairs] for draw in (ours(kind, device), reference(kind, device))]
    assert {noise.device.type for noise in draws[0]} == {device}
    return [(float((a - b).abs().max()), float(b.std())) for a, b in zip(*draws, strict=True)]


def check(result):
    assert len(result) == len(SIGMAS) - 2
    assert max(difference for difference, _ in result) < 1e-5, result
    assert min(deviation for _, deviation in result) > 0.5, result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reference", [of_torch, of_comfyui])
def test_a_gpu_draws_what_comfyui_draws(on_card, kind, reference):
    if reference is of_comfyui and not comfy_paths.candidates():
        pytest.skip("no ComfyUI found")
    check(on_card(differences, kind, "cuda", reference))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arithmetic_on_the_cpu(kind):
    """Shows on every machine that the comparison itself is right."""
    check(differences(kind, "cpu", of_torch))
