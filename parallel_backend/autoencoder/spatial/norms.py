"""GroupNorm whose groups lie on several ranks: statistics merged as (count, mean, variance), as Chan et al. 1979 do.

Sums and sums of squares in float32 would lose the variance where the mean is large beside it.
"""

import torch
from torch import Tensor, nn

from ...distributed.collectives import all_gather
from .rows import Rows


class MergedNorm:
    """A ``GroupNorm``'s ``forward`` on ``[N, C, ...]`` of the own rows, with the statistics of all rows."""

    def __init__(self, layer: nn.GroupNorm, rows: Rows) -> None:
        self.layer, self.rows = layer, rows

    def __call__(self, x: Tensor) -> Tensor:
        """As the layer is called."""
        layer, given = self.layer, x.dtype
        x = x.to(torch.promote_types(given, torch.float32)).contiguous()
        normed, own = _alone(x, layer)
        mean, variance = self._merge(own)
        scale = torch.rsqrt(variance + layer.eps).repeat_interleave(layer.num_channels // layer.num_groups, dim=1)
        shift = -mean.repeat_interleave(layer.num_channels // layer.num_groups, dim=1) * scale
        if layer.affine:
            scale, shift = scale * layer.weight, shift * layer.weight + layer.bias
        by_channel = (*scale.shape, *[1] * (x.ndim - 2))
        return torch.addcmul(shift.view(by_channel), x, scale.view(by_channel), out=normed).to(given)

    def _merge(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance ``[N, groups]`` over all ranks, of those of each rank's own rows."""
        every = torch.stack(all_gather(own, [own.shape] * self.rows.axis.size, self.rows.axis)).double()
        sizes = self.rows.latent.sizes
        share = torch.tensor(sizes, device=own.device, dtype=torch.double).div_(sum(sizes)).view(-1, 1, 1)
        means, variances = every.unbind(1)
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean) ** 2)).sum(0)
        return mean.to(own.dtype), variance.to(own.dtype)


def _alone(x: Tensor, layer: nn.GroupNorm) -> tuple[Tensor, Tensor]:
    """``x`` as it would be normed by itself, and mean and variance of its groups, ``[2, N, groups]``.

    On a CPU no other function of torch is nearly as fast at these.
    """
    count = x[0, 0].numel()
    normed, mean, rstd = torch.native_group_norm(x, None, None, len(x), x.shape[1], count, layer.num_groups, layer.eps)
    return normed, torch.stack([mean, rstd.double() ** -2 - layer.eps]).to(x.dtype)
