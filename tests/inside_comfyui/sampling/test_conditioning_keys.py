"""Every entry of a conditioning that ComfyUI's classes of our families read works, or is refused by its name."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_folder_name.nodes.bridges.refusals import UNSUPPORTED_CONDS
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy import model_base
from comfy.model_base import BaseModel
from helpers.inside_fixtures import (
    Loaded,
    conditioning,
    empty_latent,
    ksampler,
    native_case,
    parallel_sampler,
    relative_error,
)  # fmt: skip
from natives import CASES

CLOSE, FAR = 1e-4, 1e-2
CLASSES = (
    "Flux", "Flux2", "HunyuanVideo", "HunyuanVideoI2V", "LTXV", "GenmoMochi", "PixArt", "QwenImage", "SD3", "WAN21",
    "WAN22", "Lumina2", "CogVideoX", "Krea2", "LTXAV", "MiniMaxH3",
)  # fmt: skip
OF_SAMPLING = {"device", "noise", "seed", "latent_image", "denoise_mask"}
"""What ComfyUI adds itself."""
WORKING = {
    "cross_attn", "pooled_output", "attention_mask", "attention_mask_img_shape", "guidance", "width", "height",
    "aspect_ratio", "frame_rate", "keyframe_idxs", "guide_attention_entries", "guiding_frame_index", "ofs",
    "concat_mask_index", "reference_latents_method", "cross_attn_controlnet", "generated_keyframes", "latent_shapes",
    "minimax_token_tags", "minimax_keyframes", "minimax_refs", "minimax_visual_cond_noise_aug",
    "minimax_audio_cond_noise_aug", "ref_audio", "unprocessed_ltxav_embeds",
}  # fmt: skip
"""What a family's bridge takes or checks. Tests of the families show it, and those below."""


def keys_of(model_class: type[BaseModel]) -> set[str]:
    """Return the entries of a conditioning that a class of ComfyUI reads."""
    owners = [owner for owner in model_class.__mro__ if issubclass(owner, BaseModel)]
    methods = [vars(owner).get(name) for owner in owners for name in ("extra_conds", "concat_cond", "encode_adm")]
    sources = [inspect.getsource(method) for method in methods if method is not None]
    return {key for source in sources for key in re.findall(r"kwargs(?:\.get\(|\[)[\"'](\w+)", source)}


@pytest.mark.parametrize("model_class", [vars(model_base)[name] for name in CLASSES if hasattr(model_base, name)])
def test_every_entry_is_known(model_class: type[BaseModel]) -> None:
    keys = keys_of(model_class)
    assert "cross_attn" in keys
    assert keys - OF_SAMPLING - WORKING - {*UNSUPPORTED_CONDS} == set()


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
@pytest.mark.parametrize("key", ["context_latents", "ref_latent", "clip_vision_outputs"])
def test_an_entry_is_refused_by_its_name(loaded: Loaded, sample: Callable[..., Any], key: str) -> None:
    ((text, _),) = conditioning(1)
    with pytest.raises(InvalidRequest, match=f"^conditioning with {key} is not supported by the parallel model"):
        sample(loaded.model, empty_latent(), positive=[[text, {key: [torch.zeros(1, 16, 1, 6, 6)]}]])
    assert not loaded.client.work


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_a_prompt_for_a_controlnet_changes_nothing_without_one(
    native: Any, loaded: Loaded, sample: Callable[..., Any]
) -> None:
    ((text, _),) = conditioning(1)
    options = {"positive": [[text, {"cross_attn_controlnet": conditioning(3)[0][0]}]]}
    reference = ksampler(native, empty_latent(), **options)
    assert relative_error(reference, ksampler(native, empty_latent())) < CLOSE
    assert relative_error(sample(loaded.model, empty_latent(), **options), reference) < CLOSE


def test_the_place_of_the_mask_among_the_channels(load_case: Callable[..., Any]) -> None:
    name = "wan i2v 2.2"
    case, native = CASES[name], native_case(name)
    ((text, extra),) = case.conditioning(1)
    options = {"positive": [[text, {**extra, "concat_mask_index": 16}]], "negative": case.conditioning(2), "steps": 1}
    reference = ksampler(native, case.samples(), **options)
    usual = ksampler(native, case.samples(), **{**options, "positive": case.conditioning(1)})
    assert relative_error(usual, reference) > FAR
    model = load_case(name, ParallelLayout(ulysses=2))
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(model, case.samples(), **options), reference) < CLOSE
