"""What compiled blocks call and ``torch.compile`` does not look into: attention, compressed layers, sums over ranks.

What computes these (kernels, key masks, exchanges between ranks, packages) differs from block to block and from call to
call. Compiled code calls an operator with a number, and the operator finds what has this number in the block that
computes. So all blocks of a kind are the same code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from .errors import BackendFailure
from .progress import PROGRESS


class Place:
    """An attention module of a compiled block.

    Args:
        each_sample: whether the module calls attention separately for each sample.

    Attributes:
        attention: where its attention is routed to; None outside of a denoiser call, where it computes torch's.
        changes_keys: whether that may change keys and values. It gets copies then: a compiler counts on its tensors.
        calls: how often the block that computes has called it.
    """

    def __init__(self, each_sample: bool) -> None:
        self.each_sample, self.calls, self.changes_keys = each_sample, 0, True
        self.attention: Callable[..., Tensor] | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute attention where the place is routed to."""
        self.calls += 1
        if self.attention is None:
            shared = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=shared)
        if self.changes_keys:
            key, value = key.clone(), value.clone()
        return self.attention(query, key, value, scale=scale, sample=self.calls - 1 if self.each_sample else None)


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """What the operators find by number in a compiled block.

    Attributes:
        attention: its attention modules.
        layers: its layers that compute outside of compiled code.
    """

    attention: Sequence[Place]
    layers: Sequence[Callable[[Tensor], Tensor]]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute the block.

        Raises:
            BackendFailure: the block has not called an attention as it should. A sharded result would be wrong.
        """
        for place in self.attention:
            place.calls = 0
        _COMPUTING.append(self)
        try:
            yield
        finally:
            _COMPUTING.pop()
        for place in self.attention:
            if place.calls == 0 or (place.calls > 1 and not place.each_sample):
                raise BackendFailure(f"a compiled block called attention {place.calls} times instead of once")


_ORDER = torch.zeros(1)
"""Each operator says that it changes this. So a compiler keeps their order, which has to be the same on all ranks."""

_COMPUTING: list[Numbered] = []
"""The block that computes is last: a rank has one thread that computes."""


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, number: int) -> Tensor:
    """Compute attention number ``number`` of the block; see ``Attention`` in ``attention/routing.py``."""
    out: Tensor = torch.ops.parallel_dit.attention(query, key, value, scale, number, _ORDER)
    return out.transpose(1, 2)


def layer(x: Tensor, features: int, number: int) -> Tensor:
    """Compute layer number ``number`` of the block, ``[..., in features]`` to ``[..., features]``."""
    out: Tensor = torch.ops.parallel_dit.layer(x, features, number, _ORDER)
    return out


def sum_over(group: str, tensor: Tensor) -> Tensor:
    """Sum a tensor over the ranks of a process group of this name, in place, and return it."""
    (torch.ops.parallel_dit.sum if torch.compiler.is_compiling() else _sum)(tensor, group, _ORDER)
    return tensor


@cache
def define() -> None:
    """Define the operators, before anything is compiled that calls them."""
    for schema, run, shape in (
        ("attention(Tensor query, Tensor key, Tensor value, float? scale, int number, Tensor(a!) order) -> Tensor",
         *_ATTENTION),
        ("layer(Tensor x, int features, int number, Tensor(a!) order) -> Tensor", *_LAYER),
        ("sum(Tensor(a!) tensor, str group, Tensor(b!) order) -> ()", *_SUM),
    ):  # fmt: skip
        name, bracket, rest = schema.partition("(")
        torch.library.define(f"parallel_dit::{name}", bracket + rest)
        torch.library.impl(f"parallel_dit::{name}", "default", run)
        torch.library.register_fake(f"parallel_dit::{name}", shape)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, number: int, order: Tensor) -> Tensor:
    """Return ``[B, tokens, heads, head_dim]``, contiguous: most kernels compute it so, and layers go on with it so."""
    out = _COMPUTING[-1].attention[number].attend(query, key, value, scale)
    tokens = out.transpose(1, 2)
    return tokens.clone(memory_format=torch.contiguous_format) if out is query else tokens.contiguous()


def _attended(query: Tensor, key: Tensor, value: Tensor, scale: float | None, number: int, order: Tensor) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


def _layer(x: Tensor, features: int, number: int, order: Tensor) -> Tensor:
    return _COMPUTING[-1].layers[number](x).contiguous()


def _sum(tensor: Tensor, group: str, order: Tensor) -> None:
    with PROGRESS.waiting():
        dist.all_reduce(tensor, group=_resolve_process_group(group))  # type: ignore[arg-type]


_ATTENTION = (_attend, _attended)
_LAYER = (_layer, lambda x, features, number, order: x.new_empty(*x.shape[:-1], features))
_SUM = (_sum, lambda tensor, group, order: None)
