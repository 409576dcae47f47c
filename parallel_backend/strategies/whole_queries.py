"""Attention of queries that every rank holds whole to keys that are split over the ranks.

Such queries are few: the sound's tokens that attend to the picture. Each rank attends with all of them to its own keys,
and the partial results are merged by their log-sum-exp, as Flash-Decoding does when it splits the keys
(https://pytorch.org/blog/flash-decoding/). Each rank merges a share of the rows (a row is a query of a head). One
exchange brings it their partial results, in the model's dtype as the kernel returns them, with their log-sum-exp in
float32. One gather gives the merged rows to all. So every rank has the same result to the last bit, and sends half of
what a sum in float32 over the ranks would take. Numbers of rows, keys and heads need not be divisible by the number of
ranks, and a rank may hold no key. Exact.
"""

import torch
from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.key_masks import KeyMask, attend_with_lse
from ..distributed.collectives import all_gather, start_all_to_all, wait_all
from ..distributed.mesh import Axis
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from ..layout.split import Split

_LSE = 4
"""Bytes of a log-sum-exp, which is float32."""


class WholeQueries:
    """Merges attention of whole queries to split keys. Works for any number of ranks, queries and keys."""

    axes = ("ring", "ulysses")

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Refuse nothing."""

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count, for each attention, the partial rows that others merge, and the rows that this rank has merged."""
        place, ranks = layout.coordinates(rank), layout.sequence
        if ranks == 1:
            return 0
        sent = 0
        for samples, extent in workload.local_branches(layout, place):
            for site, count in workload.sites(layout, place):
                if site.queries is None:
                    continue
                queries = sum(extent.streams[name] for name in site.queries)
                rows = workload.heads(layout, site, place).queries.total * queries
                own = Split.of(layout).tokens(rows).sizes[place["sequence"]]
                width = site.head_dim * workload.itemsize
                sent += samples * count * ((rows - own) * (width + _LSE) + (ranks - 1) * own * width)
        return sent


class WholeQueriesAttention:
    """Attention of the same queries on all ranks of the axis to the keys and values of all of them.

    Args:
        split: shares the rows to merge.
        keys: number of keys of this rank. Rows of padding after them are left out.
        key_mask: which of these keys may be attended to; None for all.
    """

    def __init__(self, axis: Axis, split: Split, keys: int, key_mask: KeyMask | None, kernel: Kernel) -> None:
        self.axis, self.split, self.keys, self.key_mask, self.kernel = axis, split, keys, key_mask, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, queries, head_dim]``; keys and values are of this rank's tokens. See ``Attention``."""
        qkv = query, key[:, :, : self.keys], value[:, :, : self.keys]
        out, lse = attend_with_lse(self.kernel, qkv, scale=scale, key_mask=self.key_mask, sample=sample)
        batch, head_dim = len(query), query.shape[3]
        rows = self.split.tokens(query.shape[1] * query.shape[2])
        merged = self._merge(out.reshape(batch, rows.total, head_dim), lse.reshape(batch, rows.total), rows)
        gathered = all_gather(merged, [(batch, size, head_dim) for size in rows.sizes], self.axis)
        return torch.cat(gathered, dim=1).view(query.shape)

    def _merge(self, out: Tensor, lse: Tensor, rows: Partition) -> Tensor:
        """Exchange partial rows ``[B, rows, head_dim]`` and merge this rank's, ``[B, own rows, head_dim]``."""
        (batch, _, head_dim), own = out.shape, rows.sizes[self.axis.index]
        packed = torch.cat([out, lse[..., None].contiguous().view(out.dtype)], dim=2)
        width = batch * packed.shape[2]
        sent = torch.cat([part.reshape(-1) for part in packed.split(rows.sizes, dim=1)])
        received = sent.new_empty(self.axis.size * own * width)
        sizes = [size * width for size in rows.sizes], [own * width] * self.axis.size
        wait_all(start_all_to_all(sent, sizes[0], received, sizes[1], self.axis))
        partial, partial_lse = received.view(self.axis.size, batch, own, -1).tensor_split([head_dim], dim=3)
        shares = partial_lse.contiguous().view(torch.float32).softmax(dim=0)
        return (partial.float() * shares).sum(dim=0).to(out.dtype)
