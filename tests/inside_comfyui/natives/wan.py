"""Wan 2.1 and 2.2: image, and first and last frame to video."""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from torch import Tensor

from natives.case import Case, Random, Sampling, Weights

CONFIG = {
    "num_attention_heads": 3, "attention_head_dim": 16, "text_dim": 24, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2,
}  # fmt: skip
UNET = {
    "image_model": "wan2.1", "model_type": "t2v", "patch_size": (1, 2, 2), "in_dim": 16, "out_dim": 16, "dim": 48,
    "ffn_dim": 64, "freq_dim": 32, "text_dim": 24, "num_heads": 3, "num_layers": 2, "window_size": (-1, -1),
    "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6,
}  # fmt: skip
FIXED = frozenset({"freq_dim", "text_dim", "num_heads"})
FRAMES, HEIGHT, WIDTH = 3, 7, 5
IMAGE = {"image_dim": 1280, "added_kv_proj_dim": 48}
"""ComfyUI's embedder has a fixed width."""


def _start(random: Random) -> dict[str, Any]:
    """Return what *WanImageToVideo* adds with a start image."""
    mask = torch.ones(1, 1, FRAMES, HEIGHT, WIDTH)
    mask[:, :, :1] = 0.0
    return {"concat_latent_image": random(1, 16, FRAMES, HEIGHT, WIDTH), "concat_mask": mask}


def clip_vision(states: Tensor) -> Any:
    """Return the part of *CLIPVisionEncode*'s output that Wan uses."""
    return SimpleNamespace(penultimate_hidden_states=states)


def _clip_vision(random: Random, tokens: int = 257) -> dict[str, Any]:
    return {**_start(random), "clip_vision_output": clip_vision(random(1, tokens, 1280))}


def _first_and_last(random: Random) -> dict[str, Any]:
    """Return what *WanFirstLastFrameToVideo* adds: a mask with four frames per latent frame."""
    mask = torch.ones(1, 4, FRAMES, HEIGHT, WIDTH)
    mask[:, :, 0] = 0.0
    mask[:, 3:, -1] = 0.0
    return {**_clip_vision(random, tokens=2 * 257), "concat_mask": mask}


def _start_latent(random: Random) -> dict[str, Any]:
    """Return what *Wan22ImageToVideoLatent* outputs with a start image."""
    mask = torch.ones(2, 1, FRAMES, HEIGHT, WIDTH)
    mask[:, :, :1] = 0.0
    return {"samples": random(2, 48, FRAMES, HEIGHT, WIDTH) * (1.0 - mask), "noise_mask": mask}


def _case(config: dict[str, Any], unet: dict[str, Any], **options: Any) -> Case:
    channels = unet.get("out_dim", 16)
    return Case(
        unet={**UNET, **unet}, transformer="WanTransformer3DModel", config={**CONFIG, **config}, converted=_converted,
        fixed=FIXED, **{
            "published": config, "latent": (2, channels, FRAMES, HEIGHT, WIDTH), "text": (512, 24), **options,
        },
    )  # fmt: skip


def _converted(weights: Weights) -> Weights:
    positions = weights.pop("img_emb.emb_pos", None)
    converted: Weights = convert_wan_transformer_to_diffusers(weights)
    return converted if positions is None else {**converted, "condition_embedder.image_embedder.pos_embed": positions}


I2V = {"in_channels": 36, **IMAGE}
WIDE = {"dim": 384}
SAMPLING = Sampling(node="ModelSamplingSD3", inputs={"shift": 5.0})
CASES = {
    "t2v": _case({}, {}, text=(11, 24)),
    "i2v 2.1": _case(
        I2V, {"model_type": "i2v", "in_dim": 36}, extra=_clip_vision, shorter=0,
        published={**I2V, "added_kv_proj_dim": 5120},
    ),
    "flf2v 2.1": _case(
        {**I2V, "pos_embed_seq_len": 514}, {"model_type": "i2v", "in_dim": 36, "flf_pos_embed_token_number": 514},
        extra=_first_and_last, shorter=0, published={**I2V, "added_kv_proj_dim": 5120, "pos_embed_seq_len": 514},
    ),
    "i2v 2.2": _case({"in_channels": 36}, {"in_dim": 36}, extra=_start, text=(11, 24)),
    "ti2v 5b": _case({"in_channels": 48, "out_channels": 48}, {"in_dim": 48, "out_dim": 48}, text=(11, 24)),
    "ti2v 5b, first frame": _case(
        {"in_channels": 48, "out_channels": 48}, {"in_dim": 48, "out_dim": 48}, latent_entries=_start_latent,
        text=(11, 24),
    ),
}  # fmt: skip
