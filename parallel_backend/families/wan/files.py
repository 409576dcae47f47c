"""Wan 2.1 and 2.2: text, image, and first and last frame to video."""

from typing import Any

from ..architecture import Architecture, Config, Tensors, Weights, layers, single_file

HEAD_DIM = 128


_FIXED: Config = {
    "attention_head_dim": HEAD_DIM,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
"""Entries of the config that all published models share."""


def _image(weights: Weights) -> Config:
    """Return the config of the image embedder, which only some models have."""
    norm, tokens = (f"condition_embedder.image_embedder.{name}" for name in ("norm1.weight", "pos_embed"))
    return {
        "image_dim": weights.rows(norm) if norm in weights else None,
        "added_kv_proj_dim": weights.columns("blocks.0.attn2.add_k_proj.weight") if norm in weights else None,
        "pos_embed_seq_len": weights.columns(tokens) if tokens in weights else None,
    }


def _config(weights: Weights) -> Config:
    width, in_channels, *patch = weights.shape("patch_embedding.weight")
    sizes = {
        "patch_size": patch,
        "num_attention_heads": width // HEAD_DIM,
        "in_channels": in_channels,
        "out_channels": weights.rows("proj_out.weight") // (patch[0] * patch[1] * patch[2]),
        "text_dim": weights.columns("condition_embedder.text_embedder.linear_1.weight"),
        "freq_dim": weights.columns("condition_embedder.time_embedder.linear_1.weight"),
        "ffn_dim": weights.rows("blocks.0.ffn.net.0.proj.weight"),
        "num_layers": weights.count("blocks"),
        "cross_attn_norm": "blocks.0.norm2.weight" in weights,
    }
    return _FIXED | _image(weights) | sizes


_SETTINGS: dict[str, tuple[Any, ...]] = {
    "image_model": ("wan2.1",), "causal_ar": (False,), "window_size": ([-1, -1],), "qk_norm": (True,),
}  # fmt: skip
"""What diffusers' class computes with, by the names of ComfyUI's settings."""

_SIZES = {
    "in_dim": "in_channels", "out_dim": "out_channels", "num_heads": "num_attention_heads", "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim", "text_dim": "text_dim", "num_layers": "num_layers", "patch_size": "patch_size",
    "cross_attn_norm": "cross_attn_norm", "eps": "eps",
}  # fmt: skip
"""diffusers' names of other settings, by ComfyUI's."""


def _expected(config: Config) -> dict[str, tuple[Any, ...]]:
    sizes = {name: (config[ours],) for name, ours in _SIZES.items()}
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return _SETTINGS | sizes | {"dim": (width,), "model_type": ("i2v" if config["image_dim"] else "t2v",)}


_LAYERS = layers("""
    condition_embedder patch_embedding proj_out scale_shift_table
    blocks(attn1 attn2 ffn norm2 scale_shift_table)
    head img_emb text_embedding time_embedding time_projection
    blocks(cross_attn ffn modulation norm3 self_attn)
""")

_CONVERT = single_file("convert_wan_transformer_to_diffusers")


def _convert(tensors: Tensors) -> Tensors:
    """Convert Wan with the positions of a first and a last frame, which diffusers' converter leaves as they are."""
    names = {"img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed"}
    return {names.get(name, name): tensor for name, tensor in _CONVERT(tensors).items()}


ARCHITECTURE = Architecture(
    class_name="WanTransformer3DModel",
    native=("head.modulation", "patch_embedding.weight", "blocks.0.self_attn.q.weight"),
    diffusers=("condition_embedder.time_proj.weight", "patch_embedding.weight", "blocks.0.attn1.to_q.weight"),
    config=_config,
    convert=_convert,
    layers=_LAYERS,
    renamed={
        "proj_out": "head.head",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
        "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
        "blocks.0.ffn.net.0.proj": "blocks.0.ffn.0",
        "blocks.0.norm2": "blocks.0.norm3",
        "blocks.0.attn2.add_k_proj": "blocks.0.cross_attn.k_img",
    },
    one_first={
        "blocks.modulation": 3, "head.modulation": 3, "img_emb.emb_pos": 3,
        "blocks.scale_shift_table": 3, "scale_shift_table": 3, "condition_embedder.image_embedder.pos_embed": 3,
    },
    expected=_expected,
    foreign={
        "vace_": "Wan VACE", "control_adapter.": "Wan Fun Camera", "casual_audio_encoder.": "Wan S2V",
        "audio_proj.": "HuMo or InfiniteTalk", "face_adapter.": "Wan Animate", "pose_patch_embedding.": "Wan Animate",
        "patch_embedding_": "SCAIL or WanDancer", "delta_embedder.": "AnyFlow",
        "ref_conv.": "Wan Fun Control with a reference image", "fps_embedding.": "SkyReels V2 with a frame rate",
        "audio_cross_attn": "HuMo or InfiniteTalk",
    },
)  # fmt: skip
