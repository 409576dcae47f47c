"""Displaced patch parallelism of DistriFusion (https://arxiv.org/abs/2402.19481).

Each place on the ring owns a patch of the tokens. Its queries see its own new keys and values and, of the other
patches, those of the call before, which travel while that call goes on computing. Approximate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.key_masks import KeyMask, attend
from ..distributed.collectives import Work, start, wait
from ..distributed.mesh import Axis
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout
from .sequence import site_tokens

Rows = dict[int | None, "SharedKeyValues"]
"""Of a module, by the sample that they are of."""


@dataclass(kw_only=True)
class SharedKeyValues:
    """Keys and values of all patches, ``[tokens, 2, B, heads, head_dim]``: a patch lies in one piece."""

    both: Tensor
    works: Sequence[Work] = ()

    @property
    def keys_values(self) -> tuple[Tensor, Tensor]:
        """``[B, heads, tokens, head_dim]`` each."""
        keys, values = self.both.permute(1, 2, 3, 0, 4)
        return keys, values


def bytes_sent(layout: ParallelLayout, job: Workload, rank: int) -> int:
    """Per attention of a call the own patch's keys and values, once to each other place on the ring."""
    place = layout.coordinates(rank)
    sent = 0
    for samples, extent in job.own(layout, place):
        for site, count in job.sites(layout, place):
            _, heads = job.heads(layout, site, place)
            own = sum(site_tokens(layout, job, extent, site)[place["ring"]])
            sent += samples * extent.rows * count * 2 * heads * site.head_dim * own
    return (layout.ring - 1) * sent * job.itemsize


class DisplacedAttention:
    """Attention of a patch's queries to the whole row.

    Args:
        sizes: tokens by patch; kept: which of the whole row's may be attended.
        rows: of the module.
        fresh: whether the other patches' keys and values of this call are waited for, so that it is exact.
        renews: whether those of this call are to be there for the next one.
    """

    def __init__(
        self,
        axis: Axis,
        sizes: Sequence[int],
        kept: KeyMask | None,
        kernel: Kernel,
        rows: Rows,
        *,
        fresh: bool,
        renews: bool,
    ) -> None:
        self.axis, self.sizes, self.kept, self.kernel, self.rows = axis, sizes, kept, kernel, rows
        self.fresh, self.renews = fresh, renews

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, tokens of the patch, head_dim]``; see ``Attention``."""
        row = self._row(key, sample)
        wait(row.works)
        own = row.both.split(self.sizes)[self.axis.index]
        for place, new in enumerate((key, value)):
            own[:, place].copy_(new.permute(2, 0, 1, 3))
        if self.fresh:
            wait(self._exchange(row))
        out = query
        if query.numel():
            out = attend(self.kernel, (query, *row.keys_values), scale=scale, kept=self.kept, sample=sample)
        row.works = self._exchange(row) if self.renews and not self.fresh else ()
        return out

    def _row(self, key: Tensor, sample: int | None) -> SharedKeyValues:
        if self.fresh:
            batch, heads, _, head_dim = key.shape
            self.rows[sample] = SharedKeyValues(both=key.new_empty(sum(self.sizes), 2, batch, heads, head_dim))
        return self.rows[sample]

    def _exchange(self, row: SharedKeyValues) -> Sequence[Work]:
        """Start to send the own patch to all others, and to receive theirs in their places."""
        parts = row.both.split(self.sizes)
        own = parts[self.axis.index]
        return start([[own]] * self.axis.size, [[part] for part in parts], self.axis)
