"""Open-Sora 1.2 in the published names, which our module has, too."""

from collections.abc import Mapping
from typing import Any

from ...errors import InvalidRequest
from ..architecture import Architecture, Config, Weights, layers

CLASS_NAME = "STDiT3"

_HEADS, _SQUARE = 16, 512
"""The published models' heads and side of the square of positions, where neither names nor ``config.json`` tell."""

_CHANNELS = 4

_EXPECTED: Mapping[str, Any] = {"qk_norm_legacy": False, "skip_y_embedder": False}
"""What ``config.json`` may say of settings that change what the model computes, and that no other file shows."""


def _config(weights: Weights) -> Config:
    width, channels, *patch = weights.shape("x_embedder.proj.weight")
    described = weights.beside(CLASS_NAME)
    _check_version(channels, described)
    tokens, captions = weights.shape("y_embedder.y_embedding")
    norm, hidden = "spatial_blocks.0.attn.q_norm.weight", weights.rows("spatial_blocks.0.mlp.fc1.weight")
    return {
        "input_sq_size": described.get("input_sq_size", _SQUARE),
        "in_channels": channels,
        "patch_size": patch,
        "hidden_size": width,
        "depth": weights.count("spatial_blocks"),
        "num_heads": width // weights.rows(norm) if norm in weights else described.get("num_heads", _HEADS),
        "mlp_ratio": hidden / width,
        "pred_sigma": _predicts_variance(weights.rows("final_layer.linear.weight"), channels, patch),
        "caption_channels": captions,
        "model_max_length": tokens,
        "qk_norm": norm in weights,
    }


def _check_version(channels: int, described: Mapping[str, Any]) -> None:
    """Refuse Open-Sora 1.3, whose latents have more channels, and settings that no published 1.2 has.

    Raises:
        InvalidRequest: names the number or the setting.
    """
    if channels != _CHANNELS:
        raise InvalidRequest(
            f"the file holds an Open-Sora whose latents have {channels} channels, as 1.3 has, which is not supported: "
            "choose 1.2 (OpenSora-STDiT-v3) or 2.0"
        )
    for name, value in _EXPECTED.items():
        if described.get(name, value) != value:
            raise InvalidRequest(
                f"the config.json beside the file has {name} {described[name]!r}, which is not supported: {value} is"
            )


def _predicts_variance(values: int, channels: int, patch: list[int]) -> bool:
    """Whether a token's values include a variance for each channel.

    Raises:
        InvalidRequest: the number of values fits neither.
    """
    plain = channels
    for length in patch:
        plain *= length
    if values not in (plain, 2 * plain):
        raise InvalidRequest(f"final_layer.linear gives {values} values a token: {plain} or {2 * plain} would fit")
    return values == 2 * plain


_LAYERS = layers("""
    x_embedder t_embedder fps_embedder t_block y_embedder rope final_layer
    spatial_blocks(attn cross_attn mlp scale_shift_table) temporal_blocks(attn cross_attn mlp scale_shift_table)
""")

ARCHITECTURE = Architecture(
    class_name=CLASS_NAME,
    native=(),
    diffusers=(
        "fps_embedder.mlp.0.weight", "spatial_blocks.0.cross_attn.kv_linear.weight",
        "temporal_blocks.0.cross_attn.kv_linear.weight", "y_embedder.y_embedding",
    ),
    config=_config,
    layers=_LAYERS,
    unused=frozenset({"rope.freqs"}),
)  # fmt: skip
