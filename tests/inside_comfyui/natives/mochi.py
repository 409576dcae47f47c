"""Mochi 1."""

from typing import Any

import torch
from diffusers.loaders.single_file_utils import swap_proj_gate, swap_scale_shift

from natives.case import Case, Random, Sampling, Weights

LAYERS, WIDTH, TEXT_WIDTH = 1, 3072, 48
"""ComfyUI's blocks have a fixed width, so there is only one."""

CONFIG = {
    "num_layers": LAYERS, "num_attention_heads": 24, "attention_head_dim": WIDTH // 24,
    "pooled_projection_dim": TEXT_WIDTH, "text_embed_dim": 24,
}  # fmt: skip
UNET = {
    "image_model": "mochi_preview", "depth": LAYERS, "patch_size": 2, "num_heads": 24, "hidden_size_x": WIDTH,
    "hidden_size_y": TEXT_WIDTH, "mlp_ratio_x": 4.0, "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12,
    "qk_norm": True, "qkv_bias": False, "out_bias": True, "attn_drop": 0.0, "patch_embed_bias": True,
    "posenc_preserve_area": True, "timestep_mlp_bias": True, "attend_to_padding": False, "timestep_scale": 1000.0,
    "use_t5": True, "t5_feat_dim": 24, "t5_token_length": 256, "rope_theta": 10000.0,
}  # fmt: skip
NAMES = {
    "x_embedder": "patch_embed", "t5_y_embedder": "time_embed.pooler", "t5_yproj": "time_embed.caption_proj",
    "t_embedder.mlp.0": "time_embed.timestep_embedder.linear_1", "mod_x": "norm1.linear",
    "t_embedder.mlp.2": "time_embed.timestep_embedder.linear_2", "mod_y": "norm1_context.linear",
    "attn.": "attn1.", "q_norm_x": "norm_q", "k_norm_x": "norm_k", "q_norm_y": "norm_added_q",
    "k_norm_y": "norm_added_k", "proj_x": "to_out.0", "proj_y": "to_add_out", "mlp_x.w1": "ff.net.0.proj",
    "mlp_x.w2": "ff.net.2", "mlp_y.w1": "ff_context.net.0.proj", "mlp_y.w2": "ff_context.net.2",
    "final_layer.linear": "proj_out", "final_layer.mod": "norm_out.linear",
    f"blocks.{LAYERS - 1}.norm1_context.linear": f"blocks.{LAYERS - 1}.norm1_context.linear_1",
}  # fmt: skip
"""diffusers' names by ComfyUI's. diffusers' own converter only takes 48 layers."""


def _converted(weights: Weights) -> Weights:
    converted = {}
    for name, tensor in weights.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        name = f"transformer_{name}" if name.startswith("blocks.") else name
        if "qkv_" in name:
            stream = {"x": "to_{}", "y": "add_{}_proj"}["x" if "qkv_x" in name else "y"]
            template = name.replace("qkv_x", stream).replace("qkv_y", stream)
            converted |= {template.format(part): value for part, value in zip("qkv", tensor.chunk(3), strict=True)}
        elif "norm_out" in name:
            converted[name] = swap_scale_shift(tensor, dim=0)
        else:
            converted[name] = swap_proj_gate(tensor) if ".net.0.proj" in name else tensor
    return converted


def _masked(random: Random) -> dict[str, Any]:
    mask = torch.ones(1, 11, dtype=torch.long)
    mask[:, 6:] = 0
    return {"attention_mask": mask}


ASSUMED = {"depth": 2, "hidden_size_y": 96, "t5_feat_dim": 24}
SAMPLING = Sampling(node="ModelSamplingAuraFlow", inputs={"shift": 4.0})
CASES = {
    "t2v": Case(
        unet=UNET, transformer="MochiTransformer3DModel", config=CONFIG, published={}, converted=_converted,
        latent=(2, 12, 3, 6, 10), text=(11, 24), extra=_masked,
        fixed=frozenset({"depth", "hidden_size_y", "t5_feat_dim"}),
    )
}  # fmt: skip
