"""What several families share about streams: the name of a text's mask, and rows that are made up."""

from torch import Tensor

MASK = "encoder_hidden_states_mask"
"""Name of the input ``[B, L]`` that says which text tokens count."""


def at_least_one(rows: Tensor) -> Tensor:
    """``[B, S, ...]``, or a row of zeros ``[B, 1, ...]`` if there are none.

    For modules that cannot compute on nothing; the seam leaves the row out, and the caller drops what becomes of it.
    """
    return rows if rows.shape[1] else rows.new_zeros(rows.shape[0], 1, *rows.shape[2:])
