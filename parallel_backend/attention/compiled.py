"""Attention of compiled blocks: one operator that ``torch.compile`` does not look into.

What computes attention (kernels, key masks, exchanges between ranks) differs from block to block and from call to call.
A compiled block knows none of it: it calls the operator with the attention's number within the block, and the operator,
when it runs, finds where that number is routed to. So all blocks of a kind are the same code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import BackendFailure

_NAMESPACE = "parallel_dit"


class Place:
    """An attention module of a compiled block.

    Args:
        each_sample: whether the module calls attention separately for each sample.

    Attributes:
        attention: where its attention is routed to; None outside of a denoiser call, where it computes torch's.
        calls: how often the block that computes has called it.
    """

    def __init__(self, each_sample: bool) -> None:
        self.each_sample, self.calls = each_sample, 0
        self.attention: Callable[..., Tensor] | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute attention where the place is routed to."""
        self.calls += 1
        if self.attention is None:
            return F.scaled_dot_product_attention(query, key, value, scale=scale)
        return self.attention(query, key, value, scale=scale, sample=self.calls - 1 if self.each_sample else None)


PLACES: WeakKeyDictionary[nn.Module, Place] = WeakKeyDictionary()
"""The attention modules of blocks that are compiled."""

_COMPUTING: list[Sequence[Place]] = []
"""The places of the blocks that compute, the innermost one last: a rank has one thread that computes."""


@contextmanager
def computing(places: Sequence[Place]) -> Iterator[None]:
    """Let a block's attention go through its places.

    Raises:
        BackendFailure: the block has not called an attention as it should. A sharded result would be wrong.
    """
    for place in places:
        place.calls = 0
    _COMPUTING.append(places)
    try:
        yield
    finally:
        _COMPUTING.pop()
    for place in places:
        if place.calls == 0 or (place.calls > 1 and not place.each_sample):
            raise BackendFailure(f"a compiled block called attention {place.calls} times instead of once")


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, number: int) -> Tensor:
    """Return ``[B, tokens, heads, head_dim]``, contiguous: most kernels compute it so, and layers go on with it so."""
    out = _COMPUTING[-1][number].attend(query, key, value, scale)
    tokens = out.transpose(1, 2)
    return tokens.clone(memory_format=torch.contiguous_format) if out is query else tokens.contiguous()


def _shape(query: Tensor, key: Tensor, value: Tensor, scale: float | None, number: int) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


@cache
def _library() -> Any:
    """Define the operator. It lives as long as what this returns."""
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    library.define("attention(Tensor query, Tensor key, Tensor value, float? scale, int number) -> Tensor")
    library.impl("attention", _attend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::attention", _shape, lib=library)
    return library


class Seam(Protocol):
    """What code finds where it looks for attention."""

    sdpa: Callable[..., Tensor]
    dispatch: Callable[..., Tensor]
    functional: Any


class CompiledSeam:
    """The operator in the form in which modules call attention.

    Args:
        number: of the attention within its block. It is a constant of the compiled code.
    """

    def __init__(self, number: int) -> None:
        _library()
        attend = getattr(torch.ops, _NAMESPACE).attention.default

        def sdpa(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, **options: Any) -> Tensor:
            if any(option is not None and option is not False and option != 0.0 for option in options.values()):
                raise BackendFailure(f"a compiled module called attention with {sorted(options)}")
            out: Tensor = attend(query, key, value, scale, number).transpose(1, 2)
            return out

        def dispatch(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            for name in ("attention_kwargs", "backend", "parallel_config"):  # they choose another attention
                options.pop(name, None)
            q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
            return sdpa(q, k, v, **options).transpose(1, 2)

        self.sdpa, self.dispatch = sdpa, dispatch
        functional = ModuleType(F.__name__)
        vars(functional).update(vars(F) | {"scaled_dot_product_attention": sdpa})
        self.functional = functional


compiled_seam = cache(CompiledSeam)
"""The seam of a number; the same one each time, since compiled code looks at what it is."""
