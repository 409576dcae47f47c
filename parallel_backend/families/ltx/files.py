"""LTX-Video."""

from typing import Any

from ...errors import InvalidRequest
from ..architecture import Architecture, Config, Weights, layers, single_file

HEADS = 32


def _config(weights: Weights) -> Config:
    width = weights.rows("proj_in.weight")
    return {
        "in_channels": weights.columns("proj_in.weight"),
        "out_channels": weights.rows("proj_out.weight"),
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": HEADS,
        "attention_head_dim": width // HEADS,
        "cross_attention_dim": weights.columns("transformer_blocks.0.attn2.to_k.weight"),
        "num_layers": weights.count("transformer_blocks"),
        "qk_norm": "rms_norm_across_heads",
        "caption_channels": weights.columns("caption_projection.linear_1.weight"),
    }


_SETTINGS: dict[str, tuple[Any, ...]] = {
    "image_model": ("ltxv",),
    "rope_type": ("interleaved",),
    "frequencies_precision": ("float32",),
    "positional_embedding_theta": (10000.0,),
    "positional_embedding_max_pos": ([20, 2048, 2048],),
    "vae_scale_factors": ([8, 32, 32],),
    "use_middle_indices_grid": (False,),
    "timestep_scale_multiplier": (1000.0,),
    "caption_proj_before_connector": (False,),
    "cross_attention_adaln": (False,),
    "apply_gated_attention": (False,),
}
"""What diffusers' class computes with, by the names of ComfyUI's settings."""

_SIZES = (
    "num_layers", "num_attention_heads", "attention_head_dim", "cross_attention_dim", "caption_channels", "in_channels",
)  # fmt: skip
"""Settings that the weights' shapes give, too."""


def _expected(config: Config) -> dict[str, tuple[Any, ...]]:
    return _SETTINGS | {name: (config[name],) for name in _SIZES}


def _pipeline(weights: Weights) -> str:
    """Return the pipeline, which says whether a latent's first frame is a single video frame (from 0.9.5 on).

    Raises:
        InvalidRequest: the file does not say so. ComfyUI has a default for original names, and reads no others.
    """
    causal = weights.described("transformer").get("causal_temporal_positioning")
    if causal is None and "patchify_proj.weight" not in weights.shapes:
        raise InvalidRequest(
            "the file does not say whether a latent's first frame is a single video frame, as from LTX-Video 0.9.5 on: "
            "choose the file in the model's original names, or the folder in diffusers layout"
        )
    return "LTXConditionPipeline" if causal else "LTXPipeline"


_LAYERS = layers("""
    caption_projection proj_in proj_out scale_shift_table time_embed
    transformer_blocks(attn1 attn2 ff scale_shift_table)
    adaln_single patchify_proj
""")

ARCHITECTURE = Architecture(
    class_name="LTXVideoTransformer3DModel",
    native=("patchify_proj.weight", "adaln_single.emb.timestep_embedder.linear_1.bias",
            "transformer_blocks.0.attn2.to_k.weight", "caption_projection.linear_1.weight"),
    diffusers=("proj_in.weight", "time_embed.emb.timestep_embedder.linear_1.bias", "caption_projection.linear_1.weight",
               "transformer_blocks.0.attn2.norm_k.weight"),
    config=_config,
    convert=single_file("convert_ltx_transformer_checkpoint_to_diffusers"),
    layers=_LAYERS,
    renamed={"proj_in": "patchify_proj"},
    expected=_expected,
    foreign={"keyframes_abs_pos_embedding": "LTX with positions of keyframes"},
    pipeline=_pipeline,
)  # fmt: skip
