"""Stable Diffusion 3 and 3.5."""

import math

from ..architecture import Architecture, Config, Weights, layers, single_file

HEAD_DIM = 64


def _config(weights: Weights) -> Config:
    width, in_channels, patch, _ = weights.shape("pos_embed.proj.weight")
    layers = weights.count("transformer_blocks")
    positions = math.isqrt(weights.columns("pos_embed.pos_embed"))
    dual = [i for i in range(layers) if f"joint_blocks.{i}.x_block.attn2.qkv.weight" in weights.shapes
            or f"transformer_blocks.{i}.attn2.to_q.weight" in weights.shapes]  # fmt: skip
    return {
        "sample_size": 128,
        "patch_size": patch,
        "in_channels": in_channels,
        "num_layers": layers,
        "attention_head_dim": HEAD_DIM,
        "num_attention_heads": width // HEAD_DIM,
        "joint_attention_dim": weights.columns("context_embedder.weight"),
        "caption_projection_dim": weights.rows("context_embedder.weight"),
        "pooled_projection_dim": weights.columns("time_text_embed.text_embedder.linear_1.weight"),
        "out_channels": weights.rows("proj_out.weight") // patch**2,
        "pos_embed_max_size": positions,
        "dual_attention_layers": dual,
        "qk_norm": "rms_norm" if "transformer_blocks.0.attn.norm_q.weight" in weights else None,
    }


_LAYERS = layers("""
    context_embedder norm_out pos_embed proj_out time_text_embed
    transformer_blocks(attn attn2 ff ff_context norm1 norm1_context)
    final_layer t_embedder x_embedder y_embedder
    joint_blocks(context_block x_block)
""")

ARCHITECTURE = Architecture(
    class_name="SD3Transformer2DModel",
    native=("joint_blocks.0.context_block.attn.qkv.weight", "x_embedder.proj.weight", "pos_embed"),
    diffusers=("pos_embed.pos_embed", "transformer_blocks.0.attn.add_q_proj.weight", "context_embedder.weight"),
    config=_config,
    convert=single_file("convert_sd3_transformer_checkpoint_to_diffusers"),
    layers=_LAYERS,
    renamed={
        "pos_embed.proj": "x_embedder.proj", "pos_embed.pos_embed": "pos_embed",
        "transformer_blocks": "joint_blocks", "proj_out": "final_layer.linear",
        "transformer_blocks.0.attn.norm_q.weight": "joint_blocks.0.x_block.attn.ln_q.weight",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    },
    one_first={"pos_embed": 3, "pos_embed.pos_embed": 3},
    foreign={"context_processor.": "Stable Diffusion 3 with a context processor"},
)  # fmt: skip
