"""Checks of the values in a request's tensors, on rank 0, which has them."""

from collections.abc import Mapping

import torch
from torch import Tensor


def first_not_finite(tensors: Mapping[str, Tensor]) -> int:
    """Index of the first tensor that holds NaN or infinity; -1 if none does."""
    for index, tensor in enumerate(tensors.values()):
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            return index
    return -1


def first_outside(tensors: Mapping[str, Tensor], rows: Mapping[str, int]) -> tuple[int, int]:
    """Return the index of the first tensor with a number outside its table, and the number; -1 and 0 if all are inside.

    Args:
        rows: number of rows of each embedding table, see ``Family.embedding_sizes``.
    """
    for index, (name, tensor) in enumerate(tensors.items()):
        most = rows.get(name.rpartition(".")[2])
        bad = [] if most is None else tensor[(tensor < 0) | (tensor >= most)].tolist()
        if bad:
            return index, bad[0]
    return -1, 0
