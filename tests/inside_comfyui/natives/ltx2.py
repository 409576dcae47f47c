"""LTX-2, and 2.3 and 2.5 in versions of ComfyUI that have them: picture and sound together."""

from inspect import signature
from typing import Any

import torch
from comfy.ldm.lightricks.av_model import LTXAVModel
from comfy.nested_tensor import NestedTensor
from diffusers.loaders.single_file_utils import convert_ltx2_transformer_to_diffusers

from natives.case import Case, Random, Sampling, Weights

CONFIG = {
    "num_layers": 2, "num_attention_heads": 32, "attention_head_dim": 8, "cross_attention_dim": 256,
    "audio_num_attention_heads": 32, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 128,
    "caption_channels": 60, "rope_type": "split",
}  # fmt: skip
UNET = {
    "image_model": "ltxav", "num_layers": 2, "attention_head_dim": 8, "cross_attention_dim": 256, "in_channels": 128,
    "num_attention_heads": 32, "caption_channels": 60, "audio_in_channels": 128, "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 4, "audio_cross_attention_dim": 128, "rope_type": "split",
    "timestep_scale_multiplier": 1000, "frequencies_precision": "float64", "av_ca_timestep_scale_multiplier": 1000,
    "apply_gated_attention": False, "cross_attention_adaln": False, "causal_temporal_positioning": True,
    "use_middle_indices_grid": True, "caption_proj_before_connector": False, "caption_projection_first_linear": False,
    "connector_num_attention_heads": 30, "connector_attention_head_dim": 2,
}  # fmt: skip
_NEWER = {
    "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
}  # fmt: skip
_NEWER_UNET = {
    "apply_gated_attention": True, "cross_attention_adaln": True, "caption_proj_before_connector": True,
    "connector_num_attention_heads": 32, "connector_attention_head_dim": 8, "audio_connector_num_attention_heads": 32,
    "audio_connector_attention_head_dim": 4, "connector_apply_gated_attention": True,
}  # fmt: skip
_NEWEST = {"ff_bias": False, "use_keyframes_abs_pos_embedding": True}
SIZE, SOUND = (4, 3, 5), (8, 27, 16)
"""Of the picture, which is not divisible by two, and of the sound: 25 frames of 160 x 96."""


def nested(picture: torch.Tensor, sound: torch.Tensor) -> NestedTensor:
    """Return what *LTXVConcatAVLatent* makes of two latents or masks."""
    return NestedTensor((picture, sound))


def _converted(weights: Weights) -> Weights:
    """diffusers' converter is that of 2.0, which has no modulation of text."""
    converted = convert_ltx2_transformer_to_diffusers(dict(weights))
    return {name.replace("prompt_adaln_single", "prompt_adaln"): tensor for name, tensor in converted.items()}


def _empty(random: Random) -> dict[str, Any]:
    return {"samples": nested(torch.zeros(2, 128, *SIZE), torch.zeros(2, *SOUND))}


def _rate(random: Random) -> dict[str, Any]:
    return {"frame_rate": 30.0}


def _masked(random: Random) -> dict[str, Any]:
    """Return a picture whose tokens have masks of their own, and a sound whose tokens do."""
    masks = random(2, 1, *SIZE).sigmoid(), random(2, 1, *SOUND[1:])[..., :1].sigmoid().expand(2, 1, *SOUND[1:])
    return {"samples": nested(random(2, 128, *SIZE), random(2, *SOUND)), "noise_mask": nested(*masks)}


def _first_frame(random: Random) -> dict[str, Any]:
    """Return what *LTXVImgToVideoInplace* and *LTXVConcatAVLatent* make."""
    mask = torch.ones(2, 1, SIZE[0], 1, 1)
    mask[:, :, :1] = 0.25
    sound_mask = torch.ones(2, 1, *SOUND[1:])
    return {
        "samples": nested(random(2, 128, *SIZE), torch.zeros(2, *SOUND)),
        "noise_mask": nested(mask.expand(2, 1, *SIZE), sound_mask),
    }


def _guides(random: Random) -> dict[str, Any]:
    """Return what *LTXVAddGuide* adds, with a guide of full strength."""
    from comfy_extras.nodes_lt import LTXVAddGuide

    guide = random(1, 128, 1, *SIZE[1:])
    [[_, values]] = LTXVAddGuide.add_keyframe_index([[None, {}]], 8, guide, (8, 32, 32))
    entry = {"pre_filter_count": 15, "strength": 1.0, "pixel_mask": None, "latent_shape": [1, *SIZE[1:]]}
    return _rate(random) | values | {"guide_attention_entries": [entry]}


def _with_guide(random: Random) -> dict[str, Any]:
    mask = torch.ones(1, 1, *SIZE)
    mask[:, :, 3:] = 0
    picture = random(1, 128, *SIZE) * mask.logical_not()
    return {
        "samples": nested(picture, torch.zeros(1, *SOUND)),
        "noise_mask": nested(mask, torch.ones(1, 1, *SOUND[1:])),
    }


def _voice(random: Random) -> dict[str, Any]:
    """Return what *LTXVReferenceAudio* adds."""
    return _rate(random) | {"ref_audio": {"tokens": random(1, 9, 128)}}


def _case(config: dict[str, Any], unet: dict[str, Any], text: int, **options: Any) -> Case:
    full = UNET | unet
    return Case(
        unet=full, transformer="LTX2VideoTransformer3DModel", config=CONFIG | config,
        fixed=frozenset(full) - {"image_model", "num_layers", "attention_head_dim", "cross_attention_dim",
                                 "use_keyframes_abs_pos_embedding"},
        published=config, converted=_converted, latent=(2, 128, *SIZE), text=(11, text),
        **{"extra": _rate, "latent_entries": _empty, **options},
    )  # fmt: skip


def _older(**options: Any) -> Case:
    return _case({}, {}, 120, **options)


def _newer(**options: Any) -> Case:
    return _case(_NEWER, _NEWER_UNET, 384, **options)


HAS_2_3 = "apply_gated_attention" in signature(LTXAVModel).parameters
HAS_2_5 = "ff_bias" in signature(LTXAVModel).parameters
SAMPLING = Sampling(node="ModelSamplingLTXV", inputs={"max_shift": 2.05, "base_shift": 0.95}, module="nodes_lt")
SINCE = "LTXAV"
CASES = {
    "2": _older(),
    "2 masks": _older(latent_entries=_masked),
    "2 first frame": _older(latent_entries=_first_frame),
} | ({
    "2.3": _newer(),
    "2.3 masks": _newer(latent_entries=_masked),
    "2.3 guide": _newer(latent_entries=_with_guide, extra=_guides),
    "2.3 voice": _newer(extra=_voice),
} if HAS_2_3 else {}) | ({
    "2.5": _case({**_NEWER, **_NEWEST}, {**_NEWER_UNET, **_NEWEST}, 384, latent_entries=_with_guide, extra=_guides),
} if HAS_2_5 else {})  # fmt: skip
