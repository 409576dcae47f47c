"""The clips and tiles in which a VAE itself works, shared out over ranks.

One rank computes a whole tile, without the others, and rank 0 joins them in the VAE's own order. So the result is exact
and nothing is exchanged between layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..distributed import collectives
from ..distributed.mesh import Axis
from ..protocol.frames import TensorMeta
from ..protocol.tensors import DTYPES
from ..vaes import VAE, TiledVAE
from ..vaes.own_tiles import LATENT_DIMS, REQUEST_DIMS, Joiner, Part
from .codec import PixelWriter

_FLAG_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class OwnTiles:
    """The parts of a request, which ranks take in turn.

    Attributes:
        vae: the VAE.
        shape: of the latents ``[B, C, T, H, W]``, or of the pixels ``[B, T, H, W, 3]`` if ``encode``.
        encode: whether pixels are encoded; latents are decoded otherwise.
    """

    vae: TiledVAE
    shape: tuple[int, ...]
    encode: bool

    @classmethod
    def of(cls, vae: VAE, shape: Sequence[int], *, encode: bool) -> "OwnTiles | None":
        """Return the parts of an input of this shape; None if the VAE works on whole frames."""
        return cls(vae=vae, shape=tuple(shape), encode=encode) if isinstance(vae, TiledVAE) else None

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them, in the order in which ranks take them."""
        return self.vae.parts(self.shape, self.dims, encode=self.encode)

    @property
    def dims(self) -> tuple[int, int, int]:
        """Where ``shape`` has frames, rows and columns."""
        return REQUEST_DIMS if self.encode else LATENT_DIMS

    @property
    def longest(self) -> int:
        """The most pixel frames that a rank has at once; 1 of an image."""
        most = max(part.frames for part in self.parts)
        return most if self.encode or most == 1 else self.vae.tile_frames(most, encode=False)

    def joined_bytes(self, itemsize: int) -> int:
        """Return the bytes of the clip that rank 0 joins, where a value takes ``itemsize`` bytes."""
        part, (_, height, width) = self.parts[0], (self.shape[dim] for dim in self.dims)
        whole = replace(part, row=0, column=0, height=height, width=width)
        return prod(self.vae.result_shape(whole, encode=self.encode)) * itemsize

    def bytes_sent(self, rank: int, ranks: int, itemsize: int, given: int = torch.float32.itemsize) -> int:
        """Return the bytes that one of the ranks sends where bytes are counted.

        Rank 0 sends the other ranks their parts of the input, and a flag after each round but the last. They send their
        results as they computed them.

        Args:
            itemsize: bytes of a value that the VAE computes.
            given: bytes of a value of the input.
        """
        turns = [(i % ranks, part) for i, part in enumerate(self.parts)]
        if rank:
            own = (prod(self.vae.result_shape(part, encode=self.encode)) for turn, part in turns if turn == rank)
            return sum(own) * itemsize
        sent = sum(prod(part.shape(self.shape, self.dims)) for turn, part in turns if turn) * given
        return sent + (-(-len(turns) // ranks) - 1) * (ranks - 1) * _FLAG_BYTES

    def process(
        self,
        module: Any,
        whole: Tensor | None,
        meta: TensorMeta,
        on_progress: Callable[[int, int], None],
        axis: Axis,
        device: torch.device,
    ) -> Tensor:
        """Process all parts, one per rank at a time.

        Args:
            whole: the input on rank 0; None on other ranks.
            meta: its shape and dtype.
            on_progress: called with the number of finished parts and of all parts.

        Returns:
            The result on rank 0, an empty tensor on other ranks.
        """
        parts, joined = self.parts, None if axis.index else _Joined(self, module)
        if whole is not None and not self.encode:
            whole = whole.to(device, non_blocking=True)  # a latent is small, and pixels are not
        for first in range(0, len(parts), axis.size):
            several = parts[first : first + axis.size]
            local = torch.empty(0)
            if axis.index < len(several):
                local = self._code(module, self._scatter(whole, meta, several, axis, device))
            shapes = [self.vae.result_shape(part, encode=self.encode) for part in several]
            sizes = [*map(prod, shapes), *[0] * (axis.size - len(several))]
            gathered = collectives.gather(local, sizes, axis)
            if joined:
                for part, shape, values in zip(several, shapes, gathered, strict=False):
                    joined.add(part, values.view(shape))
            on_progress(first + len(several), len(parts))
        return joined.result() if joined else torch.empty(0)

    def _code(self, module: Any, tile: Tensor) -> Tensor:
        # As in ComfyUI, pixels are rounded to the VAE's dtype after they are in -1..1.
        tile = tile.movedim(-1, 1) * 2.0 - 1.0 if self.encode else tile
        return self.vae.code_tile(module, tile.to(module.dtype), encode=self.encode)

    def _scatter(
        self, whole: Tensor | None, meta: TensorMeta, parts: Sequence[Part], axis: Axis, device: torch.device
    ) -> Tensor:
        """Send each rank its part of a tensor, and return this rank's part."""
        shape = parts[axis.index].shape(meta.shape, self.dims)
        local = torch.empty(shape, dtype=DTYPES[meta.dtype], device=device)
        cuts = [] if whole is None else [_ready(part.cut(whole, self.dims), local) for part in parts]
        return collectives.scatter(cuts, local, axis)


def _ready(cut: Tensor, like: Tensor) -> Tensor:
    """Return values in memory from which a GPU, if ``like`` is on one, copies them while the host goes on."""
    if not like.is_cuda or cut.is_cuda:
        return cut
    pinned = like.new_empty(cut.shape, dtype=cut.dtype, device="cpu", pin_memory=torch.cuda.is_available())
    return pinned.copy_(cut)


class _Joined:
    """The results of all samples on rank 0."""

    def __init__(self, work: OwnTiles, module: Any) -> None:
        self._work, self._module = work, module
        self._joiners: list[Joiner] = []
        frames = work.shape[LATENT_DIMS[0]]
        self._writer = None if work.encode else PixelWriter(work.vae, work.shape, frames)

    def add(self, part: Part, result: Tensor) -> None:
        """Take the next part's result, which it may change."""
        if part.sample == len(self._joiners):
            shape = [self._work.shape[dim] for dim in self._work.dims]
            write = self._writer.write if self._writer else None
            self._joiners.append(self._work.vae.joiner(self._module, shape, write))
        self._joiners[-1].add(result)

    def result(self) -> Tensor:
        """Return the pixels ``[B, T', H', W', 3]`` or the latents ``[B, C, T', H', W']``, in float32."""
        return self._writer.result() if self._writer else torch.cat([joiner.result() for joiner in self._joiners])
