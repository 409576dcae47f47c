"""The name of a text's mask, and placeholder rows for layers that fail on empty streams."""

from torch import Tensor

TEXT_MASK = "encoder_hidden_states_mask"
"""Name of the input ``[B, L]`` that marks the text tokens that count."""


def at_least_one(rows: Tensor) -> Tensor:
    """Return ``[B, S, ...]`` unchanged, or one placeholder row of zeros ``[B, 1, ...]`` if S is 0.

    For modules that fail on empty tensors. The attention seam ignores the placeholder, and the caller drops its output.
    """
    return rows if rows.shape[1] else rows.new_zeros(rows.shape[0], 1, *rows.shape[2:])
