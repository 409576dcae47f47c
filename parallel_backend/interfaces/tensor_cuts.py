"""How tensor parallelism cuts the layers of a block. A family declares the cuts; the strategy applies them.

Linear layers are column- or row-parallel as in Megatron-LM (https://arxiv.org/abs/1909.08053). Families fuse
layers, such as q, k, v and the feed-forward into one. The features of a fused layer are listed as segments, and each
segment is cut by itself, in whole units: heads, groups of heads, or single features. The number of units need not be
divisible by the number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..layout.partition import Partition

Segment = tuple[int, int]
"""Number of units, and features per unit."""


@dataclass(frozen=True)
class ColumnParallel:
    """A linear layer cut by its outputs, which consist of ``segments``."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class RowParallel:
    """A linear layer cut by its inputs, which consist of ``segments``. The ranks sum their outputs."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class HeadsNorm:
    """An RMS norm over the features of all heads, whose mean square is taken over all ranks."""

    heads: Segment


@dataclass(frozen=True)
class HeadCounts:
    """Attributes of a module that hold a number of heads or of features. Each becomes this rank's number."""

    attributes: Mapping[str, Segment]


@dataclass(frozen=True)
class HeadOutputs:
    """A module without weights whose outputs have the features of all heads in a dim. A rank keeps its heads'."""

    heads: Segment
    dim: int = -1


@dataclass(frozen=True)
class ParameterCut:
    """A parameter of a module itself, outside any layer, cut along ``dim``, such as rotary frequencies per head."""

    name: str
    dim: int
    segments: tuple[Segment, ...]


Cut = ColumnParallel | RowParallel | HeadsNorm | HeadCounts | HeadOutputs | ParameterCut

Slices = Mapping[str, tuple[int, tuple[slice, ...]]]
"""By parameter name, the dim that is cut and the slices that a rank holds. Without slices, the rank holds zeros."""


@runtime_checkable
class CutsItself(Protocol):
    """A layer whose weight is not one parameter with the weight's rows and columns, such as a compressed one."""

    def cut_weight(self, dim: int, parts: tuple[slice, ...]) -> Mapping[Any, tuple[int, tuple[slice, ...]]]:
        """Keep ``parts`` of the weight along ``dim``. Returns, for each new parameter, what to load of it."""


Cuts = Mapping[str, Cut]
"""By module name inside the transformer. ``*`` matches any layer number; the empty name is the transformer itself."""


def attention_cuts(
    prefix: str, heads: int, head_dim: int, *, key_heads: int | None = None, text: bool = False, out: bool = True
) -> dict[str, Cut]:
    """Return the cuts of an attention module with diffusers' usual layer names.

    Args:
        prefix: name of the attention module.
        heads: number of heads.
        head_dim: features of one head.
        key_heads: as in ``AttentionKind``. A unit is then a key head with the query heads that share it.
        text: whether it has separate projections for text.
        out: whether it has an output projection.
    """
    groups = heads if key_heads is None else key_heads
    shared_by = heads // groups
    queries, keys = ((groups, shared_by * head_dim),), ((groups, head_dim),)
    cuts: dict[str, Cut] = {f"{prefix}.to_q": ColumnParallel(queries)}
    cuts |= {f"{prefix}.{name}": ColumnParallel(keys) for name in ("to_k", "to_v")}
    if text:
        cuts |= {f"{prefix}.add_q_proj": ColumnParallel(queries)}
        cuts |= {f"{prefix}.{name}": ColumnParallel(keys) for name in ("add_k_proj", "add_v_proj")}
    cuts |= {f"{prefix}.to_out.0": RowParallel(queries)} if out else {}
    return cuts | {prefix: HeadCounts({"heads": (groups, shared_by)})}


def local_ranges(segments: tuple[Segment, ...], shares: Callable[[int], Partition], index: int) -> Iterator[slice]:
    """Yield, for each segment, the range of a layer's features that a rank holds.

    Args:
        segments: of the layer.
        shares: splits a number of units over the ranks.
        index: of the rank.
    """
    start = 0
    for units, size in segments:
        local_units = shares(units).slice(index)
        yield slice(start + local_units.start * size, start + local_units.stop * size)
        start += units * size
