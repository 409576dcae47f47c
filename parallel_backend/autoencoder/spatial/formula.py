"""The bytes that a rank should send in one decode or encode, from the shapes that one rank would meet.

Between layers a rank sends the rows that others read beyond their own (``Halo``); mean and variance of every group of
every ``GroupNorm``, to each other rank; and in attention over whole pictures the keys and values of all ranks but the
next one's (``RingAttention``). Besides, the first rank sends what goes in and, part by part, whether to go on, and the
others what comes out. Nothing else: no feature map is gathered.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from ...layout.partition import Partition
from .layers import in_time, reach, walk
from .rows import ROWS, scaled, shared
from .windows import Reach

_FLAG = 8
"""Bytes of a flag."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One call of a layer that needs rows of others: the shapes of the planes that it was given, bytes of a value."""

    layer: nn.Module
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int


@contextmanager
def seen(module: nn.Module) -> Iterator[list[Seen]]:
    """The calls of such layers while the module works on whole pictures."""
    calls: list[Seen] = []

    def note(layer: nn.Module, given: tuple[Any, ...]) -> None:
        planes = [plane for plane in given if isinstance(plane, Tensor)]
        shapes = tuple(tuple(plane.shape) for plane in planes)
        calls.append(Seen(layer=layer, shapes=shapes, itemsize=planes[0].itemsize))

    with ExitStack() as stack:
        for _, layer in walk(module):
            stack.callback(layer.register_forward_pre_hook(note).remove)
        yield calls


def bytes_sent(calls: Sequence[Seen], latent: Partition, rank: int, given: Tensor, made: Tensor, parts: int) -> int:
    """Of one rank.

    Args:
        latent: the rows of the latent by rank.
        given, made: what goes in and what comes out, float32; parts: how often the ranks are told to go on.
    """
    between = sum(_of_call(call, latent, rank) for call in calls)
    if rank:
        return between + made.nbytes * latent.sizes[rank] // latent.total
    others = latent.total - latent.sizes[0]
    return between + given.nbytes * others // latent.total + parts * (len(latent.sizes) - 1) * _FLAG


def _of_call(call: Seen, latent: Partition, rank: int) -> int:
    how, others = reach(call.layer), len(latent.sizes) - 1
    if how is not None:
        return sum(_halo(shape, how, latent, rank) for shape in call.shapes) * call.itemsize
    shape = call.shapes[0]
    if isinstance(call.layer, nn.GroupNorm):
        return others * 2 * shape[0] * call.layer.num_groups * max(4, call.itemsize)
    of_one_row = prod(shape) // shape[1] // shape[ROWS] * _width(call.layer)
    cut = scaled(latent, shape[ROWS])
    return 2 * of_one_row * (cut.total - cut.sizes[(rank + 1) % len(cut.sizes)]) * call.itemsize


def _halo(shape: Sequence[int], how: Reach, latent: Partition, rank: int) -> int:
    """Values of a plane that others read."""
    cut, row = scaled(latent, shape[ROWS]), prod(shape) // shape[ROWS]
    readers = [reader for reader in range(len(latent.sizes)) if reader != rank]
    above, below = how.top * how.stride, how.bottom * how.stride
    return row * sum(count for reader in readers for _, count in shared(cut, rank, reader, above, below))


def _width(layer: Any) -> int:
    """Values of a token's keys in all attention over whole pictures that a layer does."""
    kind = type(layer).__name__
    if kind == "HunyuanVideoMidBlock3D":
        return sum(_width(attention) for attention in layer.attentions if attention is not None)
    if kind == "Attention":
        return 0 if in_time(layer) else int(layer.to_k.out_features)
    return int(layer.to_qkv.out_channels) // 3
