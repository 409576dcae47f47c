"""LTX-Video: text, image and keyframes to video."""

from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_ltx_transformer_checkpoint_to_diffusers

from natives.case import Case, Random, Sampling

CONFIG = {
    "num_layers": 2, "num_attention_heads": 32, "attention_head_dim": 4, "cross_attention_dim": 128,
    "caption_channels": 24, "in_channels": 128, "out_channels": 128,
}  # fmt: skip
UNET = {
    "image_model": "ltxv", "num_layers": 2, "attention_head_dim": 4, "cross_attention_dim": 128,
    "num_attention_heads": 32, "caption_channels": 24,
}  # fmt: skip


def _masked(random: Random) -> dict[str, Any]:
    mask = torch.ones(1, 11, dtype=torch.long)
    mask[:, 6:] = 0
    return {"attention_mask": mask, "frame_rate": 30.0}


def _first_frame(random: Random) -> dict[str, Any]:
    """Return what *LTXVImgToVideo* outputs."""
    mask = torch.ones(2, 1, 3, 1, 1)
    mask[:, :, :1] = 0.25
    return {"samples": random(2, 128, 3, 5, 7), "noise_mask": mask}


def _some_tokens(random: Random) -> dict[str, Any]:
    return {"samples": random(2, 128, 3, 5, 7), "noise_mask": random(2, 1, 3, 5, 7).sigmoid()}


def _keyframes(random: Random) -> dict[str, Any]:
    """Return what *LTXVAddGuide* adds, with a guide of full strength."""
    from comfy_extras.nodes_lt import LTXVAddGuide

    guide = random(1, 128, 1, 5, 7)
    [[_, values]] = LTXVAddGuide.add_keyframe_index([[None, {}]], 8, guide, (8, 32, 32))
    entry = {"pre_filter_count": 5 * 7, "strength": 1.0, "pixel_mask": None, "latent_shape": [1, 5, 7]}
    return _masked(random) | values | {"guide_attention_entries": [entry]}


def _with_keyframe(random: Random) -> dict[str, Any]:
    mask = torch.ones(1, 1, 4, 1, 1)
    mask[:, :, 3:] = 0
    return {"samples": random(1, 128, 4, 5, 7) * mask.logical_not(), "noise_mask": mask}


def _case(*, causal: bool = False, **options: Any) -> Case:
    return Case(
        unet=UNET | {"causal_temporal_positioning": causal}, transformer="LTXVideoTransformer3DModel", config=CONFIG,
        fixed=frozenset({"num_attention_heads", "caption_channels", "causal_temporal_positioning"}),
        pipeline="LTXConditionPipeline" if causal else "LTXPipeline",
        published={}, converted=convert_ltx_transformer_checkpoint_to_diffusers,
        latent=(2, 128, 3, 5, 7), text=(11, 24), **{"extra": _masked, **options},
    )  # fmt: skip


SAMPLING = Sampling(node="ModelSamplingLTXV", inputs={"max_shift": 2.05, "base_shift": 0.95}, module="nodes_lt")
CASES = {
    "t2v": _case(),
    "t2v causal": _case(causal=True),
    "i2v": _case(latent_entries=_first_frame),
    "mask": _case(causal=True, latent_entries=_some_tokens),
    "keyframes": _case(causal=True, extra=_keyframes, latent_entries=_with_keyframe),
}
