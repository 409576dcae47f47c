"""Convolutions, and other layers that read a window of rows, on one rank's block of rows.

Which rows are missing. Output row ``o`` of a convolution reads the input rows from ``o * stride - padding`` to
``o * stride - padding + kernel - 1``. For most of a rank's output rows these are rows of its own block. The first and
the last ones also need rows of the ranks above and below: the halo. Take 12 rows on 3 ranks and a convolution of kernel
3, stride 1 and padding 1:

    rank 0 holds rows 0..3,  needs rows 0..4:   pads above (image border), receives row 4
    rank 1 holds rows 4..7,  needs rows 3..8:   receives rows 3 and 8
    rank 2 holds rows 8..11, needs rows 7..11:  receives row 7, pads below (image border)

Only these rows are sent (``rows.Halo``).

How the layer runs. The layer stays unchanged, so it always pads both edges of what it is given: with zeros, mirrored
rows or repeated rows. That is right at an image border and wrong where two blocks meet, so the output rows that saw
padding there are not used. There are two ways to do that:

- With few rows, ``_run_with_halo`` waits for the halo, joins it to the block, runs the layer once and cuts out the
  block's output rows. The padding only reaches output rows of the halo.
- With many rows, ``_run_then_fix_edges`` runs the layer on the block while the halo is under way. Then it runs the
  layer again on two strips, each made of a halo and the block's rows next to it, and overwrites the output rows at the
  edges.

The halo is a multiple of ``stride`` rows, so the output rows of the joined tensor coincide with the image's.

Why it is exact. Each output row that is used is computed by the same layer, from the same input rows, as on one rank
that holds the whole image. That holds for every padding mode at the image borders.

Causal convolutions over time keep the last frames of one call for the next. Each of the runs above keeps its frames
separately (``LayerCaches``), with the halo rows that were part of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .rows import ROW_DIM, Halo, RowSplit
from .watch import Unsplittable

FIX_EDGES_FROM = 32
"""Fewest rows for which edges are computed separately. Below, joining copies the block, which costs less than two more
runs as long as there are few rows relative to channels."""


@dataclass(frozen=True, kw_only=True)
class RowWindow:
    """The input rows that an output row of a layer reads.

    Attributes:
        kernel: height of the window in input rows, with dilation.
        stride: input rows between the windows of two successive output rows.
        padding: rows that the layer adds above the image, in any padding mode.
    """

    kernel: int
    stride: int
    padding: int

    @property
    def top_rows(self) -> int:
        """How many of a block's first output rows read rows above the block."""
        return -(-self.padding // self.stride)

    @property
    def bottom_rows(self) -> int:
        """How many of a block's last output rows read rows below the block."""
        return -(-max(0, self.kernel - self.stride - self.padding) // self.stride)

    @property
    def halo_above(self) -> int:
        """Input rows to receive from above, a multiple of the stride."""
        return self.top_rows * self.stride

    @property
    def halo_below(self) -> int:
        """Input rows to receive from below, a multiple of the stride."""
        return self.bottom_rows * self.stride

    @property
    def needs_halo(self) -> bool:
        """Whether any output row reads rows outside its block."""
        return self.top_rows > 0 or self.bottom_rows > 0


LayerCaches = tuple[Any, Any, Any]
"""What a layer keeps for its next call: from its run on the block, on the top strip and on the bottom strip."""


class HaloForward:
    """A ``forward`` that computes a layer on this rank's rows, with the halo of other ranks.

    Positional arguments are tensors ``[..., rows, columns]`` of one height, or None. A layer that keeps frames takes
    them as ``conv_cache``, None in the first call, and returns ``(output, cache)``.
    """

    def __init__(self, layer: nn.Module, window: RowWindow, rows: RowSplit) -> None:
        self.stock: Callable[..., Any] = layer.forward
        self.window, self.rows, self.kind = window, rows, type(layer).__name__
        self._returns_cache = False

    def __call__(self, *args: Tensor | None, conv_cache: LayerCaches | None = None, **others: Any) -> Any:
        """Compute this rank's output rows, with the arguments and results of the layer's ``forward``.

        Raises:
            Unsplittable: the layer is called with an unknown keyword argument.
        """
        if others:
            raise Unsplittable(f"a {self.kind} is called with unknown arguments: {', '.join(others)}")
        inputs = [arg for arg in args if arg is not None]
        caches = conv_cache or (None, None, None)
        halo = Halo(self.rows, inputs, self.window.halo_above, self.window.halo_below)
        if inputs[0].shape[ROW_DIM] < max(FIX_EDGES_FROM, inputs[0].shape[1] // 2):
            out, caches = self._run_with_halo(inputs, halo, caches)
        else:
            out, caches = self._run_then_fix_edges(inputs, halo, caches)
        return (out, caches) if self._returns_cache else out

    def _run_with_halo(self, inputs: Sequence[Tensor], halo: Halo, caches: LayerCaches) -> tuple[Tensor, LayerCaches]:
        """Join the halo to the block, run the layer once and cut out the block's output rows."""
        edges = halo.wait()
        joined = [torch.cat([above, x, below], ROW_DIM) for x, (above, below) in zip(inputs, edges, strict=True)]
        out, cache = self._run(joined, caches[0])
        above, height = edges[0][0].shape[ROW_DIM], inputs[0].shape[ROW_DIM]
        local_out = out.narrow(ROW_DIM, above // self.window.stride, height // self.window.stride)
        return local_out.contiguous(), (cache, None, None)

    def _run_then_fix_edges(
        self, inputs: Sequence[Tensor], halo: Halo, caches: LayerCaches
    ) -> tuple[Tensor, LayerCaches]:
        """Run the layer on the block while the halo is under way, then compute the edge rows of the output again."""
        try:
            out, cache = self._run(inputs, caches[0])
        finally:  # even if a progress hook cancels the run: the neighbours still send and receive
            edges = halo.wait()
        top_cache = self._fix_top(inputs, [above for above, _ in edges], caches[1], out)
        bottom_cache = self._fix_bottom(inputs, [below for _, below in edges], caches[2], out)
        return out, (cache, top_cache, bottom_cache)

    def _fix_top(self, inputs: Sequence[Tensor], above: Sequence[Tensor], cache: Any, out: Tensor) -> Any:
        """Overwrite the first ``top_rows`` rows of ``out``, and return the cache of the run that computes them.

        The strip is the halo and the block's rows that these output rows read, rounded up to the stride.
        """
        window, halo_rows = self.window, above[0].shape[ROW_DIM]
        if not halo_rows:
            return None
        rows_read = (window.top_rows - 1) * window.stride - window.padding + window.kernel
        block_rows = window.stride * -(-rows_read // window.stride)
        strips = [torch.cat([a, x.narrow(ROW_DIM, 0, block_rows)], ROW_DIM) for a, x in zip(above, inputs, strict=True)]
        strip_out, cache = self._run(strips, cache)
        fixed = strip_out.narrow(ROW_DIM, halo_rows // window.stride, window.top_rows)
        out.narrow(ROW_DIM, 0, window.top_rows).copy_(fixed)
        return cache

    def _fix_bottom(self, inputs: Sequence[Tensor], below: Sequence[Tensor], cache: Any, out: Tensor) -> Any:
        """Overwrite the last ``bottom_rows`` rows of ``out``, and return the cache of the run that computes them.

        The strip is the halo and, above it, the block's rows for ``top_rows + bottom_rows`` output rows. The first
        ``top_rows`` of these see padding and are not used.
        """
        window, height = self.window, inputs[0].shape[ROW_DIM]
        if not below[0].shape[ROW_DIM]:
            return None
        block_rows = window.halo_above + window.halo_below
        strips = [
            torch.cat([x.narrow(ROW_DIM, height - block_rows, block_rows), b], ROW_DIM)
            for b, x in zip(below, inputs, strict=True)
        ]
        strip_out, cache = self._run(strips, cache)
        last = out.narrow(ROW_DIM, height // window.stride - window.bottom_rows, window.bottom_rows)
        last.copy_(strip_out.narrow(ROW_DIM, window.top_rows, window.bottom_rows))
        return cache

    def _run(self, inputs: Sequence[Tensor], cache: Any) -> tuple[Tensor, Any]:
        """Run the layer's own ``forward``; return its output and its cache, which is None if it keeps nothing."""
        result = self.stock(*inputs) if cache is None else self.stock(*inputs, conv_cache=cache)
        self._returns_cache = isinstance(result, tuple)
        return result if isinstance(result, tuple) else (result, None)
