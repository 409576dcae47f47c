"""Qwen-Image and Qwen-Image-Edit, whose original names are diffusers'."""

from ..architecture import Architecture, Config, Weights, layers

_MARKS = ("txt_norm.weight", "img_in.weight", "transformer_blocks.0.img_mod.1.weight")


def _config(weights: Weights) -> Config:
    head_dim = weights.rows("transformer_blocks.0.attn.norm_q.weight")
    return {
        "patch_size": 2,
        "in_channels": weights.columns("img_in.weight"),
        "out_channels": weights.rows("proj_out.weight") // 4,
        "num_layers": weights.count("transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": weights.rows("img_in.weight") // head_dim,
        "joint_attention_dim": weights.columns("txt_in.weight"),
        "guidance_embeds": False,
        "axes_dims_rope": [16, 56, 56],
        "zero_cond_t": "__index_timestep_zero__" in weights,
    }


_LAYERS = layers("""
    img_in norm_out proj_out time_text_embed txt_in txt_norm
    transformer_blocks(attn img_mlp img_mod txt_mlp txt_mod)
""")

ARCHITECTURE = Architecture(
    class_name="QwenImageTransformer2DModel",
    native=(),
    diffusers=_MARKS,
    config=_config,
    layers=_LAYERS,
    unused=frozenset({"__index_timestep_zero__"}),
    foreign={"time_text_embed.addition_t_embedding.": "Qwen-Image-Layered"},
)
