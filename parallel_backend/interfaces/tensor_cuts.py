"""How tensor parallelism cuts the layers of a block: what a family says, and what the strategy carries out.

Column- and row-parallel linear layers as in Megatron-LM (https://arxiv.org/abs/1909.08053). A layer's features are a
list of blocks, because families fuse layers (q, k, v and the feed-forward in one), and each is cut by whole units:
heads, or single features. Units need not divide by the number of ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..layout.partition import Partition

Block = tuple[int, int]
"""Number of units, and features of a unit."""


@dataclass(frozen=True)
class ColumnParallel:
    """A linear layer cut by its outputs, which ``blocks`` are."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class RowParallel:
    """A linear layer cut by its inputs, which ``blocks`` are; the ranks' outputs are summed."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class HeadsNorm:
    """An RMS norm over the features of all heads: its mean square is that of all ranks."""

    heads: Block


@dataclass(frozen=True)
class HeadCounts:
    """Attributes of a module that count what is cut: heads, or features."""

    attributes: Mapping[str, Block]


@dataclass(frozen=True)
class HeadOutputs:
    """A module without weights whose outputs end in the features of all heads; those of the own heads are kept."""

    heads: Block


@dataclass(frozen=True)
class ParameterCut:
    """A parameter that is a module's own and no layer's, cut along ``dim``: the frequencies of every head, say."""

    name: str
    dim: int
    blocks: tuple[Block, ...]


Cut = ColumnParallel | RowParallel | HeadsNorm | HeadCounts | HeadOutputs | ParameterCut

Slices = Mapping[str, tuple[int, tuple[slice, ...]]]
"""By the name of a parameter, the dim that is cut and what a rank holds of it; no slice where it holds zeros."""

Cuts = Mapping[str, Cut]
"""By the name of a module below the transformer, ``*`` being the number of a layer; no name is the transformer."""


def attention(prefix: str, heads: int, head_dim: int, *, text: bool = False, out: bool = True) -> dict[str, Cut]:
    """The cuts of an attention module with diffusers' usual names.

    Args:
        text: whether it has projections of its own for text.
        out: whether it has an output projection.
    """
    block = ((heads, head_dim),)
    names = ["to_q", "to_k", "to_v"] + (["add_q_proj", "add_k_proj", "add_v_proj"] if text else [])
    cuts: dict[str, Cut] = {f"{prefix}.{name}": ColumnParallel(block) for name in names}
    cuts |= {f"{prefix}.to_out.0": RowParallel(block)} if out else {}
    return cuts | {prefix: HeadCounts({"heads": (heads, 1)})}


def ranges(blocks: tuple[Block, ...], degree: int, index: int) -> Iterator[slice]:
    """The features of the ``index``-th of ``degree`` ranks."""
    start = 0
    for units, size in blocks:
        own = Partition.even(units, degree).slice(index)
        yield slice(start + own.start * size, start + own.stop * size)
        start += units * size
