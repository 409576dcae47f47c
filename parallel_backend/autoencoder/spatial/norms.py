"""GroupNorm on one rank's block of rows, with mean and variance over the rows of all ranks.

GroupNorm subtracts the mean of a group of channels over all pixels and divides by their standard deviation, so both
depend on all rows. Each rank computes mean and variance of its block and sends these two numbers per sample and group
to every other rank. Every rank then merges them (Chan, Golub and LeVeque 1979), with each rank's share of the rows as
its weight:

    mean     = sum(share * rank_mean)
    variance = sum(share * (rank_variance + (rank_mean - mean) ** 2))

These are the mean and variance of the whole, since all rows have equally many values. The second term of the variance
counts how far the ranks' means lie apart; averaging variances without it is wrong where the means differ. Merging sums
and sums of squares in float32 instead would lose the variance where the mean is large relative to it. The merge is in
float64.
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
        layer, dtype = self.layer, x.dtype
        x = x.to(torch.promote_types(dtype, torch.float32)).contiguous()
        buffer, local_statistics = _group_norm(x, layer)
        mean, variance = self._merge(local_statistics)
        group_size = layer.num_channels // layer.num_groups
        scale = torch.rsqrt(variance + layer.eps).repeat_interleave(group_size, dim=1)
        shift = -mean.repeat_interleave(group_size, dim=1) * scale
        if layer.affine:
            scale, shift = scale * layer.weight, shift * layer.weight + layer.bias
        by_channel = (*scale.shape, *[1] * (x.ndim - 2))
        return torch.addcmul(shift.view(by_channel), x, scale.view(by_channel), out=buffer).to(dtype)

    def _merge(self, local_statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Merge ranks' means and variances ``[2, N, groups]`` to all rows' mean and variance, ``[N, groups]`` each."""
        axis, sizes = self.rows.axis, self.rows.latent.sizes
        statistics = torch.stack(all_gather(local_statistics, [local_statistics.shape] * axis.size, axis)).double()
        share = torch.tensor(sizes, device=local_statistics.device, dtype=torch.double).div_(sum(sizes)).view(-1, 1, 1)
        means, variances = statistics.unbind(1)
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean) ** 2)).sum(0)
        return mean.to(local_statistics.dtype), variance.to(local_statistics.dtype)


def _group_norm(x: Tensor, layer: nn.GroupNorm) -> tuple[Tensor, Tensor]:
    """Return ``x`` normalised with the statistics of this block alone, and these, ``[2, N, groups]``.

    Only the statistics count; the normalised tensor serves as the output buffer. On a CPU torch has no other function
    that computes them nearly as fast.
    """
    count = x[0, 0].numel()
    normed, mean, rstd = torch.native_group_norm(x, None, None, len(x), x.shape[1], count, layer.num_groups, layer.eps)
    return normed, torch.stack([mean, rstd.double() ** -2 - layer.eps]).to(x.dtype)
