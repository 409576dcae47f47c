"""HunyuanVideo, text and image to video."""

from functools import partial
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_hunyuan_video_transformer_to_diffusers
from torch import Tensor

from natives.case import Case, Random, Sampling, Weights

CONFIG = {
    "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 3, "attention_head_dim": 16,
    "text_embed_dim": 24, "pooled_projection_dim": 20, "rope_axes_dim": (4, 6, 6),
}  # fmt: skip
UNET = {
    "image_model": "hunyuan_video",
    "in_channels": 16, "patch_size": [1, 2, 2], "out_channels": 16, "vec_in_dim": 20, "axes_dim": [4, 6, 6],
    "meanflow": False, "context_in_dim": 24, "hidden_size": 48, "mlp_ratio": 4.0, "num_heads": 3, "depth": 2,
    "depth_single_blocks": 2, "theta": 256, "qkv_bias": True, "byt5": False, "guidance_embed": True,
    "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
WIDTH = 48
NAMES = {
    "mlp.0.": "mlp.fc1.", "mlp.2.": "mlp.fc2.",
    "txt_in.t_embedder.in_layer.": "txt_in.t_embedder.mlp.0.",
    "txt_in.t_embedder.out_layer.": "txt_in.t_embedder.mlp.2.",
    "txt_in.c_embedder.in_layer.": "txt_in.c_embedder.linear_1.",
    "txt_in.c_embedder.out_layer.": "txt_in.c_embedder.linear_2.",
    "time_in.in_layer.": "time_in.mlp.0.", "time_in.out_layer.": "time_in.mlp.2.",
    "guidance_in.in_layer.": "guidance_in.mlp.0.", "guidance_in.out_layer.": "guidance_in.mlp.2.",
    "_mod.lin.": "_mod.linear.", "modulation.lin.": "modulation.linear.",
    "attn.qkv.": "attn_qkv.", "attn.proj.": "attn_proj.",
    "attn.norm.query_norm.": "attn_q_norm.", "attn.norm.key_norm.": "attn_k_norm.",
    ".norm.query_norm.": ".q_norm.", ".norm.key_norm.": ".k_norm.", "norm.scale": "norm.weight",
}  # fmt: skip
"""The published file's names, which diffusers' converter takes, by ComfyUI's."""


def _converted(weights: Weights) -> Weights:
    published, split = {}, {}
    for name, tensor in weights.items():
        if ".linear1." in name:  # the converter assumes the published model's sizes
            parts = tensor.split([WIDTH, WIDTH, WIDTH, 4 * WIDTH])
            layers = zip(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), parts, strict=True)
            split |= {
                name.replace("single_blocks", "single_transformer_blocks").replace("linear1", layer): part
                for layer, part in layers
            }
            continue
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        published[name] = tensor
    return convert_hunyuan_video_transformer_to_diffusers(published) | split


def _extra(random: Random) -> dict[str, Any]:
    return {"pooled_output": random(1, 20), "guidance": 4.5}


def _longer_pooled(random: Random) -> dict[str, Any]:
    return {"pooled_output": random(1, 28)}


def _masked(random: Random) -> dict[str, Any]:
    mask = torch.ones(1, 11, dtype=torch.long)
    mask[:, 6:] = 0
    return _extra(random) | {"attention_mask": mask}


def _image(random: Random) -> dict[str, Any]:
    mask = torch.ones(1, 1, 3, 6, 10)
    mask[:, :, :1] = 0
    return _extra(random) | {"concat_latent_image": random(1, 16, 1, 6, 10), "concat_mask": mask}


def _replace(random: Random) -> dict[str, Any]:
    return _extra(random) | {"guiding_frame_index": 0}


def _first_frame(random: Random) -> dict[str, Any]:
    mask = torch.ones(1, 1, 3, 6, 10)
    mask[:, :, :1] = 0
    return {"samples": random(1, 16, 3, 6, 10) * mask.logical_not(), "noise_mask": mask}


def _case(*, guided: bool = True, channels: int = 16, kind: str | None = None, **options: Any) -> Case:
    config = CONFIG | {"guidance_embeds": guided, "in_channels": channels, "image_condition_type": kind}
    unet = UNET | {"guidance_embed": guided, "in_channels": channels}
    return Case(
        unet=unet, transformer="HunyuanVideoTransformer3DModel", config=config, published={}, converted=_converted,
        text=(11, 24), fixed=frozenset({"num_heads", "axes_dim", "vec_in_dim"}),
        **{"latent": (2, 16, 3, 6, 10), "extra": _extra, **options},
    )  # fmt: skip


def _shift_modulation(module: Any) -> None:
    """Apply the first frame's modulation to the image's tokens in every block.

    Newer versions of ComfyUI put the text first in single blocks and still modulate the sequence's first tokens as the
    first frame, which are then the text's. diffusers and older versions modulate the first frame's tokens.
    """
    for block in module.single_blocks:
        block.forward = partial(_forward_shifted, block.forward)


def _forward_shifted(forward: Any, x: Tensor, *, modulation_dims: Any, transformer_options: Any, **options: Any) -> Any:
    text = transformer_options.get("img_slice", [0])[0]
    if modulation_dims is not None and text:
        (begin, end, first), (_, _, other) = modulation_dims
        modulation_dims = [(0, text, other), (text + begin, text + end, first), (text + end, None, other)]
    return forward(x, modulation_dims=modulation_dims, transformer_options=transformer_options, **options)


REPLACE: dict[str, Any] = {"extra": _replace, "latent_entries": _first_frame, "cfg": 1.0, "repair": _shift_modulation}
"""ComfyUI's own transformer takes one sample at a time here and with masked text, and even sizes everywhere."""

WIDE = {"hidden_size": 384, "axes_dim": [16, 56, 56]}
SAMPLING = Sampling(node="ModelSamplingSD3", inputs={"shift": 5.0})
CASES = {
    "t2v": _case(),
    "t2v masked": _case(extra=_masked, latent=(1, 16, 3, 6, 10)),
    "t2v without guidance": _case(guided=False, extra=_longer_pooled),
    "i2v concat": _case(channels=33, kind="latent_concat", guided=False, extra=_image),
    "i2v skyreels": _case(channels=32, extra=_image),
    "i2v replace": _case(kind="token_replace", **REPLACE),
    "i2v replace without guidance": _case(kind="token_replace", guided=False, **REPLACE),
}
