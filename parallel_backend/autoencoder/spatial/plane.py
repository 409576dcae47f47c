"""Attention over all pixels of a frame, with the rows of the frame split over ranks.

A VAE attends with each pixel of a feature map to every pixel of it, so a rank needs the keys and values of all rows.
Tokens are pixels in row order. A rank's rows are therefore a block of consecutive tokens, and this is ring attention
(``strategies.ring``) as in a transformer:

- Each rank keeps its queries. The blocks of keys and values go round the ring; while a rank attends to one block, the
  next one arrives.
- Each partial result comes with the log-sum-exp of its scores. Merging partial results with the weights
  ``exp(lse - merged_lse)`` gives the softmax over the keys of all blocks.

So the result equals attention over the whole frame, up to rounding. Only keys and values are sent, and a rank never
holds more than two blocks of them. Blocks may differ in size.

``FrameCausalAttention`` does the same for HunyuanVideo, where a token attends to its own frame and to earlier ones.
"""

import torch
from torch import Tensor

from ...attention.kernels import Kernel
from ...attention.key_masks import attend_with_lse
from ...strategies.ring import Block, RingAttention
from .rows import RowSplit


class PlaneAttention:
    """Attention of this rank's tokens to the tokens of all ranks, for one frame or image per sample."""

    def __init__(self, rows: RowSplit, kernel: Kernel) -> None:
        self.rows, self.kernel = rows, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """Attend with local tokens ``[B, heads, local tokens, head_dim]``; see ``attention.routing.Attention``."""
        sizes = self.rows.from_local(key.shape[2]).sizes
        ring = RingAttention(self.rows.axis, sizes, [None] * len(sizes), self.kernel)
        return ring(query, key, value, scale=scale, sample=sample)


class FrameCausalAttention:
    """Attention of this rank's tokens to all ranks' tokens of the same and of earlier frames.

    A rank's tokens are ordered by frame, then by row.
    """

    def __init__(self, rows: RowSplit, kernel: Kernel) -> None:
        self.rows, self.kernel = rows, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, frames: int) -> Tensor:
        """Attend with local tokens ``[B, heads, local tokens, head_dim]`` of ``frames`` frames."""
        sizes = self.rows.from_local(key.shape[2]).sizes
        ring = _FrameCausalRing(self.rows.axis, sizes, [None] * len(sizes), self.kernel)
        ring.frames = frames
        return ring(query, key, value, scale=None, sample=None)


class _FrameCausalRing(RingAttention):
    """Ring attention in which the queries of frame ``i`` attend to frames ``0..i`` of each block."""

    frames: int

    def _attend(
        self, query: Tensor, block: Block, owner: int, *, scale: float | None, sample: int | None
    ) -> tuple[Tensor, Tensor]:
        k, v = (part.transpose(1, 2) for part in block)
        query_size, key_size = query.shape[2] // self.frames, self.sizes[owner] // self.frames
        parts = [
            attend_with_lse(
                self.kernel, (q, k[:, :, : (i + 1) * key_size], v[:, :, : (i + 1) * key_size]),
                scale=scale, key_mask=None, sample=sample,
            )
            for i, q in enumerate(query.split(query_size, dim=2))
        ]  # fmt: skip
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
