"""MiniMax-H3, whole and pruned."""

from typing import Any

from ..architecture import Architecture, Config, Tensors, Weights, layers, renamed

_TABLE = "adaln_t_table"
"""What only pruned files have: the time embedding's curve."""

_PATCH = (1, 2, 2)

_FREQUENCIES = "rope.inv_freq"
"""Rotary frequencies, which only the published names have. diffusers computes the same ones."""

_EPS = 1e-5

_SPARSE = "transformer_blocks.0.attn.to_gate_compress.weight"
"""What files of FastH3 have besides: gates of its sparse attention. Without that attention nothing computes them."""


def _config(weights: Weights) -> Config:
    head_dim, said = weights.rows("transformer_blocks.0.attn.norm_q.weight"), weights.described("transformer")
    eps = {name: said.get(name, _EPS) for name in ("norm_eps", "qk_norm_eps", "final_norm_eps")}
    # diffusers ignores names that begin with an underscore.
    shifts = {f"_{name}": said[name] for name in ("sigma_shift_video", "sigma_shift_audio") if name in said}
    return {
        "num_attention_heads": weights.columns("transformer_blocks.0.attn.to_out.0.weight") // head_dim,
        "attention_head_dim": head_dim,
        "hidden_size": weights.rows("proj_in.weight"),
        "num_layers": weights.count("transformer_blocks"),
        "num_refiner_layers": weights.count("token_refiner.refiner_blocks"),
        "ffn_dim": weights.columns("transformer_blocks.0.ff.net.2.weight"),
        "in_channels": weights.columns("proj_in.weight") // 4,
        "audio_in_channels": weights.columns("audio_proj_in.weight"),
        "patch_size": list(_PATCH),
        "text_dim": weights.columns("context_embedder.weight"),
        "rope_freq_dim": weights.rows(_FREQUENCIES) if _FREQUENCIES in weights else 16,
        **_time(weights), **eps, **shifts, **({"_sparse": True} if _SPARSE in weights else {}),
    }  # fmt: skip


def _time(weights: Weights) -> Config:
    """Return the numbers of the layers for time."""
    if "time_embedder.table" in weights:
        grid, coordinates = weights.shape("time_embedder.table")
        return {"adaln_curve_grid": grid, "time_embed_dim": coordinates}
    return {
        "freq_dim": weights.columns("time_embedder.linear_1.weight"),
        "time_embed_hidden_dim": weights.rows("time_embedder.linear_1.weight"),
        "time_embed_dim": weights.rows("time_embedder.linear_2.weight"),
    }


def _expected(config: Config) -> dict[str, tuple[Any, ...]]:
    """Return the settings that ComfyUI would take from the metadata where they contradict the weights."""
    sizes = {
        "num_layers": "num_layers", "token_refiner_num_layers": "num_refiner_layers", "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads", "attention_head_dim": "attention_head_dim",
        "ffn_hidden_size": "ffn_dim", "latents_dim": "in_channels", "audio_latents_dim": "audio_in_channels",
        "text_dim": "text_dim", "rope_inv_freq_len": "rope_freq_dim", "time_embed_dim": "time_embed_dim",
    }  # fmt: skip
    return {"image_model": ("minimax_h3",), "patch_size": (list(_PATCH),)} | {
        theirs: (config[ours],) for theirs, ours in sizes.items()
    }


_CURVES = (("adaln_proj.linear.", "adaln_proj.curve."), ("norm_out.linear.", "norm_out.curve."))
"""The layers of pruned files that diffusers' class lacks, by its own names."""


def _convert(tensors: Tensors) -> Tensors:
    """Convert with diffusers' converter, which refuses the table of pruned files."""
    from diffusers.loaders import single_file_utils

    others = {name: tensor for name, tensor in tensors.items() if name != _TABLE}
    # It reads the config for another order of rows alone.
    converted: Tensors = single_file_utils.convert_minimax_h3_transformer_checkpoint_to_diffusers(others, {})
    if _TABLE not in tensors:
        return converted
    named = {renamed(name, _CURVES): tensor for name, tensor in converted.items()}
    return named | {"time_embedder.table": tensors[_TABLE]}


_LAYERS = layers("""
    audio_proj_in audio_proj_out context_embedder norm_out proj_in proj_out time_embedder
    token_refiner
    transformer_blocks(adaln_proj attn ff norm1 norm2)
    adaln_t_table audio_patch_proj condition_proj final_layer rope video_patch_proj
    blocks(adaln_proj attn mlp norm1 norm2)
""")

ARCHITECTURE = Architecture(
    class_name="MiniMaxH3Transformer3DModel",
    native=("video_patch_proj.weight", "audio_patch_proj.weight", "blocks.0.adaln_proj.linear.weight"),
    diffusers=("audio_proj_in.weight", "audio_proj_out.weight", "token_refiner.final_norm.weight"),
    config=_config,
    convert=_convert,
    layers=_LAYERS,
    unused=frozenset({_FREQUENCIES}),
    expected=_expected,
    renamed={
        "proj_in": "video_patch_proj", "audio_proj_in": "audio_patch_proj", "context_embedder": "condition_proj",
        "time_embedder.linear_1": "time_embedder.proj_in", "time_embedder.linear_2": "time_embedder.proj_out",
        "time_embedder.table": _TABLE, "transformer_blocks": "blocks",
        "token_refiner.refiner_blocks": "token_refiner.blocks",
        "transformer_blocks.0.attn.norm_q": "blocks.0.attn.q_norm",
        "transformer_blocks.0.attn.to_out.0": "blocks.0.attn.out_proj",
        "transformer_blocks.0.ff.net.2": "blocks.0.mlp.fc2",
    },
)  # fmt: skip
