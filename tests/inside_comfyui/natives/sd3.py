"""Stable Diffusion 3 and 3.5."""

from typing import Any

import comfy.utils
import diffusers

from natives.case import Case, Random, Sampling, Weights, by_map

CONFIG = {
    "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64, "caption_projection_dim": 128,
    "joint_attention_dim": 24, "pooled_projection_dim": 20, "sample_size": 16, "pos_embed_max_size": 12,
}  # fmt: skip
UNET = {
    "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 2, "input_size": None, "adm_in_channels": 20,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 24, "out_features": 128}},
    "num_patches": 144, "pos_embed_max_size": 12, "pos_embed_scaling_factor": None, "x_block_self_attn_layers": [],
}  # fmt: skip


def _extra(random: Random) -> dict[str, Any]:
    return {"pooled_output": random(1, 20)}


def _case(unet: dict[str, Any], **config: Any) -> Case:
    config = CONFIG | config

    def converted(weights: Weights) -> Weights:
        names = diffusers.SD3Transformer2DModel(**config).state_dict()
        return by_map(weights, comfy.utils.mmdit_to_diffusers(unet), list(names))

    return Case(
        unet=unet, transformer="SD3Transformer2DModel", config=config, published={}, converted=converted,
        latent=(2, 16, 7, 5), text=(11, 24), extra=_extra,
    )  # fmt: skip


SAMPLING = Sampling(node="ModelSamplingSD3", inputs={"shift": 4.0})
CASES = {
    "medium": _case(UNET),
    "3.5 medium": _case(
        UNET | {"qk_norm": "rms", "x_block_self_attn_layers": [0]}, dual_attention_layers=(0,), qk_norm="rms_norm"
    ),
    "3.5 large": _case(UNET | {"qk_norm": "rms"}, qk_norm="rms_norm"),
}
