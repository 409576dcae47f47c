"""Where the rows of diffusers' parameters are in a file with original names.

diffusers' own converter for single files runs once, on tensors that hold row numbers instead of weights. What it
returns says which rows of which tensor make up each parameter, so that a rank can read just the rows that it keeps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..packages import broken_by

Shape = tuple[int, ...]
Converter = Callable[[dict[str, Tensor]], dict[str, Tensor]]

_ROW_BITS = 32
"""A row is numbered by its tensor's number, from 1, in the high bits and its own number in the low bits."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one tensor in a file that make up a parameter.

    Attributes:
        source: the tensor's name in the file.
        spans: slices of its rows, in the parameter's order.
        count: the number of rows.
    """

    source: str
    spans: tuple[slice, ...]
    count: int

    def take(self, parts: tuple[slice, ...]) -> "Rows":
        """Return slices of the parameter's rows, in their order."""
        spans: list[slice] = []
        for part in parts:
            start, stop, _ = part.indices(self.count)
            position = 0
            for span in self.spans:
                length = span.stop - span.start
                first, last = max(start - position, 0), min(stop - position, length)
                if first < last:
                    spans.append(slice(span.start + first, span.start + last))
                position += length
        return Rows(source=self.source, spans=tuple(spans), count=sum(span.stop - span.start for span in spans))


def identity(shapes: Mapping[str, Shape]) -> dict[str, Rows]:
    """Return the map of a file whose names are diffusers' own."""
    return {name: _all_rows(name, shape) for name, shape in shapes.items()}


def converted(shapes: Mapping[str, Shape], convert: Converter) -> dict[str, Rows]:
    """Return the rows of each parameter that a converter makes from the tensors of a file.

    Args:
        shapes: shapes of the file's tensors by name.
        convert: maps tensors by the file's names to tensors by diffusers' names, and moves rows at most.

    Raises:
        InvalidRequest: the converter needs a tensor that the file lacks.
        BrokenPackage: the converter cannot be imported.
    """
    names = list(shapes)
    numbered = {name: _numbered(i, shapes[name]) for i, name in enumerate(names, start=1)}
    try:
        result = convert(numbered)
    except (KeyError, IndexError, RuntimeError, ValueError, TypeError) as error:
        if broken := broken_by(error):
            raise broken from error
        raise InvalidRequest(f"the file lacks a weight or has one of another shape ({error}): download it") from error
    return {target: _rows(target, tensor, names, shapes) for target, tensor in result.items()}


def _numbered(number: int, shape: Shape) -> Tensor:
    """Return the numbers of a tensor's rows, with one element a row."""
    rows = torch.arange(shape[0] if shape else 1, dtype=torch.int64) + (number << _ROW_BITS)
    return rows.reshape(len(rows), *[1] * (len(shape) - 1)) if shape else rows.reshape(())


def _rows(target: str, tensor: Tensor, names: list[str], shapes: Mapping[str, Shape]) -> Rows:
    numbers = tensor.reshape(-1).to(torch.int64)
    sources = (numbers >> _ROW_BITS).unique().tolist()
    if len(sources) != 1 or not 1 <= sources[0] <= len(names):
        raise InvalidRequest(f"{target} is not made of rows of one tensor, which is not supported")
    source = names[sources[0] - 1]
    if not shapes[source]:
        return _all_rows(source, ())
    rows = numbers & ((1 << _ROW_BITS) - 1)
    breaks = [0, *((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
    spans = tuple(slice(int(rows[start]), int(rows[stop - 1]) + 1) for start, stop in pairwise(breaks) if start < stop)
    return Rows(source=source, spans=spans, count=len(rows))


def _all_rows(name: str, shape: Shape) -> Rows:
    count = shape[0] if shape else 1
    return Rows(source=name, spans=(slice(0, count),), count=count)
