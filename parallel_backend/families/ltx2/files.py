"""LTX-2, 2.3 and 2.5."""

from typing import Any

from ..architecture import Architecture, Config, Tensors, Weights, layers, renamed, single_file

HEADS = 32
"""The number of heads that ComfyUI assumes where a file does not say it."""

_BLOCK = "transformer_blocks.0"


def _config(weights: Weights) -> Config:
    said = weights.described("transformer")
    width, audio_width = weights.rows("proj_in.weight"), weights.rows("audio_proj_in.weight")
    heads, audio_heads = said.get("num_attention_heads", HEADS), said.get("audio_num_attention_heads", HEADS)
    longest, rows, columns = said.get("positional_embedding_max_pos", (20, 2048, 2048))
    (audio_longest,) = said.get("audio_positional_embedding_max_pos", (20,))
    return {
        "in_channels": weights.columns("proj_in.weight"),
        "out_channels": weights.rows("proj_out.weight"),
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "cross_attention_dim": weights.columns(f"{_BLOCK}.attn2.to_k.weight"),
        "audio_in_channels": weights.columns("audio_proj_in.weight"),
        "audio_out_channels": weights.rows("audio_proj_out.weight"),
        "audio_num_attention_heads": audio_heads,
        "audio_attention_head_dim": audio_width // audio_heads,
        "audio_cross_attention_dim": weights.columns(f"{_BLOCK}.audio_attn2.to_k.weight"),
        "num_layers": weights.count("transformer_blocks"),
        "pos_embed_max_pos": longest,
        "base_height": rows,
        "base_width": columns,
        "audio_pos_embed_max_pos": audio_longest,
        "rope_type": said.get("rope_type", "interleaved"),
        "rope_double_precision": said.get("frequencies_precision", "float32") == "float64",
        "timestep_scale_multiplier": said.get("timestep_scale_multiplier", 1000),
        "cross_attn_timestep_scale_multiplier": said.get("av_ca_timestep_scale_multiplier", 1),
    } | _parts(weights)


def _parts(weights: Weights) -> Config:
    """Return the entries that say which layers the model has."""
    projects = "caption_projection.linear_2.weight" in weights
    modulated = weights.rows(f"{_BLOCK}.scale_shift_table") == 9
    caption = {"caption_channels": weights.columns("caption_projection.linear_1.weight")} if projects else {}
    return caption | {
        "use_prompt_embeddings": projects,
        "gated_attn": f"{_BLOCK}.attn1.to_gate_logits.weight" in weights,
        "audio_gated_attn": f"{_BLOCK}.audio_attn1.to_gate_logits.weight" in weights,
        "cross_attn_mod": modulated,
        "audio_cross_attn_mod": weights.rows(f"{_BLOCK}.audio_scale_shift_table") == 9,
        "use_prompt_adaln_single": not modulated or "prompt_adaln.linear.weight" in weights,
        "ff_bias": f"{_BLOCK}.ff.net.0.proj.bias" in weights,
        "audio_ff_bias": f"{_BLOCK}.audio_ff.net.0.proj.bias" in weights,
        "use_keyframes_abs_pos_embedding": "keyframes_abs_pos_embedding" in weights,
    }


def _expected(config: Config) -> dict[str, tuple[Any, ...]]:
    """Return what diffusers' class computes with, by the names of ComfyUI's settings."""
    same = (
        "num_layers", "num_attention_heads", "attention_head_dim", "cross_attention_dim", "in_channels",
        "audio_num_attention_heads", "audio_attention_head_dim", "audio_cross_attention_dim", "audio_in_channels",
        "ff_bias", "audio_ff_bias", "use_prompt_adaln_single", "use_keyframes_abs_pos_embedding",
    )  # fmt: skip
    return {name: (config[name],) for name in same} | {
        "image_model": ("ltxav",),
        "rope_type": ("split", "interleaved"),
        "frequencies_precision": ("float32", "float64"),
        "positional_embedding_theta": (10000.0,),
        "vae_scale_factors": ([8, 32, 32],),
        "causal_temporal_positioning": (True,),
        "use_middle_indices_grid": (True,),
        "caption_proj_before_connector": (not config["use_prompt_embeddings"],),
        "cross_attention_adaln": (config["cross_attn_mod"],),
        "apply_gated_attention": (config["gated_attn"],),
    }


_TO_DIFFUSERS = single_file("convert_ltx2_transformer_to_diffusers")
_LATER = (("audio_prompt_adaln_single.", "audio_prompt_adaln."), ("prompt_adaln_single.", "prompt_adaln."))
"""Layers of 2.3 and 2.5 that diffusers' converter, which is 2.0's, leaves as they are."""


def _convert(tensors: Tensors) -> Tensors:
    projection = [name for name in tensors if "caption_projection." in name]
    one_layer = bool(projection) and not any(".linear_2." in name for name in projection)
    unused = projection if one_layer else ()  # belongs to the connectors then
    kept = {name: tensor for name, tensor in tensors.items() if name not in unused}
    return {renamed(name, _LATER): tensor for name, tensor in _TO_DIFFUSERS(kept).items()}


_LAYERS = layers("""
    audio_caption_projection audio_proj_in audio_proj_out audio_scale_shift_table audio_time_embed caption_projection
    audio_prompt_adaln av_cross_attn_audio_scale_shift av_cross_attn_audio_v2a_gate av_cross_attn_video_a2v_gate
    av_cross_attn_video_scale_shift keyframes_abs_pos_embedding prompt_adaln proj_in proj_out scale_shift_table
    time_embed
    transformer_blocks(attn1 attn2 ff scale_shift_table audio_attn1 audio_attn2 audio_ff audio_scale_shift_table
    audio_to_video_attn video_to_audio_attn prompt_scale_shift_table audio_prompt_scale_shift_table
    video_a2v_cross_attn_scale_shift_table audio_a2v_cross_attn_scale_shift_table scale_shift_table_a2v_ca_audio
    scale_shift_table_a2v_ca_video)
    adaln_single audio_adaln_single audio_patchify_proj audio_prompt_adaln_single av_ca_a2v_gate_adaln_single
    av_ca_audio_scale_shift_adaln_single av_ca_v2a_gate_adaln_single av_ca_video_scale_shift_adaln_single
    patchify_proj prompt_adaln_single audio_embeddings_connector video_embeddings_connector
""")

ARCHITECTURE = Architecture(
    class_name="LTX2VideoTransformer3DModel",
    native=("audio_patchify_proj.weight", "audio_adaln_single.linear.weight",
            "transformer_blocks.0.scale_shift_table_a2v_ca_audio",
            "transformer_blocks.0.video_to_audio_attn.to_q.weight"),
    diffusers=("audio_proj_in.weight", "audio_time_embed.linear.weight",
               "transformer_blocks.0.audio_a2v_cross_attn_scale_shift_table",
               "transformer_blocks.0.video_to_audio_attn.to_q.weight"),
    config=_config,
    convert=_convert,
    layers=_LAYERS,
    renamed={
        "proj_in": "patchify_proj", "audio_proj_in": "audio_patchify_proj", "prompt_adaln": "prompt_adaln_single",
    },
    one_first={"keyframes_abs_pos_embedding": 2},
    expected=_expected,
)  # fmt: skip
