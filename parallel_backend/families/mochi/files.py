"""Mochi 1."""

from ..architecture import Architecture, Config, Tensors, Weights, layers, single_file

_FIXED: Config = {
    "qk_norm": "rms_norm",
    "activation_fn": "swiglu",
    "max_sequence_length": 256,
}
"""Entries of the config that all published models share."""


def _config(weights: Weights) -> Config:
    width, in_channels, patch, _ = weights.shape("patch_embed.proj.weight")
    head_dim = weights.rows("transformer_blocks.0.attn1.norm_q.weight")
    return _FIXED | {
        "patch_size": patch,
        "num_attention_heads": width // head_dim,
        "attention_head_dim": head_dim,
        "num_layers": weights.count("transformer_blocks"),
        "pooled_projection_dim": weights.columns("transformer_blocks.0.attn1.add_q_proj.weight"),
        "in_channels": in_channels,
        "out_channels": weights.rows("proj_out.weight") // patch**2,
        "text_embed_dim": weights.columns("time_embed.caption_proj.weight"),
        "time_embed_dim": weights.columns("time_embed.timestep_embedder.linear_1.weight"),
    }


_LAYERS = layers("""
    norm_out patch_embed pos_frequencies proj_out time_embed
    transformer_blocks(attn1 ff ff_context norm1 norm1_context)
    final_layer t5_y_embedder t5_yproj t_embedder x_embedder
    blocks(attn mlp_x mlp_y mod_x mod_y)
""")

_CONVERT = single_file("convert_mochi_transformer_checkpoint_to_diffusers")
_DEPTH = 48
_TEXT = ("attn.proj_y.weight", "attn.proj_y.bias", "mlp_y.w1.weight", "mlp_y.w2.weight")
"""Weights of a block that the last block lacks."""


def _convert(tensors: Tensors) -> Tensors:
    """Convert Mochi of any depth; diffusers' converter assumes 48 layers, with a different last one."""
    layers = max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")) + 1
    last = f"blocks.{layers - 1}."
    padded = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    filler = {name.removeprefix("blocks.0."): each for name, each in tensors.items() if name.startswith("blocks.0.")}
    for missing in range(layers - 1, _DEPTH - 1):
        padded |= {f"blocks.{missing}.{name}": tensor for name, tensor in filler.items()}
        padded |= {f"blocks.{missing}.{name}": next(iter(filler.values())).new_zeros(2) for name in _TEXT}
    final = f"blocks.{_DEPTH - 1}."
    padded |= {final + name.removeprefix(last): each for name, each in tensors.items() if name.startswith(last)}
    converted = _CONVERT(padded)
    kept = {name: each for name, each in converted.items() if not _is_filler(name, layers - 1)}
    return {name.replace(f"_blocks.{_DEPTH - 1}.", f"_blocks.{layers - 1}."): each for name, each in kept.items()}


def _is_filler(name: str, first: int) -> bool:
    return name.startswith("transformer_blocks.") and first <= int(name.split(".")[1]) < _DEPTH - 1


ARCHITECTURE = Architecture(
    class_name="MochiTransformer3DModel",
    native=("t5_yproj.weight", "blocks.0.attn.qkv_y.weight", "pos_frequencies"),
    diffusers=("time_embed.caption_proj.weight", "pos_frequencies"),
    config=_config,
    convert=_convert,
    layers=_LAYERS,
    renamed={
        "patch_embed": "x_embedder", "transformer_blocks": "blocks", "proj_out": "final_layer.linear",
        "transformer_blocks.0.attn1.norm_q": "blocks.0.attn.q_norm_x",
        "transformer_blocks.0.attn1.add_q_proj": "blocks.0.attn.qkv_y",
        "time_embed.caption_proj": "t5_yproj", "time_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    },
)  # fmt: skip
