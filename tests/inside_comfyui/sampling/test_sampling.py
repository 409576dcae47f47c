"""Native nodes and Parallel Sampler on our MODEL against ComfyUI alone."""

from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.model_sampling
import pytest
import torch
from any_folder_name.nodes.sampler import ParallelSampler
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.samplers.samplers import SAMPLERS
from comfy.controlnet import ControlBase
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from helpers.inside_fixtures import Loaded, conditioning, empty_latent, ksampler, parallel_sampler, relative_error

import nodes as core_nodes

CLOSE = 1e-4


@pytest.mark.parametrize(
    ("sampler", "scheduler"), [("euler", "simple"), ("uni_pc", "normal"), ("dpmpp_2m", "beta"), ("dpmpp_sde", "karras")]
)
def test_ksampler_equals_comfyui(native: Any, loaded: Loaded, sampler: str, scheduler: str) -> None:
    options = {"sampler_name": sampler, "scheduler": scheduler}
    reference = ksampler(native, empty_latent(batch=2, frames=3), **options)
    assert relative_error(ksampler(loaded.model, empty_latent(batch=2, frames=3), **options), reference) < CLOSE


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_parallel_sampler_equals_comfyui(native: Any, loaded: Loaded, sampler: str) -> None:
    reference = ksampler(native, empty_latent(batch=2), sampler_name=sampler)
    ours = parallel_sampler(loaded.model, empty_latent(batch=2), sampler_name=sampler)
    assert relative_error(ours, reference) < CLOSE
    assert [type(message).__name__ for message, _ in loaded.client.requests] == ["Sample"]


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
@pytest.mark.parametrize(
    "options",
    [
        {"cfg": 1.0},
        {"denoise": 0.5},
        {"denoise": 0.0},
        {"positive": conditioning(1, length=20), "negative": conditioning(2, length=7)},
    ],
    ids=["cfg 1", "denoise", "no denoise", "prompts of different length"],
)
def test_options_of_ksampler(native: Any, loaded: Loaded, sample: Callable[..., Any], options: dict[str, Any]) -> None:
    latent = {"samples": torch.randn(1, 16, 2, 6, 6, generator=torch.Generator().manual_seed(3))}
    assert relative_error(sample(loaded.model, latent, **options), ksampler(native, latent, **options)) < CLOSE


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_inpainting_and_batch_index(native: Any, loaded: Loaded, sample: Callable[..., Any]) -> None:
    latent = {
        "samples": torch.randn(2, 16, 1, 6, 6, generator=torch.Generator().manual_seed(3)),
        "noise_mask": torch.cat([torch.ones(1, 48, 24), torch.zeros(1, 48, 24)], dim=2),
        "batch_index": [4, 1],
    }
    assert relative_error(sample(loaded.model, latent), ksampler(native, latent)) < CLOSE


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_model_sampling_sd3_is_applied(native: Any, loaded: Loaded, sample: Callable[..., Any]) -> None:
    (native_shifted,), (shifted,) = (ModelSamplingSD3().patch(model, 2.0) for model in (native, loaded.model))
    reference = ksampler(native_shifted, empty_latent())
    plain = sample(loaded.model, empty_latent())
    assert relative_error(sample(shifted, empty_latent()), reference) < CLOSE
    assert relative_error(plain, reference) > CLOSE
    assert relative_error(sample(loaded.model, empty_latent()), plain) == 0


@pytest.mark.parametrize("free", [None, 0])
@pytest.mark.parametrize("length", [12, 20])
def test_cond_and_uncond_reach_the_backend_together(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch, free: int | None, length: int
) -> None:
    if free is not None:
        monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *args, **kwargs: free)
    loaded = load(ParallelLayout(cfg=2))
    ksampler(loaded.model, empty_latent(), positive=conditioning(1, length=length), steps=4)
    assert [message.branches for message in loaded.client.of_kind("Forward")] == [2] * 4


def test_a_cfg_layout_continues_after_the_negative_prompt_ends(native: Any, load: Callable[..., Loaded]) -> None:
    loaded = load(ParallelLayout(cfg=2))
    (ending,) = core_nodes.ConditioningSetTimestepRange().set_range(conditioning(2), 0.0, 0.5)
    reference = ksampler(native, empty_latent(), negative=ending, steps=4)
    assert relative_error(ksampler(loaded.model, empty_latent(), negative=ending, steps=4), reference) < CLOSE
    requests = [(message.branches, message.model.layout.cfg) for message in loaded.client.of_kind("Forward")]
    assert requests[0] == (2, 2)
    assert requests[-1] == (1, 1)
    assert len(requests) == 4


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_cfg_layout_without_guidance_is_refused(load: Callable[..., Loaded], sample: Callable[..., Any]) -> None:
    loaded = load(ParallelLayout(cfg=2))
    with pytest.raises(InvalidRequest, match=r"layout cfg=2 .* raise the sampler.s cfg"):
        sample(loaded.model, empty_latent(), cfg=1.0)
    assert not loaded.client.work


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_latents_are_checked_before_anything_is_sent(loaded: Loaded, sample: Callable[..., Any]) -> None:
    nan = {"samples": torch.full((1, 16, 1, 6, 6), torch.nan)}
    for latent, message in (({"samples": torch.ones(1, 4, 1, 6, 6)}, "has 4 channels .* on 16"), (nan, "NaN")):
        with pytest.raises(InvalidRequest, match=message):
            sample(loaded.model, latent)
    assert not loaded.client.work


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_an_empty_latent_of_another_model_is_converted(loaded: Loaded, sample: Callable[..., Any]) -> None:
    assert sample(loaded.model, {"samples": torch.zeros(1, 4, 6, 6)}).shape == (1, 16, 1, 6, 6)


def test_an_empty_latent_of_another_size_is_resized_as_in_comfyui(native: Any, loaded: Loaded) -> None:
    ratios = {"downscale_ratio_spacial": 16, "downscale_ratio_temporal": 8}
    latent = {"samples": torch.zeros(1, 4, 3, 3), "type": "other", **ratios}
    prompts = {"positive": conditioning(1), "negative": conditioning(2)}
    options = {"seed": 5, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    (reference,) = core_nodes.KSampler().sample(model=native, latent_image=latent, **prompts, **options)
    (ours,) = ParallelSampler.execute(model=loaded.model, latent_image=latent, **prompts, **options).args
    assert ours.keys() == reference.keys()
    assert relative_error(ours.pop("samples"), reference.pop("samples")) < CLOSE
    assert ours == reference


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ({"reference_latents": [torch.zeros(1, 16, 1, 6, 6)]}, "reference_latent"),
        ({"concat_latent_image": torch.zeros(1, 16, 1, 6, 6)}, "concat_latent_image"),
        ({"noise_concat": torch.zeros(1, 16, 1, 6, 6)}, "noise_concat"),
        ({"vace_frames": [torch.zeros(1, 32, 1, 6, 6)]}, "vace_frames"),
        ({"control": ControlBase()}, "control"),
    ],
)
def test_unknown_conditioning_raises_an_error_that_names_it(
    loaded: Loaded, sample: Callable[..., Any], extra: dict[str, Any], names: str
) -> None:
    with pytest.raises(InvalidRequest, match=names):
        sample(loaded.model, empty_latent(), positive=[[conditioning(1)[0][0], extra]])
    assert not loaded.client.work


def test_another_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="MODEL of Parallel Loader or Parallel Model"):
        parallel_sampler(object(), empty_latent())
