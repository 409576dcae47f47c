"""Parts of a video along time that a VAE codes each for itself, shared out over ranks.

One rank computes a whole part, without the others, so the result is exact and nothing is exchanged between layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..distributed import collectives
from ..distributed.mesh import Axis
from ..protocol.frames import TensorMeta
from ..protocol.tensors import DTYPES
from ..vaes import VAE

_FULL = 0.75
"""The least part of the rank's time that has to be work, counted in parts of equal length."""

_LATENT, _PIXELS = 2, 1
"""The dims of frames in latents ``[B, C, T, H, W]`` and in pixels ``[B, T, H, W, 3]``."""


_FLAG_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One part of one sample.

    Attributes:
        sample: index of the sample.
        before: its frames in the input.
        after: its frames in the result.
    """

    sample: int
    before: slice
    after: slice


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The parts of a request.

    Attributes:
        parts: all of them, in the order in which ranks take them.
        encode: whether pixels are encoded; latents are decoded otherwise.
    """

    parts: tuple[Chunk, ...]
    encode: bool

    @classmethod
    def of(cls, vae: VAE, shape: Sequence[int], *, encode: bool) -> "Chunks":
        """Return the parts of an input of this shape; none if the VAE codes all frames together."""
        if len(shape) != 5:
            return cls(parts=(), encode=encode)
        before = vae.independent_frames(shape[_PIXELS if encode else _LATENT], encode=encode)
        if len(before) == 1:
            return cls(parts=(), encode=encode)
        after = [vae.latent_frames(count) if encode else vae.pixel_frames(count) for count in before]
        places = list(zip(_slices(before), _slices(after), strict=True))
        parts = (Chunk(sample=i, before=old, after=new) for i in range(shape[0]) for old, new in places)
        return cls(parts=tuple(parts), encode=encode)

    def keep_busy(self, ranks: int) -> bool:
        """Whether there are so many parts that the ranks are rarely without one."""
        rounds = -(-len(self.parts) // ranks)
        return len(self.parts) >= max(2, _FULL * rounds * ranks) and ranks > 1

    @property
    def longest(self) -> int:
        """The most frames of the input that a rank has at once."""
        return max(_length(part.before) for part in self.parts)

    def bytes_sent(self, rank: int, ranks: int, source: Tensor, result: Tensor) -> int:
        """Return the bytes that one of the ranks sends where bytes are counted.

        Rank 0 sends the other ranks their parts of the input, and a flag after each round but the last. They send their
        results in float32.
        """
        own = [part for i, part in enumerate(self.parts) if i % ranks == rank]
        dims = (_PIXELS, _LATENT) if self.encode else (_LATENT, _PIXELS)
        if rank:
            return sum(result.nbytes // len(result) * _length(part.after) // result.shape[dims[1]] for part in own)
        others = [part for i, part in enumerate(self.parts) if i % ranks]
        sent = sum(source.nbytes // len(source) * _length(part.before) // source.shape[dims[0]] for part in others)
        return sent + (-(-len(self.parts) // ranks) - 1) * (ranks - 1) * _FLAG_BYTES

    def process(
        self,
        whole: Tensor | None,
        meta: TensorMeta,
        result: Sequence[int],
        work: Callable[[Tensor], Tensor],
        on_progress: Callable[[int, int], None],
        axis: Axis,
        device: torch.device,
    ) -> Tensor:
        """Process all parts, one per rank at a time.

        Args:
            whole: the input on rank 0; None on other ranks.
            meta: its shape and dtype.
            result: shape of the whole result.
            work: computes one part, on the device.
            on_progress: called with the number of finished parts and of all parts.

        Returns:
            The result on rank 0, an empty tensor on other ranks.
        """
        joined = torch.empty(0) if axis.index else torch.empty(tuple(result))
        dims = (_PIXELS, _LATENT) if self.encode else (_LATENT, _PIXELS)
        for first in range(0, len(self.parts), axis.size):
            parts = self.parts[first : first + axis.size]
            local = torch.empty(0)
            if axis.index < len(parts):
                local = work(_scatter(whole, meta, parts, dims[0], axis, device)).float()
            shapes = [_cut_shape(result, part.after, dims[1]) for part in parts]
            sizes = [torch.Size(shape).numel() for shape in shapes] + [0] * (axis.size - len(parts))
            gathered = collectives.gather(local, sizes, axis)
            if not axis.index:
                for part, shape, values in zip(parts, shapes, gathered, strict=False):
                    _cut(joined, part.sample, part.after, dims[1]).copy_(values.view(shape))
            on_progress(first + len(parts), len(self.parts))
        return joined


def _slices(lengths: Sequence[int]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]


def _length(frames: slice) -> int:
    length: int = frames.stop - frames.start
    return length


def _cut(whole: Tensor, sample: int, frames: slice, dim: int) -> Tensor:
    """Return a view of some frames of one sample, with the dim of samples."""
    return whole[sample : sample + 1].narrow(dim, frames.start, _length(frames))


def _cut_shape(whole: Sequence[int], frames: slice, dim: int) -> list[int]:
    shape = [1, *whole[1:]]
    shape[dim] = _length(frames)
    return shape


def _scatter(
    whole: Tensor | None, meta: TensorMeta, parts: Sequence[Chunk], dim: int, axis: Axis, device: torch.device
) -> Tensor:
    """Send each rank its part of a tensor, and return this rank's part."""
    shape = _cut_shape(meta.shape, parts[axis.index].before, dim)
    local = torch.empty(shape, dtype=DTYPES[meta.dtype], device=device)
    cuts = [] if whole is None else [_cut(whole, part.sample, part.before, dim) for part in parts]
    return collectives.scatter(cuts, local, axis)
