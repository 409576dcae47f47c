"""Attention with a bias for each pair of a query and a key, by further channels of both.

Each bias is a sum of products of a number of the query and a number of the key. That is a scalar product, so these
numbers become further channels of queries and keys. Such attention is exact, needs no mask of all pairs, and goes
through every strategy and kernel like any other. Values get as many channels of zeros, since kernels want equal widths.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .routing import Attention


class PairBiases:
    """Adds ``sum(queries[i] * keys[j])`` to the score of query ``i`` and key ``j``.

    Args:
        inner: computes attention of the wider tensors.
        queries: the numbers of this rank's queries, ``[B, tokens, channels]``.
        keys: those of its keys. Rows that a module gets beyond these are padding.
    """

    def __init__(self, inner: Attention, queries: Tensor, keys: Tensor) -> None:
        self.inner, self.queries, self.keys = inner, queries, keys

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, tokens, head_dim]``; see ``Attention``."""
        width, channels = query.shape[3], self.queries.shape[2]
        scale = width**-0.5 if scale is None else scale
        wider = _with_channels(query, self.queries / scale, sample), _with_channels(key, self.keys, sample)
        out = self.inner(*wider, F.pad(value, (0, channels)), scale=scale, sample=sample)
        return out[..., :width]


def _with_channels(tensor: Tensor, channels: Tensor, sample: int | None) -> Tensor:
    if sample is not None:
        channels = channels[sample : sample + 1]
    batch, heads, rows, _ = tensor.shape
    padded = F.pad(channels, (0, 0, 0, rows - channels.shape[1])).to(tensor.dtype)
    return torch.cat([tensor, padded[:, None].expand(batch, heads, -1, -1)], dim=3)
