"""PixArt alpha and Sigma."""

import math

from ...errors import InvalidRequest
from ..architecture import Architecture, Config, Tensors, Weights, layers, renamed

HEADS = 16
_PIXELS_PER_LATENT = 8


def _out_channels(weights: Weights, in_channels: int, patch: int) -> int:
    """Return the number of predicted channels.

    Raises:
        InvalidRequest: the model does not also predict the noise's variance, such as Allegro, which has the same names.
    """
    out_channels = weights.rows("proj_out.weight") // patch**2
    if out_channels != 2 * in_channels:
        raise InvalidRequest(
            f"the file predicts {out_channels} channels and takes {in_channels}, as Allegro does, which is not "
            "supported; PixArt predicts twice as many as it takes: choose another file"
        )
    return out_channels


def _positions(weights: Weights, patch: int) -> Config:
    """Return settings from the positions that ComfyUI reads. Without them, ComfyUI assumes 512 pixels."""
    stored = weights.shapes.get("pos_embed")
    side = math.isqrt(stored[1]) * patch if stored else 128
    return {
        "sample_size": side,
        "interpolation_scale": max(side // (512 // _PIXELS_PER_LATENT), 1) if stored else None,
    }


def _config(weights: Weights) -> Config:
    width, in_channels, patch, _ = weights.shape("pos_embed.proj.weight")
    return _positions(weights, patch) | {
        "num_attention_heads": HEADS,
        "attention_head_dim": width // HEADS,
        "in_channels": in_channels,
        "out_channels": _out_channels(weights, in_channels, patch),
        "num_layers": weights.count("transformer_blocks"),
        "cross_attention_dim": width,
        "patch_size": patch,
        "use_additional_conditions": "adaln_single.emb.resolution_embedder.linear_1.weight" in weights,
        "caption_channels": weights.columns("caption_projection.linear_1.weight"),
    }


_LAYERS = layers("""
    adaln_single caption_projection pos_embed proj_out scale_shift_table
    transformer_blocks(attn1 attn2 ff scale_shift_table)
    ar_embedder csize_embedder final_layer t_block t_embedder x_embedder y_embedder
    blocks(attn cross_attn mlp scale_shift_table)
""")

_NAMES = (
    ("csize_embedder.mlp.0", "adaln_single.emb.resolution_embedder.linear_1"),
    ("csize_embedder.mlp.2", "adaln_single.emb.resolution_embedder.linear_2"),
    ("ar_embedder.mlp.0", "adaln_single.emb.aspect_ratio_embedder.linear_1"),
    ("ar_embedder.mlp.2", "adaln_single.emb.aspect_ratio_embedder.linear_2"),
    ("t_embedder.mlp.0", "adaln_single.emb.timestep_embedder.linear_1"),
    ("t_embedder.mlp.2", "adaln_single.emb.timestep_embedder.linear_2"),
    ("t_block.1", "adaln_single.linear"), ("x_embedder.proj", "pos_embed.proj"),
    ("y_embedder.y_proj.fc1", "caption_projection.linear_1"), ("y_embedder.y_proj.fc2", "caption_projection.linear_2"),
    ("final_layer.linear", "proj_out"), ("final_layer.scale_shift_table", "scale_shift_table"),
    ("blocks.", "transformer_blocks."), (".cross_attn.proj.", ".attn2.to_out.0."), (".attn.proj.", ".attn1.to_out.0."),
    (".cross_attn.q_linear.", ".attn2.to_q."), (".mlp.fc1.", ".ff.net.0.proj."), (".mlp.fc2.", ".ff.net.2."),
)  # fmt: skip
"""Parts of PixArt's names, and of diffusers'."""

_FUSED = {
    ".attn.qkv.": (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."),
    ".cross_attn.kv_linear.": (".attn2.to_k.", ".attn2.to_v."),
}
"""PixArt's fused layers, and the layers that diffusers has instead."""


def _convert(tensors: Tensors) -> Tensors:
    converted = {}
    for original, tensor in tensors.items():
        name = renamed(original, _NAMES)
        fused = next((part for part in _FUSED if part in name), None)
        if fused is None:
            converted[name] = tensor
            continue
        layers = _FUSED[fused]
        converted |= {
            name.replace(fused, layer): part for layer, part in zip(layers, tensor.chunk(len(layers)), strict=True)
        }
    return converted


ARCHITECTURE = Architecture(
    class_name="PixArtTransformer2DModel",
    native=("t_block.1.weight", "x_embedder.proj.weight", "y_embedder.y_proj.fc1.weight"),
    diffusers=("adaln_single.emb.timestep_embedder.linear_1.bias", "pos_embed.proj.weight"),
    config=_config,
    convert=_convert,
    layers=_LAYERS,
    foreign={"temporal_transformer_blocks.": "Latte", ".attn_temp.": "Open-Sora 1.0 or 1.1"},
    unused=frozenset({"y_embedder.y_embedding", "pos_embed", "pos_embed.pos_embed"}),
    renamed={
        "pos_embed.proj": "x_embedder.proj", "proj_out": "final_layer.linear",
        "transformer_blocks": "blocks", "caption_projection.linear_1": "y_embedder.y_proj.fc1",
        "adaln_single.emb.resolution_embedder.linear_1": "csize_embedder.mlp.0",
    },
)  # fmt: skip
