"""Flux.2: dev and klein."""

from ..architecture import Architecture, Config, Weights, layers, single_file
from ..flux.files import published

_FIXED: Config = {
    "patch_size": 1,
    "axes_dims_rope": [32, 32, 32, 32],
    "rope_theta": 2000,
}
"""Entries of the config that all published models share."""


def _config(weights: Weights) -> Config:
    head_dim = weights.rows("transformer_blocks.0.attn.norm_q.weight")
    width = weights.rows("x_embedder.weight")
    return _FIXED | {
        "in_channels": weights.columns("x_embedder.weight"),
        "out_channels": weights.rows("proj_out.weight"),
        "num_layers": weights.count("transformer_blocks"),
        "num_single_layers": weights.count("single_transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": weights.columns("context_embedder.weight"),
        "timestep_guidance_channels": weights.columns("time_guidance_embed.timestep_embedder.linear_1.weight"),
        "mlp_ratio": weights.columns("transformer_blocks.0.ff.linear_out.weight") / width,
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in weights,
    }


_LAYERS = layers("""
    context_embedder norm_out proj_out time_guidance_embed x_embedder
    double_stream_modulation_img double_stream_modulation_txt single_stream_modulation
    transformer_blocks(attn ff ff_context) single_transformer_blocks(attn)
    final_layer guidance_in img_in time_in txt_in
    double_blocks(img_attn img_mlp txt_attn txt_mlp) single_blocks(linear1 linear2 norm)
""")

ARCHITECTURE = Architecture(
    class_name="Flux2Transformer2DModel",
    native=("double_stream_modulation_img.lin.weight", "single_blocks.0.linear1.weight"),
    diffusers=("double_stream_modulation_img.linear.weight", "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"),
    config=_config,
    convert=single_file("convert_flux2_transformer_checkpoint_to_diffusers"),
    layers=_LAYERS,
    published=published,
    renamed={
        "x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear",
        "transformer_blocks": "double_blocks", "single_transformer_blocks": "single_blocks",
        "transformer_blocks.0.attn.norm_q.weight": "double_blocks.0.img_attn.norm.query_norm.scale",
        "transformer_blocks.0.ff.linear_out": "double_blocks.0.img_mlp.2",
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    },
)  # fmt: skip
