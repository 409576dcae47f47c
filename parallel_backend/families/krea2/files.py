"""Krea-2, Raw and Turbo."""

from ..architecture import Architecture, Config, Weights, layers, single_file

_FIXED: Config = {
    "norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "text_num_attention_heads": 20,
    "text_num_key_value_heads": 20,
}
"""Entries of the config that all published models share and that their files do not say."""


def _config(weights: Weights) -> Config:
    block, text_block = "transformer_blocks.0", "text_fusion.layerwise_blocks.0"
    head_dim = weights.rows(f"{block}.attn.norm_q.weight")
    side = 6 * (head_dim // 16)
    return _FIXED | {
        "in_channels": weights.columns("img_in.weight"),
        "num_layers": weights.count("transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": weights.rows(f"{block}.attn.to_q.weight") // head_dim,
        "num_key_value_heads": weights.rows(f"{block}.attn.to_k.weight") // head_dim,
        "intermediate_size": weights.rows(f"{block}.ff.gate.weight"),
        "timestep_embed_dim": weights.columns("time_embed.linear_1.weight"),
        "text_hidden_dim": weights.rows(f"{text_block}.norm1.weight"),
        "num_text_layers": weights.columns("text_fusion.projector.weight"),
        "text_intermediate_size": weights.rows(f"{text_block}.ff.gate.weight"),
        "num_layerwise_text_blocks": weights.count("text_fusion.layerwise_blocks"),
        "num_refiner_text_blocks": weights.count("text_fusion.refiner_blocks"),
        "axes_dims_rope": [head_dim - 2 * side, side, side],
    }


_LAYERS = layers("""
    final_layer img_in text_fusion time_embed time_mod_proj txt_in
    transformer_blocks(attn ff norm1 norm2 scale_shift_table)
    first last tmlp tproj txtfusion txtmlp txtmlp(scale)
    blocks(attn mlp mod postnorm prenorm)
""")

ARCHITECTURE = Architecture(
    class_name="Krea2Transformer2DModel",
    native=("txtfusion.projector.weight", "blocks.0.attn.gate.weight", "blocks.0.mod.lin"),
    diffusers=("text_fusion.projector.weight", "transformer_blocks.0.attn.to_gate.weight", "time_mod_proj.weight"),
    config=_config,
    convert=single_file("convert_krea2_transformer_checkpoint_to_diffusers"),
    layers=_LAYERS,
    one_first={"txtfusion.projector.weight": 2, "text_fusion.projector.weight": 2},
    flat={"blocks.mod.lin": 6},
    renamed={
        "img_in": "first", "transformer_blocks": "blocks", "time_embed.linear_1": "tmlp.0",
        "transformer_blocks.0.attn.norm_q.weight": "blocks.0.attn.qknorm.qnorm.scale",
        "transformer_blocks.0.attn.to_q": "blocks.0.attn.wq", "transformer_blocks.0.attn.to_k": "blocks.0.attn.wk",
        "transformer_blocks.0.ff": "blocks.0.mlp",
        "text_fusion": "txtfusion",
        "text_fusion.layerwise_blocks.0.norm1.weight": "txtfusion.layerwise_blocks.0.prenorm.scale",
        "text_fusion.layerwise_blocks.0.ff": "txtfusion.layerwise_blocks.0.mlp",
    },
)  # fmt: skip
