"""Open-Sora 2.0 in the authors' names, which are Flux.1's but for separate queries, keys and values."""

import re
from typing import Any

from ...errors import InvalidRequest
from ..architecture import Architecture, Config, Tensors, Weights, layers
from ..flux.files import published
from ..shared.fused_layers import of_any_width


def _config(weights: Weights) -> Config:
    width, latent = weights.shape("x_embedder.latent.weight")
    _refuse_dc_ae(latent, weights.columns("x_embedder.condition.weight"))
    head_dim = weights.rows("transformer_blocks.0.attn.norm_q.weight")
    return {
        "patch_size": 1,
        "in_channels": latent,
        "out_channels": weights.rows("proj_out.weight"),
        "num_layers": weights.count("transformer_blocks"),
        "num_single_layers": weights.count("single_transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": weights.columns("context_embedder.weight"),
        "pooled_projection_dim": weights.columns("time_text_embed.text_embedder.linear_1.weight"),
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in weights,
        "axes_dims_rope": _axes(head_dim),
    }


def _axes(head_dim: int) -> list[int]:
    """Return how many features of a head each axis rotates, which is 16, 56 and 56 in the published models.

    Raises:
        InvalidRequest: the features make no pairs.
    """
    if head_dim % 2:
        raise InvalidRequest(
            f"the file holds an Open-Sora 2.0 with {head_dim} features a head, and an even number is needed to rotate "
            "them in pairs"
        )
    side = 2 * (7 * head_dim // 32)
    return [head_dim - 2 * side, side, side]


def _refuse_dc_ae(latent: int, condition: int) -> None:
    """Refuse the model for the deep compression autoencoder. A token of it has one mask value instead of four.

    Raises:
        InvalidRequest: names the width.
    """
    if condition == latent + 1:
        raise InvalidRequest(
            f"Open-Sora 2.0 for the video DC-AE is not supported (cond_in takes {condition} values): choose "
            "Open_Sora_v2.safetensors, whose latents are those of hunyuan_vae.safetensors"
        )


_STREAMS = {
    "img_attn": {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v"},
    "txt_attn": {"q_proj": "add_q_proj", "k_proj": "add_k_proj", "v_proj": "add_v_proj"},
}
"""diffusers' names of the layers that the authors keep apart and Flux.1's files join, by stream."""

_DOUBLE = re.compile(r"double_blocks\.(\d+)\.(img_attn|txt_attn)\.([qkv]_proj)\.(\w+)")
_SINGLE = re.compile(r"single_blocks\.(\d+)\.(q_proj|k_proj|v_mlp)\.(\w+)")

_flux = of_any_width("convert_flux_transformer_checkpoint_to_diffusers")


def _convert(tensors: Tensors) -> Tensors:
    """Convert with diffusers' converter for Flux.1.

    It gets zeros for the joined layers, which the file keeps apart.
    """
    joined: Tensors = {}
    separate: Tensors = {}
    width = len(tensors["img_in.weight"])
    for name, tensor in tensors.items():
        if double := _DOUBLE.fullmatch(name):
            block, stream, layer, kind = double.groups()
            joined[f"double_blocks.{block}.{stream}.qkv.{kind}"] = tensor.new_zeros(3 * width)
            separate[f"transformer_blocks.{block}.attn.{_STREAMS[stream][layer]}.{kind}"] = tensor
        elif single := _SINGLE.fullmatch(name):
            block, layer, kind = single.groups()
            joined[f"single_blocks.{block}.linear1.{kind}"] = tensor.new_zeros(7 * width)
            separate |= _of_single_block(f"single_transformer_blocks.{block}", layer, kind, tensor, width)
    others = {
        name: tensor for name, tensor in tensors.items() if not (_DOUBLE.fullmatch(name) or _SINGLE.fullmatch(name))
    }
    converted = _flux(others | joined) | separate
    for kind in ("weight", "bias"):
        converted[f"x_embedder.latent.{kind}"] = converted.pop(f"x_embedder.{kind}")
        converted[f"x_embedder.condition.{kind}"] = tensors[f"cond_in.{kind}"]
    return converted


def _of_single_block(block: str, layer: str, kind: str, tensor: Any, width: int) -> Tensors:
    """Return a layer of a single block under diffusers' names. The values' layer has the feed-forward's rows, too."""
    if layer != "v_mlp":
        return {f"{block}.attn.to_{layer[0]}.{kind}": tensor}
    return {f"{block}.attn.to_v.{kind}": tensor[:width], f"{block}.proj_mlp.{kind}": tensor[width:]}


_LAYERS = layers("""
    context_embedder norm_out proj_out time_text_embed x_embedder
    transformer_blocks(attn ff ff_context norm1 norm1_context) single_transformer_blocks(attn norm proj_mlp proj_out)
    cond_in final_layer guidance_in img_in time_in txt_in vector_in
    double_blocks(img_attn img_mlp img_mod txt_attn txt_mlp txt_mod)
    single_blocks(k_proj linear1 linear2 modulation norm q_proj v_mlp)
""")

ARCHITECTURE = Architecture(
    class_name="OpenSora2Transformer3DModel",
    native=("cond_in.weight", "double_blocks.0.img_attn.norm.key_norm.scale", "img_in.weight",
            "vector_in.in_layer.weight"),
    diffusers=("x_embedder.condition.weight", "single_transformer_blocks.0.proj_mlp.weight", "context_embedder.weight",
               "time_text_embed.text_embedder.linear_1.weight"),
    config=_config,
    convert=_convert,
    layers=_LAYERS,
    published=published,
    renamed={
        "x_embedder.latent": "img_in", "x_embedder.condition": "cond_in", "context_embedder": "txt_in",
        "proj_out": "final_layer.linear",
        "transformer_blocks": "double_blocks", "single_transformer_blocks": "single_blocks",
        "transformer_blocks.0.attn.norm_q.weight": "double_blocks.0.img_attn.norm.query_norm.scale",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    },
)  # fmt: skip
