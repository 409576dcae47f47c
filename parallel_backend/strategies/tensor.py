"""Tensor parallelism (Megatron-LM, https://arxiv.org/abs/1909.08053).

Attention is cut by heads, the feed-forward by hidden features. Query heads that share a key head stay together. The
ranks' partial outputs of a layer are summed; a norm over all heads sums its squares. The numbers of heads and features
need not be divisible by the number of ranks, but every rank needs at least one of each. Exact.
"""

from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.mesh import Axis
from ..errors import InvalidRequest
from ..interfaces.strategy import Workload
from ..interfaces.tensor_cuts import (
    ColumnParallel,
    Cut,
    Cuts,
    CutsItself,
    HeadCounts,
    HeadOutputs,
    HeadsNorm,
    ParameterCut,
    RowParallel,
    Segment,
    Slices,
    local_ranges,
)
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from ..layout.split import Split
from ..operators import sum_over


class TensorParallel:
    """Cuts weights instead of tokens: every rank of the axis computes with all tokens of its row."""

    axes = ("tensor",)

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Every rank needs at least one key head with its query heads.

        Raises:
            InvalidRequest: there are more ranks than key heads.
        """
        fewest = min(workload.geometry.sites, key=lambda site: site.groups)
        heads = fewest.groups
        if layout.tensor > heads:
            kind = "attention" if heads == fewest.heads else "key"
            raise InvalidRequest(
                f"layout tensor={layout.tensor}: this model has {heads} {kind} heads and each rank needs one, so "
                f"tensor is at most {heads}"
            )

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count ``2 (n - 1) / n`` times the size of every tensor summed over ``n`` ranks: a ring all-reduce."""
        place = layout.coordinates(rank)
        summed_bytes = 0
        for samples, extent in workload.local_branches(layout, place):
            for summed in workload.geometry.all_reduces:
                tokens = extent.context.get(summed.tokens)
                if tokens is None:
                    by_rank = workload.tokens_by_rank(layout, extent, summed.tokens)
                    tokens = max(by_rank[place["sequence"]], summed.min_rows)
                size = summed.itemsize or workload.itemsize
                summed_bytes += samples * extent.rows * summed.count * tokens * summed.width * size
        return 2 * (layout.tensor - 1) * summed_bytes // layout.tensor


def cut(module: nn.Module, cuts: Cuts, axis: Axis, split: Split, groups: Collection[int]) -> Slices:
    """Cut a transformer on the meta device, so that it computes this rank's part once the weights are loaded.

    Args:
        module: the transformer, modified in place.
        cuts: how to cut its layers, by name, with ``*`` for all children of a module.
        axis: the ranks.
        split: shares the units.
        groups: numbers of groups of heads in the model's attention. So many units are shared as heads.

    Returns:
        The slices to load of each parameter that was cut.
    """
    slices: dict[nn.Parameter, tuple[int, tuple[slice, ...]]] = {}

    def shares(units: int) -> Partition:
        return split.cut_heads(units) if units in groups else split.columns(units)

    for pattern, each in cuts.items():
        for layer in _named(module, pattern.split(".")):
            _Style(each, axis, shares, slices).apply(layer)
    return {name: slices[parameter] for name, parameter in module.named_parameters() if parameter in slices}


def _named(module: nn.Module, pattern: list[str]) -> Iterator[nn.Module]:
    for path, layer in module.named_modules():
        parts = path.split(".")
        if len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern)):
            yield layer


class _Style:
    """Applies one ``Cut`` to a module, and records in ``slices`` what this rank holds of each parameter."""

    def __init__(
        self,
        cut: Cut,
        axis: Axis,
        shares: Callable[[int], Partition],
        slices: dict[nn.Parameter, tuple[int, tuple[slice, ...]]],
    ) -> None:
        self.cut, self.axis, self.shares, self.slices = cut, axis, shares, slices

    def apply(self, module: nn.Module) -> None:
        group = "" if self.axis.group is None else self.axis.group.group_name
        match self.cut:
            case ColumnParallel(segments):
                self._shrink(module, "weight", 0, segments)
                self._shrink(module, "bias", 0, segments)
            case RowParallel(segments):
                self._shrink(module, "weight", 1, segments)
                bias: Any = module.bias
                if bias is not None and self.axis.index:
                    self.slices[bias] = (0, ())  # zeros: the sum gets the bias from the first rank
                module.register_forward_hook(lambda _module, _inputs, out: sum_over(group, out))
            case HeadsNorm(heads):
                self._shrink(module, "weight", 0, (heads,))
                module.forward = _HeadsNorm(module, heads, group)
            case HeadOutputs(heads, dim):
                (local,) = local_ranges((heads,), self.shares, self.axis.index)
                start, length = local.start, local.stop - local.start
                module.register_forward_hook(
                    lambda _module, _inputs, outs: tuple(out.narrow(dim, start, length) for out in outs)
                )
            case ParameterCut(name, dim, segments):
                self._shrink(module, name, dim, segments)
            case HeadCounts(attributes):
                for name, (units, size) in attributes.items():
                    setattr(module, name, self.shares(units).sizes[self.axis.index] * size)

    def _shrink(self, module: nn.Module, name: str, dim: int, segments: tuple[Segment, ...]) -> None:
        """Replace a parameter by one of the size of this rank's part along ``dim``."""
        local = tuple(local_ranges(segments, self.shares, self.axis.index))
        if name == "weight" and isinstance(module, CutsItself):
            self.slices |= module.cut_weight(dim, local)
            return
        whole: nn.Parameter | None = getattr(module, name)
        if whole is None:
            return
        assert sum(units * size for units, size in segments) == whole.shape[dim], (name, segments, whole.shape)
        shape = list(whole.shape)
        shape[dim] = sum(part.stop - part.start for part in local)
        parameter = nn.Parameter(whole.new_empty(shape), requires_grad=False)
        setattr(module, name, parameter)
        self.slices[parameter] = (dim, local)


class _HeadsNorm:
    """The forward of ``torch.nn.RMSNorm`` over features that are split over several ranks."""

    def __init__(self, module: Any, heads: Segment, group: str) -> None:
        self.module, self.features, self.group = module, heads[0] * heads[1], group

    def __call__(self, x: Tensor) -> Tensor:
        squares = sum_over(self.group, x.float().square().sum(dim=-1, keepdim=True))
        eps = torch.finfo(x.dtype).eps if self.module.eps is None else self.module.eps
        normed = x.float() * torch.rsqrt(squares / self.features + eps)
        return (normed if self.module.weight is None else normed * self.module.weight).to(x.dtype)
