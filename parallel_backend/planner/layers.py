"""The layers of a transformer as work: what embedding, blocks and head compute for some of the tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ..attention.routing import Route, routed
from ..distributed.mesh import Axis
from ..families.modules import module_class_of
from ..families.registry import family_of
from ..interfaces.family import Block, Family
from ..interfaces.geometry import Shapes
from ..interfaces.state import State
from ..interfaces.strategy import ParameterShapes
from ..layout.partition import Partition
from ..layout.stream_partition import StreamPartition
from ..loading import partial
from ..loading.offload_plan import PartSizes
from ..loading.transformer_part import sizes_of
from ..strategies.token_split import TokenSplit
from .work import Work, count

META = torch.device("meta")
_LABELS, _MASK = "_labels", "_mask"
Lengths = tuple[tuple[str, int], ...]
"""Number of tokens by stream."""


@dataclass(frozen=True, kw_only=True)
class ForwardWork:
    """What one rank computes in a forward, besides attention that passes the seam.

    Attributes:
        embed: before the blocks, where every rank computes all tokens.
        blocks: with its tokens.
        head: with its tokens.
    """

    embed: Work
    blocks: Work
    head: Work


class Layers:
    """A transformer on the meta device, with inputs of one batch.

    Args:
        class_name: of its module.
        config: of the module.
        shapes: of the inputs of a batch.
        dtype: of weights and activations.
    """

    def __init__(self, class_name: str, config: Mapping[str, Any], shapes: Shapes, dtype: torch.dtype) -> None:
        self.family = on_meta(class_name, config, dtype)
        self.samples = next(iter(shapes.values()))[0]
        self.whole = self.family.extent(config, shapes).whole
        geometry = self.family.geometry
        self._widths = sorted({each.width for each in geometry.all_reduces if not each.itemsize})
        self._inputs = {name: _empty(name, shape, dtype) for name, shape in shapes.items()}

    @cached_property
    def embedded(self) -> tuple[Work, State]:
        """What embedding computes, and the state before block 0."""
        return self._count(lambda: self.family.embed(self._inputs))

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Number of tokens by stream."""
        return {name: tokens.shape[1] for name, tokens in self.embedded[1].streams.items()}

    def work(self, tokens: Mapping[str, int]) -> ForwardWork:
        """Return what a rank computes that holds so many tokens of each stream."""
        return self._work(tuple(sorted(tokens.items())))

    @cache  # noqa: B019 (a planner's layers live as long as its cache)
    def _work(self, tokens: Lengths) -> ForwardWork:
        embed, state = self.embedded
        split = self._split(dict(tokens))
        state = split.shard(state)
        blocks, state = self._blocks(state)
        head, _ = self._count(lambda: self.family.head(split.shard_whole(state)))
        return ForwardWork(embed=embed, blocks=blocks, head=head)

    def _blocks(self, state: State) -> tuple[Work, State]:
        """Count each kind of block once. Blocks of one kind have weights of the same shapes."""
        total, kinds = Work(), dict[tuple[Any, ...], Work]()
        for block in self.family.blocks:
            kind = kind_of(block)
            if not kind or kind not in kinds:
                kinds[kind], state = self._run(block, state)
            total += kinds[kind]
        return total, state

    def _run(self, block: Block, state: State) -> tuple[Work, State]:
        return self._count(lambda: block.run(state))

    def _count(self, run: Any) -> tuple[Work, Any]:
        attend = _NoAttention()
        routes = [Route(site.module, attend, site.each_sample) for site in self.family.attentions]
        with routed(routes):
            return count(run, rows=self.samples, widths=self._widths)

    def _split(self, tokens: Mapping[str, int]) -> TokenSplit:
        streams = {
            name: StreamPartition(((0, Partition((tokens[name], length - tokens[name]))),))
            for name, length in self.lengths.items()
        }
        return TokenSplit(axis=_FIRST_OF_TWO, streams=streams, whole=self.whole)

    @cached_property
    def sizes(self) -> PartSizes:
        """What the whole transformer takes on a device."""
        return sizes_of(self.family)

    @cached_property
    def parameters(self) -> ParameterShapes:
        """Shapes of the weights of all blocks."""
        modules = [module for block in self.family.blocks for module in block.modules]
        return tuple((tuple(each.shape), each.itemsize) for module in modules for each in module.parameters())


def on_meta(class_name: str, config: Mapping[str, Any], dtype: torch.dtype) -> Family:
    """Return a family around a module without memory."""
    with META:  # else layers would make random numbers first, which takes a minute
        module = partial.empty(module_class_of(class_name), config, dtype)
    torch.nn.Module.to(module, META)
    return family_of(class_name)(module.eval().requires_grad_(False))


def kind_of(block: Block) -> tuple[Any, ...]:
    """Return what blocks of the same work have in common: the shapes of their weights."""
    shapes: Sequence[tuple[int, ...]] = [tuple(p.shape) for module in block.modules for p in module.parameters()]
    return (*shapes, block.parts) if shapes else ()


class _NoAttention:
    """Takes no time: attention that passes the seam is counted by layout."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        return query


_FIRST_OF_TWO = Axis(name="sequence", ranks=(0, 1), index=0, group=None, gloo=True)


def _empty(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if name.endswith(_LABELS):
        dtype = torch.int64
    if name.endswith(_MASK):
        dtype = torch.bool
    return torch.empty(tuple(shape), dtype=dtype, device=META)
