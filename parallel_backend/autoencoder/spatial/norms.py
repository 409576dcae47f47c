"""GroupNorm on one rank's block of rows, with mean and variance over the rows of all ranks.

GroupNorm subtracts the mean of a group of channels over all pixels and divides by their standard deviation, so both
depend on all rows. Each rank computes mean and variance of its block, and sends to every other rank, for each sample
and group, its share of the rows times the mean and times the mean square. Every rank adds these up:

    mean     = sum(share * rank_mean)
    square   = sum(share * (rank_variance + rank_mean ** 2))
    variance = square - mean ** 2

These are the mean and variance of the whole, since all rows have equally many values. Averaging variances is wrong
where ranks' means differ. The sums are in float64, since in float32 ``square`` would lose the variance where the mean
is large relative to it. A rank's own mean and variance are in float32 at least. Half precision would lose the variance,
too, and its tensors are not converted as a whole: that would take more memory than a VAE in float32 does.
"""

import torch
from torch import Tensor, nn

from ...distributed.collectives import all_gather
from .rows import RowSplit


class MergedNorm:
    """A ``GroupNorm``'s ``forward`` on this rank's rows of ``[N, C, ...]``, with the statistics of all rows."""

    def __init__(self, layer: nn.GroupNorm, rows: RowSplit) -> None:
        self.layer, self.rows = layer, rows

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise in float32 at least; the result has the input's shape and dtype."""
        layer, x = self.layer, x.contiguous()
        buffer, local_statistics = (_half_statistics if x.itemsize < 4 else _statistics)(x, layer)
        mean, variance = self._merge(local_statistics)
        group_size = layer.num_channels // layer.num_groups
        scale = torch.rsqrt(variance + layer.eps).repeat_interleave(group_size, dim=1)
        shift = -mean.repeat_interleave(group_size, dim=1) * scale
        if layer.affine:
            scale, shift = scale * layer.weight, shift * layer.weight + layer.bias
        by_channel = (*scale.shape, *[1] * (x.ndim - 2))
        return torch.addcmul(shift.view(by_channel), x, scale.view(by_channel), out=buffer)

    def _merge(self, local_statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Merge ranks' means and variances ``[2, N, groups]`` to all rows' mean and variance, ``[N, groups]`` each."""
        axis, rows = self.rows.axis, self.rows.latent
        mean, variance = local_statistics.double()
        weighted = torch.stack([mean, variance + mean**2]) * (rows.sizes[axis.index] / rows.total)
        mean, square = torch.stack(all_gather(weighted, [weighted.shape] * axis.size, axis)).sum(0)
        return mean.to(local_statistics.dtype), (square - mean**2).to(local_statistics.dtype)


def _statistics(x: Tensor, layer: nn.GroupNorm) -> tuple[Tensor, Tensor]:
    """Return a buffer like ``x``, and mean and variance of this block alone, ``[2, N, groups]``.

    Only the statistics count; the buffer holds what is normalised with them. On a CPU torch has no other function that
    computes them nearly as fast.
    """
    count = x[0, 0].numel()
    normed, mean, rstd = torch.native_group_norm(x, None, None, len(x), x.shape[1], count, layer.num_groups, layer.eps)
    return normed, torch.stack([mean, rstd.double() ** -2 - layer.eps]).to(x.dtype)


def _half_statistics(x: Tensor, layer: nn.GroupNorm) -> tuple[Tensor, Tensor]:
    """Return the same of a tensor in half precision. On a GPU, both reductions convert while they read."""
    groups = x.view(len(x), layer.num_groups, -1)
    mean = groups.mean(-1, dtype=torch.float32)
    variance = torch.var(groups, -1, correction=0, out=torch.empty_like(mean))
    return torch.empty_like(x), torch.stack([mean, variance])
