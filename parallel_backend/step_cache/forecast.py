"""Predictions as polynomials in their places in the schedule, through those that were computed."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def weights(places: Sequence[float], place: float) -> list[float]:
    """Return the factors of values at ``places`` whose sum is Lagrange's polynomial at ``place``.

    The places differ from one another.
    """
    return [
        prod((place - other) / (own - other) for other in (*places[:i], *places[i + 1 :]))
        for i, own in enumerate(places)
    ]


def forecast(values: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the sum of values times factors, computed in float32, in the values' dtype.

    One value after the other, so that the same numbers give the same bits everywhere.
    """
    total = torch.zeros(values[0].shape, dtype=torch.float32, device=values[0].device)
    for value, factor in zip(values, factors, strict=True):
        total.add_(value.float(), alpha=factor)
    return total.to(values[0].dtype)
