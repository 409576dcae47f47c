"""Predictions as polynomials in time, through those that were computed."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def weights(times: Sequence[float], time: float) -> list[float]:
    """Return the factors of values at ``times`` whose sum is Lagrange's polynomial at ``time``.

    The times differ from one another.
    """
    return [
        prod((time - other) / (own - other) for other in (*times[:i], *times[i + 1 :])) for i, own in enumerate(times)
    ]


def forecast(values: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the sum of values times factors, computed in float32, in the values' dtype.

    One value after the other, so that the same numbers give the same bits everywhere.
    """
    total = torch.zeros(values[0].shape, dtype=torch.float32, device=values[0].device)
    for value, factor in zip(values, factors, strict=True):
        total.add_(value.float(), alpha=factor)
    return total.to(values[0].dtype)
