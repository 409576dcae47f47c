"""Chroma."""

from ..architecture import Architecture, Config, Weights, layers, substituted
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
        "axes_dims_rope": [16, 56, 56],
        "approximator_num_channels": weights.columns("distilled_guidance_layer.in_proj.weight"),
        "approximator_hidden_dim": weights.rows("distilled_guidance_layer.in_proj.weight"),
        "approximator_layers": weights.count("distilled_guidance_layer.layers"),
    }


_SCALES = ((r"(query_norm|key_norm|norms\.\d+)\.weight$", r"\1.scale"),)
"""Names that newer versions of ComfyUI save, and the published ones."""


def _published(name: str) -> str:
    return substituted(name, _SCALES)


_LAYERS = layers("""
    context_embedder distilled_guidance_layer norm_out proj_out x_embedder
    transformer_blocks(attn ff ff_context) single_transformer_blocks(attn proj_mlp proj_out)
    final_layer img_in txt_in
    double_blocks(img_attn img_mlp txt_attn txt_mlp) single_blocks(linear1 linear2 norm)
""")

ARCHITECTURE = Architecture(
    class_name="ChromaTransformer2DModel",
    native=("distilled_guidance_layer.in_proj.weight", "double_blocks.0.img_attn.norm.key_norm.scale",
            "img_in.weight"),
    diffusers=("distilled_guidance_layer.in_proj.weight", "single_transformer_blocks.0.proj_mlp.weight",
               "x_embedder.weight"),
    config=_config,
    convert=of_any_width("convert_chroma_transformer_checkpoint_to_diffusers"),
    layers=_LAYERS,
    published=_published,
    renamed={
        "x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear",
        "transformer_blocks": "double_blocks", "single_transformer_blocks": "single_blocks",
        "transformer_blocks.0.attn.norm_q.weight": "double_blocks.0.img_attn.norm.query_norm.scale",
    },
    foreign={"nerf_blocks.": "Chroma Radiance"},
)  # fmt: skip
