"""Displaced patch parallelism of DistriFusion (https://arxiv.org/abs/2402.19481).

Each position on the ring computes one patch of the tokens. Its queries attend to the patch's current keys and values
and to the other patches' keys and values of the previous call. Those of the current call are sent in the background
while the call continues. Approximate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.key_masks import KeyMask, attend
from ..distributed.collectives import Work, start_exchange, wait_all
from ..distributed.mesh import Axis
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout
from .sequence import site_tokens

KeyValuesBySample = dict[int | None, "SharedKeyValues"]
"""A module's keys and values, by sample; None if they are of all samples at once."""


@dataclass(kw_only=True)
class SharedKeyValues:
    """Keys and values of all patches, which the ranks of the ring exchange.

    Attributes:
        stacked: ``[tokens, 2, B, heads, head_dim]``. Each patch is contiguous.
        works: the exchange in flight.
    """

    stacked: Tensor
    works: Sequence[Work] = ()

    @property
    def keys_values(self) -> tuple[Tensor, Tensor]:
        """Keys and values, ``[B, heads, tokens, head_dim]`` each, as views."""
        keys, values = self.stacked.permute(1, 2, 3, 0, 4)
        return keys, values


def bytes_sent(layout: ParallelLayout, workload: Workload, rank: int) -> int:
    """Count, for each attention of one call, this rank's keys and values, sent to each other rank of the ring."""
    place = layout.coordinates(rank)
    sent = 0
    for samples, extent in workload.local_branches(layout, place):
        for site, count in workload.row_sites(layout, place):
            heads = workload.heads(layout, site, place).local_keys(place["ulysses"])
            tokens = sum(site_tokens(layout, workload, extent, site)[place["ring"]])
            sent += samples * extent.rows * count * 2 * heads * workload.head_dim(site, extent) * tokens
    return (layout.ring - 1) * sent * workload.itemsize


class DisplacedAttention:
    """Attention of one patch's queries to the whole row.

    Args:
        sizes: number of tokens of each patch.
        key_mask: the keys of the whole row that may be attended to; None for all.
        shared: the module's keys and values, which stay between calls.
        fresh: whether to wait for the other patches' keys and values of this call, which makes it exact.
        renews: whether to send this call's keys and values for use in the next call.
    """

    def __init__(
        self,
        axis: Axis,
        sizes: Sequence[int],
        key_mask: KeyMask | None,
        kernel: Kernel,
        shared: KeyValuesBySample,
        *,
        fresh: bool,
        renews: bool,
    ) -> None:
        self.axis, self.sizes, self.key_mask, self.kernel, self.shared = axis, sizes, key_mask, kernel, shared
        self.fresh, self.renews = fresh, renews

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, tokens of the patch, head_dim]``; see ``Attention``."""
        shared = self._shared(key, sample)
        wait_all(shared.works)
        local_patch = shared.stacked.split(self.sizes)[self.axis.index]
        for i, current in enumerate((key, value)):
            local_patch[:, i].copy_(current.permute(2, 0, 1, 3))
        if self.fresh:
            wait_all(self._exchange(shared))
        out = query
        if query.numel():
            out = attend(self.kernel, (query, *shared.keys_values), scale=scale, key_mask=self.key_mask, sample=sample)
        shared.works = self._exchange(shared) if self.renews and not self.fresh else ()
        return out

    def _shared(self, key: Tensor, sample: int | None) -> SharedKeyValues:
        if self.fresh:
            batch, heads, _, head_dim = key.shape
            self.shared[sample] = SharedKeyValues(stacked=key.new_empty(sum(self.sizes), 2, batch, heads, head_dim))
        return self.shared[sample]

    def _exchange(self, shared: SharedKeyValues) -> Sequence[Work]:
        """Start sending this rank's patch to all other ranks and receiving theirs in place."""
        patches = shared.stacked.split(self.sizes)
        return start_exchange([[patches[self.axis.index]]] * self.axis.size, [[patch] for patch in patches], self.axis)
