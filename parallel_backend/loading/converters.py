"""diffusers' converters from original names, by class, and what they need around them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..families.architecture import renamed
from .vae_converters import VAE_CONVERTERS

Tensors = dict[str, Tensor]


def has_converter(class_name: str) -> bool:
    """Whether the original names of a diffusers class differ from diffusers'."""
    return class_name in _CONVERTERS


def converter(class_name: str) -> Callable[[Tensors], Tensors]:
    """Return the function that maps a file's tensors in the published names to those of a diffusers class."""
    return _CONVERTERS[class_name]


def _single_file(name: str, **options: Any) -> Callable[[Tensors], Tensors]:
    def convert(tensors: Tensors) -> Tensors:
        from diffusers.loaders import single_file_utils

        converted: Tensors = getattr(single_file_utils, name)(dict(tensors), **options)
        return converted

    return convert


def _flux(tensors: Tensors) -> Tensors:
    """Convert Flux.1 of any width; diffusers' converter assumes the published one."""
    width = len(tensors["img_in.weight"])
    published = {
        name: torch.zeros(7 * 3072, dtype=torch.int64) if ".linear1." in name else tensor
        for name, tensor in tensors.items()
    }
    return _FLUX(published) | _split_linear1(tensors, width)


def _hunyuan_video(tensors: Tensors) -> Tensors:
    """Convert HunyuanVideo of any width; diffusers' converter assumes the published one."""
    width = len(tensors["img_in.proj.weight"])
    others = {name: tensor for name, tensor in tensors.items() if ".linear1." not in name}
    return _HUNYUAN_VIDEO(others) | _split_linear1(tensors, width)


def _split_linear1(tensors: Tensors, width: int) -> Tensors:
    """Return the four layers into which diffusers splits the first layer of each single block."""
    split: Tensors = {}
    for name, tensor in tensors.items():
        if ".linear1." in name:
            parts = tensor.split([width, width, width, len(tensor) - 3 * width])
            renamed = name.replace("single_blocks", "single_transformer_blocks")
            layers = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            split |= {renamed.replace("linear1", layer): part for layer, part in zip(layers, parts, strict=True)}
    return split


def _mochi(tensors: Tensors) -> Tensors:
    """Convert Mochi of any depth; diffusers' converter assumes 48 layers, of which the last one differs."""
    layers = max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")) + 1
    last = f"blocks.{layers - 1}."
    padded = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    filler = {name.removeprefix("blocks.0."): each for name, each in tensors.items() if name.startswith("blocks.0.")}
    for missing in range(layers - 1, _MOCHI_LAYERS - 1):
        padded |= {f"blocks.{missing}.{name}": tensor for name, tensor in filler.items()}
        padded |= {f"blocks.{missing}.{name}": torch.zeros(2, dtype=torch.int64) for name in _MOCHI_TEXT}
    final = f"blocks.{_MOCHI_LAYERS - 1}."
    padded |= {final + name.removeprefix(last): each for name, each in tensors.items() if name.startswith(last)}
    converted = _MOCHI(padded)
    kept = {name: each for name, each in converted.items() if not _is_filler(name, layers - 1)}
    return {
        name.replace(f"_blocks.{_MOCHI_LAYERS - 1}.", f"_blocks.{layers - 1}."): each for name, each in kept.items()
    }


_MOCHI_LAYERS = 48
_MOCHI_TEXT = ("attn.proj_y.weight", "attn.proj_y.bias", "mlp_y.w1.weight", "mlp_y.w2.weight")
"""The layers of a block that the last block lacks."""


def _is_filler(name: str, first: int) -> bool:
    return name.startswith("transformer_blocks.") and first <= int(name.split(".")[1]) < _MOCHI_LAYERS - 1


def _wan(tensors: Tensors) -> Tensors:
    """Convert Wan with the positions of a first and a last frame, which diffusers' converter leaves as they are."""
    names = {"img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed"}
    return {names.get(name, name): tensor for name, tensor in _WAN(tensors).items()}


_PIXART = (
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

_PIXART_FUSED = {
    ".attn.qkv.": (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."),
    ".cross_attn.kv_linear.": (".attn2.to_k.", ".attn2.to_v."),
}
"""PixArt's fused layers, and the layers that diffusers has instead."""


def _pixart(tensors: Tensors) -> Tensors:
    converted = {}
    for original, tensor in tensors.items():
        name = renamed(original, _PIXART)
        fused = next((part for part in _PIXART_FUSED if part in name), None)
        if fused is None:
            converted[name] = tensor
            continue
        layers = _PIXART_FUSED[fused]
        converted |= {
            name.replace(fused, layer): part for layer, part in zip(layers, tensor.chunk(len(layers)), strict=True)
        }
    return converted


_COGVIDEOX = (
    ("blocks.", "transformer_blocks."), (".q.", ".attn1.to_q."), (".k.", ".attn1.to_k."), (".v.", ".attn1.to_v."),
    ("norm_q.", "attn1.norm_q."), ("norm_k.", "attn1.norm_k."), ("attn_out.", "attn1.to_out.0."),
    ("ff_proj.", "ff.net.0.proj."), ("ff_out.", "ff.net.2."), ("embedding_linear_", "embedding.linear_"),
)  # fmt: skip
"""Parts of ComfyUI's names of CogVideoX, and of diffusers'."""


def _cogvideox(tensors: Tensors) -> Tensors:
    return {renamed(name, _COGVIDEOX): tensor for name, tensor in tensors.items()}


_FLUX = _single_file("convert_flux_transformer_checkpoint_to_diffusers")
_HUNYUAN_VIDEO = _single_file("convert_hunyuan_video_transformer_to_diffusers")
_MOCHI = _single_file("convert_mochi_transformer_checkpoint_to_diffusers")
_WAN = _single_file("convert_wan_transformer_to_diffusers")

_CONVERTERS: dict[str, Callable[[Tensors], Tensors]] = {
    "CogVideoXTransformer3DModel": _cogvideox,
    "Flux2Transformer2DModel": _single_file("convert_flux2_transformer_checkpoint_to_diffusers"),
    "FluxTransformer2DModel": _flux,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "LTXVideoTransformer3DModel": _single_file("convert_ltx_transformer_checkpoint_to_diffusers"),
    "MochiTransformer3DModel": _mochi,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _single_file("convert_sd3_transformer_checkpoint_to_diffusers"),
    "WanTransformer3DModel": _wan,
    "ZImageTransformer2DModel": _single_file("convert_z_image_transformer_checkpoint_to_diffusers"),
    **VAE_CONVERTERS,
}
