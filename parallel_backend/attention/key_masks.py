"""Attention to some of the keys: what is masked is left out, so that every kernel can do it, exactly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import Kernel

QKV = tuple[Tensor, Tensor, Tensor]

NOTHING = -1e30
"""Log-sum-exp over no key: finite, since the difference of two infinities is no number."""


@dataclass(frozen=True)
class KeyMask:
    """Indices of the keys that may be attended, by sample; a single entry if it is the same for all samples."""

    indices: tuple[Tensor, ...]

    @classmethod
    def of(cls, mask: Tensor | None) -> "KeyMask | None":
        """Read a mask ``[B, keys]``; None if nothing is masked."""
        if mask is None or bool(mask.all()):
            return None
        alike = bool((mask == mask[:1]).all())
        return cls(tuple(row.nonzero()[:, 0] for row in (mask[:1] if alike else mask)))

    def rows(self, batch: int, sample: int | None) -> tuple[Tensor, ...]:
        """The entries for a batch: that of the sample alone if it is given."""
        if sample is not None and len(self.indices) > 1:
            return (self.indices[sample],)
        assert len(self.indices) in (1, batch), (len(self.indices), batch)
        return self.indices


def attend(kernel: Kernel, qkv: QKV, *, scale: float | None, kept: KeyMask | None, sample: int | None) -> Tensor:
    """Attention to the kept keys, ``[B, heads, query tokens, head_dim]``."""
    if kept is None:
        return kernel(*qkv, scale)
    rows = kept.rows(len(qkv[0]), sample)
    parts = zip(*(tensor.chunk(len(rows)) for tensor in qkv), rows, strict=True)
    return torch.cat([kernel(q, k.index_select(2, row), v.index_select(2, row), scale) for q, k, v, row in parts])


def attend_with_lse(
    kernel: Kernel, qkv: QKV, *, scale: float | None, kept: KeyMask | None, sample: int | None
) -> tuple[Tensor, Tensor]:
    """The same with the log-sum-exp ``[B, heads, query tokens]``; zeros and ``NOTHING`` where no key is kept."""
    rows = (None,) if kept is None else kept.rows(len(qkv[0]), sample)
    done = []
    for q, k, v, row in zip(*(tensor.chunk(len(rows)) for tensor in qkv), rows, strict=True):
        if row is not None:
            k, v = k.index_select(2, row), v.index_select(2, row)
        if k.shape[2]:
            done.append(kernel.with_lse(q, k, v, scale))
        else:
            done.append((torch.zeros_like(q), q.new_full(q.shape[:3], NOTHING, dtype=torch.float32)))
    outs, lses = zip(*done, strict=True)
    return (outs[0], lses[0]) if len(done) == 1 else (torch.cat(outs), torch.cat(lses))
