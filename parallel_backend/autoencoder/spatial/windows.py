"""Layers that look beyond their own row (convolutions, with the padding that is part of them), on a part of the rows.

A layer runs as it is, its own padding at both edges. Where an edge is not the picture's border, what it makes of the
last rows is made again with the rows of the neighbour, which travel meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .rows import ROWS, Halo, Rows
from .watch import Unsplittable

STRIPS_FROM = 32
"""Rows from which on, at least, the edges are made again; of fewer, the whole is made once, with the neighbours' rows
around it. That is a copy of it, which costs less than strips as long as rows are few beside channels."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far a layer looks. ``above``: rows of padding that it has above the picture, in whatever mode."""

    kernel: int
    stride: int
    above: int

    @property
    def top(self) -> int:
        """Rows of output that look above the own rows."""
        return -(-self.above // self.stride)

    @property
    def bottom(self) -> int:
        """Rows of output that look below the own rows."""
        return -(-max(0, self.kernel - self.stride - self.above) // self.stride)

    @property
    def local(self) -> bool:
        """Whether no row of output looks at rows of others."""
        return self.top == self.bottom == 0


Kept = tuple[Any, Any, Any]
"""What a layer keeps from one call for the next: of its own rows, and of what is made again at the top and bottom."""


class Windowed:
    """A layer's ``forward`` on the own rows.

    What it is called with by position are planes of one height, or None. A layer that keeps something takes it as
    ``conv_cache``, which is None at first, and returns it second.
    """

    def __init__(self, layer: nn.Module, reach: Reach, rows: Rows) -> None:
        self.stock: Callable[..., Any] = layer.forward
        self.reach, self.rows, self.kind = reach, rows, type(layer).__name__
        self._keeps = False

    def __call__(self, *args: Tensor | None, conv_cache: Kept | None = None, **others: Any) -> Any:
        """As the layer is called.

        Raises:
            Unsplittable: it is called with what is not known.
        """
        if others:
            raise Unsplittable(f"a {self.kind} is called with {', '.join(others)}, which is not known")
        planes = [arg for arg in args if arg is not None]
        before = conv_cache or (None, None, None)
        reach = self.reach
        halo = Halo(self.rows, planes, reach.top * reach.stride, reach.bottom * reach.stride)
        if planes[0].shape[ROWS] < max(STRIPS_FROM, planes[0].shape[1] // 2):
            out, kept = self._whole(planes, halo, before)
        else:
            out, kept = self._strips(planes, halo, before)
        return (out, kept) if self._keeps else out

    def _whole(self, planes: Sequence[Tensor], halo: Halo, before: Kept) -> tuple[Tensor, Kept]:
        edges = halo.wait()
        around = [torch.cat([above, plane, below], ROWS) for plane, (above, below) in zip(planes, edges, strict=True)]
        out, kept = self._run(around, before[0])
        begin, height = edges[0][0].shape[ROWS], planes[0].shape[ROWS]
        own = out.narrow(ROWS, begin // self.reach.stride, height // self.reach.stride)
        return own.contiguous(), (kept, None, None)

    def _strips(self, planes: Sequence[Tensor], halo: Halo, before: Kept) -> tuple[Tensor, Kept]:
        try:
            out, own = self._run(planes, before[0])
        finally:  # even where it is cancelled: neighbours send and wait all the same
            edges = halo.wait()
        top = self._top(planes, [above for above, _ in edges], before[1], out)
        return out, (own, top, self._bottom(planes, [below for _, below in edges], before[2], out))

    def _top(self, planes: Sequence[Tensor], above: Sequence[Tensor], before: Any, out: Tensor) -> Any:
        """Make the first rows of the output again; what the layer keeps of that."""
        reach, there = self.reach, above[0].shape[ROWS]
        if not there:
            return None
        seen = reach.stride * -(-((reach.top - 1) * reach.stride - reach.above + reach.kernel) // reach.stride)
        firsts = [plane.narrow(ROWS, 0, seen) for plane in planes]
        strips = [torch.cat(pair, ROWS) for pair in zip(above, firsts, strict=True)]
        again, kept = self._run(strips, before)
        out.narrow(ROWS, 0, reach.top).copy_(again.narrow(ROWS, there // reach.stride, reach.top))
        return kept

    def _bottom(self, planes: Sequence[Tensor], below: Sequence[Tensor], before: Any, out: Tensor) -> Any:
        """Make the last rows of the output again; what the layer keeps of that."""
        reach, height = self.reach, planes[0].shape[ROWS]
        if not below[0].shape[ROWS]:
            return None
        seen = (reach.top + reach.bottom) * reach.stride
        strips = [
            torch.cat([plane.narrow(ROWS, height - seen, seen), b], ROWS)
            for b, plane in zip(below, planes, strict=True)
        ]
        again, kept = self._run(strips, before)
        last = out.narrow(ROWS, height // reach.stride - reach.bottom, reach.bottom)
        last.copy_(again.narrow(ROWS, reach.top, reach.bottom))
        return kept

    def _run(self, planes: Sequence[Tensor], before: Any) -> tuple[Tensor, Any]:
        done = self.stock(*planes) if before is None else self.stock(*planes, conv_cache=before)
        self._keeps = isinstance(done, tuple)
        return done if isinstance(done, tuple) else (done, None)
