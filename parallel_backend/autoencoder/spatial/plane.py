"""Attention over whole pictures whose rows lie on several ranks: the engine's ring, whose blocks are rows."""

import torch
from torch import Tensor

from ...attention.kernels import Kernel
from ...attention.key_masks import attend_with_lse
from ...strategies.ring import Block, RingAttention
from .rows import Rows


class Plane:
    """Attention of the tokens of the own rows to those of all rows. Tokens are in the order of rows."""

    def __init__(self, rows: Rows, kernel: Kernel) -> None:
        self.rows, self.kernel = rows, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, own tokens, head_dim]``; see ``Attention``."""
        sizes = self.rows.at(key.shape[2]).sizes
        ring = RingAttention(self.rows.axis, sizes, [None] * len(sizes), self.kernel)
        return ring(query, key, value, scale=scale, sample=sample)


class FrameCausal:
    """The same for videos, whose tokens are in the order of frames, of which each sees itself and those before it."""

    def __init__(self, rows: Rows, kernel: Kernel) -> None:
        self.rows, self.kernel = rows, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, frames: int) -> Tensor:
        """``[B, heads, own tokens, head_dim]``."""
        sizes = self.rows.at(key.shape[2]).sizes
        ring = _FrameRing(self.rows.axis, sizes, [None] * len(sizes), self.kernel)
        ring.frames = frames
        return ring(query, key, value, scale=None, sample=None)


class _FrameRing(RingAttention):
    frames: int

    def _attend(
        self, query: Tensor, block: Block, owner: int, *, scale: float | None, sample: int | None
    ) -> tuple[Tensor, Tensor]:
        k, v = (part.transpose(1, 2) for part in block)
        own, theirs = query.shape[2] // self.frames, self.sizes[owner] // self.frames
        parts = [
            attend_with_lse(
                self.kernel, (q, k[:, :, : (i + 1) * theirs], v[:, :, : (i + 1) * theirs]),
                scale=scale, kept=None, sample=sample,
            )
            for i, q in enumerate(query.split(own, dim=2))
        ]  # fmt: skip
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
