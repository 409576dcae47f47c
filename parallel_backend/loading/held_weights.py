"""Weights that a rank holds when it is to hold another part of the same transformer.

What both parts have stays where it is. The rest of the old part stays too as long as there is room, so that the way
back costs nothing. What the rank does not hold is read from the files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..interfaces.tensor_cuts import Slices
from ..progress import PROGRESS
from .weight_source import WeightSource

Parts = tuple[slice, ...] | None
"""Slices of a parameter's dim; None for the whole parameter."""
Cut = tuple[int, tuple[slice, ...]]
"""The dim of a parameter that is cut, and its slices."""
_HALF = 2
"""Bytes of a number from which on torch multiplies by it in any layout. Kernels for smaller ones want whole rows."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of a parameter's dim.

    Attributes:
        of: where it is in the parameter.
        place: where a rank has it in what it holds of the parameter; None if it does not have it.
    """

    of: slice
    place: slice | None

    @property
    def length(self) -> int:
        """How long it is."""
        length: int = self.of.stop - self.of.start
        return length

    def joined(self, after: "Piece") -> "Piece | None":
        """Return both pieces as one; None if they do not follow each other."""
        if self.of.stop != after.of.start or (self.place is None) != (after.place is None):
            return None
        of = slice(self.of.start, after.of.stop)
        if self.place is None or after.place is None:
            return Piece(of=of, place=None)
        if self.place.stop != after.place.start:
            return None
        return Piece(of=of, place=slice(self.place.start, after.place.stop))


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank holds of a parameter.

    Attributes:
        tensor: the slices of the parameter, concatenated.
        dim: the dim that is cut.
        parts: the slices.
    """

    tensor: Tensor
    dim: int
    parts: Parts

    def axis(self, dim: int, wanted: Parts) -> int | None:
        """Return the dim along which parts of both can be compared; None if they are cut along two dims."""
        if wanted is None:
            return self.dim
        return dim if self.parts is None or self.dim == dim else None

    def pieces(self, dim: int, wanted: tuple[slice, ...]) -> list[Piece]:
        """Return what is wanted along a dim as pieces, in its order.

        Args:
            dim: one that ``axis`` returns.
        """
        have = (slice(0, self.tensor.shape[dim]),) if self.parts is None else self.parts
        pieces: list[Piece] = []
        for part in wanted:
            for piece in _found(part, have):
                joined = pieces[-1].joined(piece) if pieces else None
                pieces[-1:] = [joined] if joined else [*pieces[-1:], piece]
        return pieces

    def view(self, dim: int, pieces: list[Piece]) -> Tensor | None:
        """Return the pieces without a copy; None if they are several, or kernels may not take them so."""
        if len(pieces) > 1 or pieces[0].place is None:
            return None
        view = _narrow(self.tensor, dim, pieces[0].place)
        return view if view.is_contiguous() or (view.is_floating_point() and view.itemsize >= _HALF) else None


class HeldWeights:
    """What a rank holds of the parameters of a transformer.

    Args:
        held: by the parameter's name.

    Attributes:
        spare: bytes that it keeps from being freed, beyond those of the part that was filled from it.
    """

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = dict(held)
        self.spare = sum(each.tensor.nbytes for each in self._held.values())

    @classmethod
    def of(cls, module: nn.Module, slices: Slices) -> "HeldWeights":
        """Return what a loaded part holds.

        Args:
            slices: of the parameters that were cut.
        """
        return cls({name: _held(each.detach(), slices.get(name)) for name, each in _parameters(module).items()})

    def joined(self, more: "HeldWeights") -> "HeldWeights":
        """Return what both hold; of a parameter that is in both, what ``more`` holds."""
        return HeldWeights(self._held | more._held)

    def without(self, names: frozenset[str]) -> "HeldWeights":
        """Return what is held of the other parameters."""
        return HeldWeights({name: each for name, each in self._held.items() if name not in names})

    def fill(self, module: nn.Module, slices: Slices, source: WeightSource) -> frozenset[str]:
        """Give a part on the meta device those of its parameters of which something is held; return their names.

        A parameter is a view of what is held where that has all of it in one stretch. Else it gets memory, and what is
        not held is read. What is held stays if it is more than the part has, for a later part, and is freed if not.
        """
        filled = set()
        for name, empty in _parameters(module).items():
            weight = self._weight(name, empty, slices.get(name), source)
            if weight is not None:
                PROGRESS.tick()
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, nn.Parameter(weight, requires_grad=False))
                filled.add(name)
        self.spare = self._beyond(module)
        return frozenset(filled)

    def leave(self, module: nn.Module) -> bool:
        """Free what is held beyond a part. Its parameters that are views get memory of their own, one by one.

        Returns:
            Whether anything was freed. Ends early where a copy has no room.
        """
        parameters, before = _parameters(module), len(self._held)
        for name in sorted(self._held, key=parameters.__contains__):  # what needs no copy first: it makes room
            parameter = parameters.get(name)
            if parameter is not None and _is_view(parameter, self._held[name].tensor):
                try:
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
                except torch.OutOfMemoryError:
                    break
            del self._held[name]
        self.spare = self._beyond(module)
        return len(self._held) < before

    def clear(self) -> None:
        """Hold nothing any more."""
        self._held.clear()
        self.spare = 0

    def _beyond(self, module: nn.Module) -> int:
        parameters = _parameters(module)
        views = (
            name for name, each in self._held.items() if name in parameters and _is_view(parameters[name], each.tensor)
        )
        return sum(each.tensor.nbytes for each in self._held.values()) - sum(parameters[name].nbytes for name in views)

    def _weight(self, name: str, empty: Tensor, cut: Cut | None, source: WeightSource) -> Tensor | None:
        """Return a parameter's weight; None if nothing of it is held."""
        held, (dim, wanted) = self._held.pop(name, None), cut or (0, None)
        if held is None:
            return None
        if wanted == ():
            self._held[name] = held
            return None
        if wanted is None and held.parts is None:
            return held.tensor
        axis = held.axis(dim, wanted)
        if axis is None:
            return None
        pieces = held.pieces(axis, wanted or (slice(0, empty.shape[axis]),))
        if all(piece.place is None for piece in pieces):
            return None
        if held.tensor.numel() > empty.numel() and not any(piece.place is None for piece in pieces):
            self._held[name] = held
        if (view := held.view(axis, pieces)) is not None:
            return view
        weight = torch.empty(empty.shape, dtype=empty.dtype, device=held.tensor.device)
        _copy(pieces, held.tensor, name, axis, weight, source)
        return weight


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def _held(tensor: Tensor, cut: Cut | None) -> Held:
    dim, parts = cut or (0, None)
    return Held(tensor=tensor, dim=dim, parts=parts)


def _found(wanted: slice, have: tuple[slice, ...]) -> Iterator[Piece]:
    """Yield the pieces of one stretch."""
    starts = [sum(part.stop - part.start for part in have[:i]) for i in range(len(have))]
    position = wanted.start
    while position < wanted.stop:
        inside = next((i for i, part in enumerate(have) if part.start <= position < part.stop), None)
        if inside is None:
            stop = min([wanted.stop, *(part.start for part in have if part.start > position)])
            yield Piece(of=slice(position, stop), place=None)
        else:
            stop = min(wanted.stop, have[inside].stop)
            start = starts[inside] + position - have[inside].start
            yield Piece(of=slice(position, stop), place=slice(start, start + stop - position))
        position = stop


def _copy(pieces: list[Piece], held: Tensor, name: str, dim: int, into: Tensor, source: WeightSource) -> None:
    position = 0
    for piece in pieces:
        target = into.narrow(dim, position, piece.length)
        if piece.place is None:
            source.read(name, dim, (piece.of,), None, into=target)
        else:
            target.copy_(_narrow(held, dim, piece.place))
        position += piece.length


def _is_view(parameter: Tensor, of: Tensor) -> bool:
    """Whether a parameter is a part of a tensor."""
    same = parameter.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    return same and parameter.numel() > 0


def _narrow(tensor: Tensor, dim: int, part: slice) -> Tensor:
    return tensor.narrow(dim, part.start, part.stop - part.start)
