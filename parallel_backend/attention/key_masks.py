"""Masked attention that leaves masked keys out before the kernel runs. This is exact and works with every kernel.

The order of keys does not matter to attention. So the last keys that may be attended to move into the places of masked
keys, and a kernel gets a view of the first ones. Of a row with padded text, only a few keys are ever copied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import Kernel

QKV = tuple[Tensor, Tensor, Tensor]

EMPTY_LSE = -1e30
"""Log-sum-exp over no keys. Finite, because the difference of two infinities is NaN."""


@dataclass(frozen=True, kw_only=True)
class RowMask:
    """The keys of a sample that may be attended to.

    Attributes:
        count: how many there are.
        moves: indices of masked keys among the first ``count``, and of as many unmasked keys behind these; None if the
            first ``count`` keys are the unmasked ones.
    """

    count: int
    moves: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, mask: Tensor, device: torch.device) -> "RowMask":
        """Convert a mask, bool ``[keys]`` on the CPU."""
        count = int(mask.sum())
        masked, unmasked = (~mask[:count]).nonzero()[:, 0], mask[count:].nonzero()[:, 0] + count
        moves = (masked.to(device, non_blocking=True), unmasked.to(device, non_blocking=True))
        return cls(count=count, moves=moves if len(masked) else None)

    def move(self, tensor: Tensor) -> None:
        """Put the unmasked keys ``[B, heads, keys, head_dim]`` first, in place."""
        if self.moves:
            masked, unmasked = self.moves
            tensor.index_copy_(2, masked, tensor.index_select(2, unmasked))

    def moved(self, tensor: Tensor) -> Tensor:
        """Return the unmasked keys, and leave ``tensor`` as it is."""
        first = tensor[:, :, : self.count]
        return first.index_copy(2, self.moves[0], tensor.index_select(2, self.moves[1])) if self.moves else first


@dataclass(frozen=True)
class KeyMask:
    """The keys that may be attended to.

    Attributes:
        rows: these keys for each sample; a single entry if they are the same for all samples.
    """

    rows: tuple[RowMask, ...]

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
        return cls(tuple(RowMask.of(row, device) for row in (mask[:1] if same_for_all else mask)))

    def for_batch(self, batch: int, sample: int | None) -> tuple[RowMask, ...]:
        """Return the keys for all ``batch`` samples, or for ``sample`` alone."""
        if sample is not None and len(self.rows) > 1:
            return (self.rows[sample],)
        assert len(self.rows) in (1, batch), (len(self.rows), batch)
        return self.rows

    def move(self, keys: Tensor, values: Tensor, sample: int | None) -> None:
        """Put the unmasked keys and values of each sample first, in place, as ``attend`` expects them."""
        rows = self.for_batch(len(keys), sample)
        for tensor in (keys, values):
            for part, row in zip(tensor.chunk(len(rows)), rows, strict=True):
                row.move(part)


def attend(
    kernel: Kernel, qkv: QKV, *, scale: float | None, key_mask: KeyMask | None, sample: int | None, moved: bool = False
) -> Tensor:
    """Attend to unmasked keys, and return ``[B, heads, query tokens, head_dim]``.

    Every sample must have at least one unmasked key (see ``attend_with_lse``).

    Args:
        qkv: query, key and value, ``[B, heads, tokens, head_dim]`` each.
        key_mask: the keys that may be attended to; None for all.
        sample: index in the batch of the single sample that ``qkv`` holds; None if ``qkv`` holds the whole batch.
        moved: whether ``KeyMask.move`` has put the unmasked keys first. Otherwise they are copied if they are not.
    """
    if key_mask is None:
        return kernel(*qkv, scale)
    outs = [kernel(*part, scale) for part in _unmasked(qkv, key_mask.for_batch(len(qkv[0]), sample), moved)]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def attend_with_lse(
    kernel: Kernel, qkv: QKV, *, scale: float | None, key_mask: KeyMask | None, sample: int | None, moved: bool = False
) -> tuple[Tensor, Tensor]:
    """Like ``attend``, but also return the log-sum-exp ``[B, heads, query tokens]``.

    A sample without any unmasked key gets zeros as its output and ``EMPTY_LSE`` as its log-sum-exp.
    """
    if key_mask is None:
        return _with_lse(kernel, *qkv, scale)
    rows = key_mask.for_batch(len(qkv[0]), sample)
    outs, lses = zip(*(_with_lse(kernel, *part, scale) for part in _unmasked(qkv, rows, moved)), strict=True)
    return (outs[0], lses[0]) if len(rows) == 1 else (torch.cat(outs), torch.cat(lses))


def _unmasked(qkv: QKV, rows: Sequence[RowMask], moved: bool) -> Iterator[QKV]:
    """Yield the queries of each sample with its unmasked keys and values; all samples at once if they have the same."""
    for q, k, v, row in zip(*(tensor.chunk(len(rows)) for tensor in qkv), rows, strict=True):
        yield (q, k[:, :, : row.count], v[:, :, : row.count]) if moved else (q, row.moved(k), row.moved(v))


def _with_lse(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Like ``kernel.with_lse``, but allow an empty ``k``."""
    if k.shape[2]:
        return kernel.with_lse(q, k, v, scale)
    return torch.zeros_like(q), q.new_full(q.shape[:3], EMPTY_LSE, dtype=torch.float32)
