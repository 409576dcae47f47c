"""Flux.1: dev, schnell, Fill and Kontext."""

from ..architecture import Architecture, Config, Weights, layers, renamed
from ..shared.fused_layers import of_any_width


def _config(weights: Weights) -> Config:
    head_dim = weights.rows("transformer_blocks.0.attn.norm_q.weight")
    return {
        "patch_size": 1,
        "in_channels": weights.columns("x_embedder.weight"),
        "out_channels": weights.rows("proj_out.weight"),
        "num_layers": weights.count("transformer_blocks"),
        "num_single_layers": weights.count("single_transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": weights.rows("x_embedder.weight") // head_dim,
        "joint_attention_dim": weights.columns("context_embedder.weight"),
        "pooled_projection_dim": weights.columns("time_text_embed.text_embedder.linear_1.weight"),
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in weights,
        "axes_dims_rope": [16, 56, 56],
    }


_NORMS = (("query_norm.weight", "query_norm.scale"), ("key_norm.weight", "key_norm.scale"))
"""Parts of the names that newer versions of ComfyUI save, and of the published ones."""


def published(name: str) -> str:
    """Return the published name for a name that ComfyUI saves."""
    return renamed(name, _NORMS)


_LAYERS = layers("""
    context_embedder norm_out proj_out time_text_embed x_embedder
    transformer_blocks(attn ff ff_context norm1 norm1_context) single_transformer_blocks(attn norm proj_mlp proj_out)
    final_layer guidance_in img_in time_in txt_in vector_in
    double_blocks(img_attn img_mlp img_mod txt_attn txt_mlp txt_mod) single_blocks(linear1 linear2 modulation norm)
""")

ARCHITECTURE = Architecture(
    class_name="FluxTransformer2DModel",
    native=("double_blocks.0.img_attn.norm.key_norm.scale", "img_in.weight", "vector_in.in_layer.weight"),
    diffusers=("single_transformer_blocks.0.proj_mlp.weight", "x_embedder.weight", "context_embedder.weight",
               "time_text_embed.text_embedder.linear_1.weight", "single_transformer_blocks.0.norm.linear.weight"),
    config=_config,
    convert=of_any_width("convert_flux_transformer_checkpoint_to_diffusers"),
    layers=_LAYERS,
    published=published,
    renamed={
        "x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear",
        "transformer_blocks": "double_blocks", "single_transformer_blocks": "single_blocks",
        "transformer_blocks.0.attn.norm_q.weight": "double_blocks.0.img_attn.norm.query_norm.scale",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    },
    foreign={"nerf_blocks.": "Chroma Radiance"},
)  # fmt: skip
