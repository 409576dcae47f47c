"""Masked attention that drops masked keys before the kernel runs. This is exact and works with every kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import Kernel

QKV = tuple[Tensor, Tensor, Tensor]

EMPTY_LSE = -1e30
"""Log-sum-exp over no keys. Finite, because the difference of two infinities is NaN."""


@dataclass(frozen=True)
class KeyMask:
    """The keys that may be attended to.

    Attributes:
        indices: indices of these keys for each sample; a single entry if they are the same for all samples.
    """

    indices: tuple[Tensor, ...]

    @classmethod
    def of(cls, mask: Tensor, device: torch.device) -> "KeyMask | None":
        """Convert a mask; None if no key is masked.

        Args:
            mask: bool ``[B, keys]``, True for keys that may be attended to. It is on the CPU, where its values can be
                read without waiting for a GPU.
        """
        if bool(mask.all()):
            return None
        same_for_all = bool((mask == mask[:1]).all())
        rows = mask[:1] if same_for_all else mask
        return cls(tuple(row.nonzero()[:, 0].to(device, non_blocking=True) for row in rows))

    def for_batch(self, batch: int, sample: int | None) -> tuple[Tensor, ...]:
        """Return the indices for all ``batch`` samples, or for ``sample`` alone."""
        if sample is not None and len(self.indices) > 1:
            return (self.indices[sample],)
        assert len(self.indices) in (1, batch), (len(self.indices), batch)
        return self.indices


def attend(kernel: Kernel, qkv: QKV, *, scale: float | None, key_mask: KeyMask | None, sample: int | None) -> Tensor:
    """Attend to unmasked keys, and return ``[B, heads, query tokens, head_dim]``.

    Every sample must have at least one unmasked key (see ``attend_with_lse``).

    Args:
        qkv: query, key and value, ``[B, heads, tokens, head_dim]`` each.
        key_mask: the keys that may be attended to; None for all.
        sample: index in the batch of the single sample that ``qkv`` holds; None if ``qkv`` holds the whole batch.
    """
    if key_mask is None:
        return kernel(*qkv, scale)
    indices = key_mask.for_batch(len(qkv[0]), sample)
    chunks = zip(*(tensor.chunk(len(indices)) for tensor in qkv), indices, strict=True)
    return torch.cat([kernel(q, k.index_select(2, keys), v.index_select(2, keys), scale) for q, k, v, keys in chunks])


def attend_with_lse(
    kernel: Kernel, qkv: QKV, *, scale: float | None, key_mask: KeyMask | None, sample: int | None
) -> tuple[Tensor, Tensor]:
    """Like ``attend``, but also return the log-sum-exp ``[B, heads, query tokens]``.

    A sample without any unmasked key gets zeros as its output and ``EMPTY_LSE`` as its log-sum-exp.
    """
    indices = (None,) if key_mask is None else key_mask.for_batch(len(qkv[0]), sample)
    results = []
    for q, k, v, keys in zip(*(tensor.chunk(len(indices)) for tensor in qkv), indices, strict=True):
        if keys is not None:
            k, v = k.index_select(2, keys), v.index_select(2, keys)
        results.append(_with_lse(kernel, q, k, v, scale))
    outs, lses = zip(*results, strict=True)
    return (outs[0], lses[0]) if len(results) == 1 else (torch.cat(outs), torch.cat(lses))


def _with_lse(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Like ``kernel.with_lse``, but allow an empty ``k``."""
    if k.shape[2]:
        return kernel.with_lse(q, k, v, scale)
    return torch.zeros_like(q), q.new_full(q.shape[:3], EMPTY_LSE, dtype=torch.float32)
