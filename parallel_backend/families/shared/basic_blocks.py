"""Helpers for families whose layers are diffusers' ``BasicTransformerBlock``: DiT, PixArt, Latte."""

from collections.abc import Mapping
from typing import Any

from einops import rearrange
from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.tensor_cuts import ColumnParallel, Cut, RowParallel, attention_cuts

_GATED = ("geglu", "swiglu")
"""Activations whose layer has a second half of outputs, the gate."""


def block_cuts(prefix: str, config: Mapping[str, Any], *, cross: bool) -> dict[str, Cut]:
    """Return the cuts of a block. ``cross`` says whether it has cross-attention."""
    heads = (config["num_attention_heads"], config["attention_head_dim"])
    hidden = (4 * heads[0] * heads[1], 1)
    cuts = attention_cuts(f"{prefix}.attn1", *heads) | (attention_cuts(f"{prefix}.attn2", *heads) if cross else {})
    blocks = (hidden, hidden) if config["activation_fn"] in _GATED else (hidden,)
    return cuts | {f"{prefix}.ff.net.0.proj": ColumnParallel(blocks), f"{prefix}.ff.net.2": RowParallel((hidden,))}


def check_channels(name: str, config: Mapping[str, Any]) -> None:
    """Check that a model predicts as many channels as it takes, optionally with a learned variance for each.

    Raises:
        InvalidRequest: the model predicts another number of channels.
    """
    channels = config["in_channels"]
    if config["out_channels"] not in (None, channels, 2 * channels):
        raise InvalidRequest(
            f"{name} with in_channels {channels} and out_channels {config['out_channels']} is not supported: "
            f"out_channels {channels}, or {2 * channels} with a learned variance, would work"
        )


def check_norm(name: str, config: Mapping[str, Any], wanted: str) -> None:
    """Check that the ``norm_type`` is ``wanted``.

    Raises:
        InvalidRequest: it is not.
    """
    if config["norm_type"] != wanted:
        raise InvalidRequest(f"{name} with norm_type {config['norm_type']!r} is not supported: {wanted!r} would work")


def without_variance(values: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Drop the learned variance from predicted tokens ``[..., patch area * out_channels]``, channels last.

    The variance follows the noise in the channels of each pixel. Without one, return ``values`` unchanged.
    """
    channels, out_channels = config["in_channels"], config["out_channels"]
    if out_channels in (None, channels):
        return values
    by_pixel = rearrange(values, "... (pixels channels) -> ... pixels channels", channels=out_channels)
    return rearrange(by_pixel[..., :channels], "... pixels channels -> ... (pixels channels)")
