"""Every sampler that KSampler lists, behind Parallel Sampler on two ranks, against KSampler on ComfyUI's own model."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import comfy.k_diffusion.sampling
import comfy.samplers
import pytest
import torch
from any_folder_name.nodes.remote import preflight
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.samplers.samplers import SAMPLERS
from helpers import custom_cases
from helpers.inside_fixtures import (
    Loaded,
    empty_latent,
    ksampler,
    parallel_sampler,
    relative_error,
    run_parallel_sampler,
)  # fmt: skip
from helpers.sensitivity import CLOSE, limit

FAR = 1e-2


def errors(names: Any, ours: Callable[[str], torch.Tensor], native: Any, **options: Any) -> dict[str, str]:
    """Return the samplers whose difference is too large.

    Args:
        names: of samplers.
        ours: samples with one.
        native: ComfyUI's own model.
        options: of KSampler.
    """
    found = {}
    for name in names:
        sample = partial(ksampler, sampler_name=name, **options)
        reference = sample(native)
        error = relative_error(ours(name), reference)
        if not error < CLOSE and not error < limit(native, sample, reference):
            found[name] = f"{error:.1e}"
    return found


def test_every_sampler_of_the_list(native: Any, load_remote: Callable[..., Loaded]) -> None:
    model, loops = load_remote(ParallelLayout(ulysses=2)).model, {}

    def ours(name: str) -> torch.Tensor:
        output = run_parallel_sampler(model, empty_latent(), sampler_name=name)
        loops[name] = output.ui["text"][0]
        samples: torch.Tensor = output.args[0]["samples"]
        return samples

    names = comfy.samplers.KSampler.SAMPLERS
    assert errors(names, ours, native, latent=empty_latent()) == {}
    assert {name for name, text in loops.items() if text == "steps run in the backend's loop"} == SAMPLERS.keys()


def sample_midpoints(
    model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: dict[str, Any], **_: Any
) -> torch.Tensor:
    """Take midpoint steps in float64, as RES4LYF's samplers do: two calls a step, one of them between two sigmas."""

    def slope(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        denoised: torch.Tensor = model(x, sigma.expand(len(x)), **extra_args)
        return (x - denoised) / sigma

    x, sigmas = x.double(), sigmas.double()
    for sigma, following in pairwise(sigmas):
        middle = (sigma + following) / 2
        x = x + slope(x + slope(x, sigma) * (middle - sigma), middle) * (following - sigma)
    return x.float()


def sample_restarts(
    model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: dict[str, Any], **_: Any
) -> torch.Tensor:
    """Go down to the last sigma but one, up again with new noise, and down to the end, as restart samplers do."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(11))
    for path in (sigmas[:-1], sigmas[1:]):
        for sigma, following in pairwise(path):
            x = x + (x - model(x, sigma.expand(len(x)), **extra_args)) / sigma * (following - sigma)
        if following > 0:
            x = x + noise * (sigmas[1] - following)
    return x


@pytest.mark.parametrize("sampler", [sample_midpoints, sample_restarts])
@pytest.mark.parametrize("layout", [ParallelLayout(ulysses=2), ParallelLayout(cfg=2)], ids=str)
def test_a_sampler_of_another_pack(
    layout: ParallelLayout,
    sampler: Callable[..., torch.Tensor],
    native: Any,
    load_remote: Callable[..., Loaded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comfy.k_diffusion.sampling, "sample_theirs", sampler, raising=False)
    monkeypatch.setattr(comfy.samplers.KSampler, "SAMPLERS", [*comfy.samplers.KSampler.SAMPLERS, "theirs"])
    model, latent = load_remote(layout).model, empty_latent()
    for sample in (ksampler, parallel_sampler):
        found = partial(sample, model, latent)
        assert errors(["theirs"], lambda name, found=found: found(sampler_name=name), native, latent=latent) == {}
    assert relative_error(ksampler(native, latent, sampler_name="theirs"), ksampler(native, latent)) > FAR


def test_samples_and_a_mask_are_cut_from_the_whole_noise(native: Any, load_remote: Callable[..., Loaded]) -> None:
    model = load_remote(ParallelLayout(data=2)).model
    latent = {
        "samples": torch.randn(3, 16, 1, 6, 5, generator=torch.Generator().manual_seed(3)),
        "noise_mask": torch.linspace(0, 1, 3 * 40).view(3, 1, 40).expand(3, 48, 40),
        "batch_index": [4, 1, 2],
    }
    options = {"seed": 2**63, "denoise": 0.7}

    def ours(name: str) -> torch.Tensor:
        return parallel_sampler(model, latent, sampler_name=name, **options)

    assert errors(SAMPLERS, ours, native, latent=latent, **options) == {}


@pytest.mark.newest
@pytest.mark.parametrize("name", ["latte", "cogvideox 5b"])
def test_models_that_predict_noise_or_v(name: str, models: Path, load_remote: Callable[..., Loaded]) -> None:
    case = custom_cases.CASES[name]
    if not (models / name).exists():
        case.write(models / name)
    model = load_remote(ParallelLayout(ulysses=2), name=name).model
    options = {"positive": case.conditioning(1), "negative": case.conditioning(2, shorter=3), "steps": 4}
    latent, reference = {"samples": torch.zeros(case.latent)}, custom_cases.without_backend(models / name)

    def ours(name: str) -> torch.Tensor:
        return parallel_sampler(model, latent, sampler_name=name, **options)

    assert errors(SAMPLERS, ours, reference, latent=latent, **options) == {}


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_cfg_pp_samplers_have_both_prompts_at_a_cfg_of_1(
    native: Any, load: Callable[..., Loaded], sample: Callable[..., torch.Tensor]
) -> None:
    loaded = load(ParallelLayout(cfg=2))
    names = [name for name in comfy.samplers.KSampler.SAMPLERS if name.endswith("cfg_pp")]
    assert len(names) > 5

    def ours(name: str) -> torch.Tensor:
        return sample(loaded.model, empty_latent(), sampler_name=name, cfg=1.0)

    assert errors(names, ours, native, latent=empty_latent(), cfg=1.0) == {}
    assert {message.branches for message in loaded.client.of_kind("Forward")} == {2}


@pytest.mark.parametrize("sampler", ["euler_cfg_pp", "euler"])
def test_the_loader_knows_cfg_pp_samplers(load: Callable[..., Loaded], sampler: str) -> None:
    handle = load(ParallelLayout(cfg=2)).model.model.diffusion_model.handle
    prompt = {
        "7": {"class_type": "ParallelLoader", "inputs": {}},
        "1": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": sampler}},
        "2": {"class_type": "SamplerCustom", "inputs": {"model": ["7", 0], "sampler": ["1", 0], "cfg": 1.0}},
        "3": {"class_type": "SaveLatent", "inputs": {"samples": ["2", 0]}},
    }
    if sampler == "euler":
        with pytest.raises(InvalidRequest, match="no negative prompt"):
            preflight.check_prompt(prompt, "7", handle)
    else:
        preflight.check_prompt(prompt, "7", handle)
