"""Weights that a rank holds when it is to hold another part of the same transformer.

What both parts have stays where it is. The rest of the old part stays too as long as there is room, so that the way
back costs little. What the rank does not hold is read from the files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..distributed.device_memory import ran_out
from ..interfaces.tensor_cuts import Slices
from ..progress import PROGRESS
from .weight_source import WeightSource

_Ranges = tuple[slice, ...] | None
"""Slices of a parameter's dim; None for the whole parameter."""
_LEAST_ITEMSIZE = 2
"""Bytes of a number from which on torch multiplies by columns of a matrix. Kernels for smaller ones want whole rows."""


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
        ranges: the slices.
    """

    tensor: Tensor
    dim: int
    ranges: _Ranges

    def used_for(self, empty: Tensor, dim: int, wanted: _Ranges) -> "_Use | None":
        """Return how a weight is made from this; None if nothing of it is here.

        Args:
            empty: of the weight's shape, on the meta device.
            dim: the dim of the parameter that ``wanted`` slices.
            wanted: what the weight has of the parameter.
        """
        if wanted == self.ranges and (wanted is None or dim == self.dim):
            return _Use(held=self, dim=0, pieces=(), view=self.tensor)
        if wanted is not None and self.ranges is not None and dim != self.dim:
            return None
        dim = self.dim if wanted is None else dim
        pieces = self._pieces(dim, (slice(0, empty.shape[dim]),) if wanted is None else wanted)
        if all(piece.place is None for piece in pieces):
            return None
        return _Use(held=self, dim=dim, pieces=pieces, view=self._view(dim, pieces))

    def _pieces(self, dim: int, wanted: tuple[slice, ...]) -> tuple[Piece, ...]:
        """Return what is wanted along a dim as pieces, in its order."""
        have = (slice(0, self.tensor.shape[dim]),) if self.ranges is None else self.ranges
        pieces: list[Piece] = []
        for stretch in wanted:
            for piece in _found(stretch, have):
                joined = pieces[-1].joined(piece) if pieces else None
                pieces[-1:] = [joined] if joined else [*pieces[-1:], piece]
        return tuple(pieces)

    def _view(self, dim: int, pieces: tuple[Piece, ...]) -> Tensor | None:
        """Return one piece without a copy; None if they are several, or kernels had better have a copy.

        On a GPU, a kernel may depend on how far apart rows are, and a copy takes next to no time.
        """
        if len(pieces) > 1 or pieces[0].place is None:
            return None
        view = _narrow(self.tensor, dim, pieces[0].place)
        strided = view.device.type == "cpu" and view.is_floating_point() and view.itemsize >= _LEAST_ITEMSIZE
        return view if strided or view.is_contiguous() else None


@dataclass(frozen=True, kw_only=True)
class _Use:
    """How a weight is made from what is held of its parameter.

    Attributes:
        held: what is held.
        dim: the dim that is cut.
        pieces: the weight's stretches along it; none if the weight is all that is held.
        view: the weight without a copy; None if it has to be copied.
    """

    held: Held
    dim: int
    pieces: tuple[Piece, ...]
    view: Tensor | None

    @property
    def leaves_some(self) -> bool:
        """Whether all of the weight is held, and more."""
        wanted = sum(piece.length for piece in self.pieces)
        return 0 < wanted < self.held.tensor.shape[self.dim] and all(piece.place for piece in self.pieces)

    def made(self, name: str, empty: Tensor, source: WeightSource) -> Tensor:
        """Return the weight; what is not held is read."""
        if self.view is not None:
            return self.view
        weight, position = torch.empty(empty.shape, dtype=empty.dtype, device=self.held.tensor.device), 0
        for piece in self.pieces:
            target = weight.narrow(self.dim, position, piece.length)
            if piece.place is None:
                source.read(name, self.dim, (piece.of,), None, into=target)
            else:
                target.copy_(_narrow(self.held.tensor, self.dim, piece.place))
            position += piece.length
        return weight


class HeldWeights:
    """What a rank holds of the parameters of a transformer.

    Args:
        held: by the parameter's name.

    Attributes:
        spare: bytes that it keeps from being freed: all, or those beyond a part once that is filled from it.
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
        return cls({name: _held(each.detach(), slices, name) for name, each in _parameters(module).items()})

    def joined(self, more: "HeldWeights") -> "HeldWeights":
        """Return what both hold; of a parameter that is in both, what ``more`` holds."""
        return HeldWeights(self._held | more._held)

    def without(self, names: frozenset[str]) -> "HeldWeights":
        """Return what is held of the other parameters."""
        return HeldWeights({name: each for name, each in self._held.items() if name not in names})

    def missing(self, module: nn.Module, slices: Slices) -> int:
        """Return the bytes that filling a part takes at most, beside what is held and less what it frees of that."""
        missing = 0
        for name, empty in _parameters(module).items():
            use = self._use(name, empty, slices)
            if use is None or use.view is None:
                missing += empty.nbytes
            if use and use.view is None and not use.leaves_some:
                missing -= use.held.tensor.nbytes
        return missing

    def fill(self, module: nn.Module, slices: Slices, source: WeightSource) -> frozenset[str]:
        """Give a part on the meta device those of its parameters of which something is held; return their names.

        A parameter is a view of what is held where that has all of it in one stretch. Else it gets memory, and what is
        not held is read. What is held stays if it is more than the part has, for a later part, and is freed if not.
        """
        filled = set()
        for name, empty in _parameters(module).items():
            use = self._use(name, empty, slices)
            if use:
                PROGRESS.tick()
                owner, _, leaf = name.rpartition(".")
                weight = nn.Parameter(use.made(name, empty, source), requires_grad=False)
                setattr(module.get_submodule(owner), leaf, weight)
                filled.add(name)
            if not (use and use.leaves_some) and slices.get(name, (0, None))[1] != ():
                self._held.pop(name, None)
            del use  # it would keep what is held until the next one
        self._count(module)
        return frozenset(filled)

    def free_spare(self, module: nn.Module) -> bool:
        """Free what is held beyond a part. Its parameters that are views get memory of their own, one by one.

        Returns:
            Whether anything was freed. Ends early where a copy has no room.
        """
        parameters, before = _parameters(module), len(self._held)
        views = self._views(parameters)
        for name in sorted(self._held, key=views.__contains__):  # what needs no copy makes room for the others
            if name in views:
                try:
                    parameters[name].data = parameters[name].data.clone(memory_format=torch.contiguous_format)
                except RuntimeError as error:
                    if not ran_out(error):
                        raise
                    break
            del self._held[name]
        self._count(module)
        return len(self._held) < before

    def clear(self) -> None:
        """Hold nothing any more."""
        self._held.clear()
        self.spare = 0

    def _use(self, name: str, empty: Tensor, slices: Slices) -> _Use | None:
        held, (dim, wanted) = self._held.get(name), slices.get(name, (0, None))
        return None if held is None or wanted == () else held.used_for(empty, dim, wanted)

    def _count(self, module: nn.Module) -> None:
        parameters = _parameters(module)
        shared = sum(parameters[name].nbytes for name in self._views(parameters))
        self.spare = sum(each.tensor.nbytes for each in self._held.values()) - shared

    def _views(self, parameters: Mapping[str, nn.Parameter]) -> set[str]:
        """Return the names of the parameters that are views of what is held."""
        return {name for name, each in self._held.items() if name in parameters and _is_view(parameters[name], each)}


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def _held(tensor: Tensor, slices: Slices, name: str) -> Held:
    dim, ranges = slices.get(name, (0, None))
    return Held(tensor=tensor, dim=dim, ranges=ranges)


def _found(wanted: slice, have: tuple[slice, ...]) -> Iterator[Piece]:
    """Yield the pieces of one stretch."""
    starts = [sum(each.stop - each.start for each in have[:i]) for i in range(len(have))]
    position = wanted.start
    while position < wanted.stop:
        inside = next((i for i, each in enumerate(have) if each.start <= position < each.stop), None)
        if inside is None:
            stop = min([wanted.stop, *(each.start for each in have if each.start > position)])
            yield Piece(of=slice(position, stop), place=None)
        else:
            stop = min(wanted.stop, have[inside].stop)
            start = starts[inside] + position - have[inside].start
            yield Piece(of=slice(position, stop), place=slice(start, start + stop - position))
        position = stop


def _is_view(parameter: Tensor, held: Held) -> bool:
    """Whether a parameter is a part of what is held."""
    same = parameter.untyped_storage().data_ptr() == held.tensor.untyped_storage().data_ptr()
    return same and parameter.numel() > 0


def _narrow(tensor: Tensor, dim: int, stretch: slice) -> Tensor:
    return tensor.narrow(dim, stretch.start, stretch.stop - stretch.start)
