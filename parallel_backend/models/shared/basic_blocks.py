"""What families share whose layers are diffusers' ``BasicTransformerBlock``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.tensor_cuts import ColumnParallel, Cut, RowParallel, attention

_GATED = ("geglu", "swiglu")
"""Activations whose layer has a second half of outputs, the gate."""


def block_cuts(prefix: str, config: Mapping[str, Any], *, cross: bool) -> dict[str, Cut]:
    """The cuts of a block; ``cross`` says whether it has cross-attention."""
    heads = (config["num_attention_heads"], config["attention_head_dim"])
    hidden = (4 * heads[0] * heads[1], 1)
    cuts = attention(f"{prefix}.attn1", *heads) | (attention(f"{prefix}.attn2", *heads) if cross else {})
    blocks = (hidden, hidden) if config["activation_fn"] in _GATED else (hidden,)
    return cuts | {f"{prefix}.ff.net.0.proj": ColumnParallel(blocks), f"{prefix}.ff.net.2": RowParallel((hidden,))}


def check_channels(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a model that predicts neither as many channels as it takes, nor a variance beside each.

    Raises:
        InvalidRequest: it does.
    """
    channels = config["in_channels"]
    if config["out_channels"] not in (None, channels, 2 * channels):
        raise InvalidRequest(
            f"{name} with out_channels {config['out_channels']} is not supported: {channels}, or {2 * channels} with "
            "a learned variance, works"
        )


def check_norm(name: str, config: Mapping[str, Any], wanted: str) -> None:
    """Refuse a ``norm_type`` that is not ``wanted``.

    Raises:
        InvalidRequest: it is another.
    """
    if config["norm_type"] != wanted:
        raise InvalidRequest(f"{name} with norm_type {config['norm_type']!r} is not supported: {wanted!r} works")


def without_variance(values: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Values ``[..., patch * out_channels]`` of tokens, channels last, without the channels of a learned variance."""
    channels, out_channels = config["in_channels"], config["out_channels"]
    if out_channels in (None, channels):
        return values
    predicted: Tensor = values.unflatten(-1, (config["patch_size"] ** 2, out_channels))[..., :channels]
    return predicted.flatten(-2)
