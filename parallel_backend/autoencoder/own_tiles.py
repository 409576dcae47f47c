"""The clips and tiles in which a VAE itself works, shared out over ranks.

One rank computes a whole tile, without the others, and rank 0 joins them in the VAE's own order. So the result is exact
and nothing is exchanged between layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
from . import turns
from .codec import PixelWriter

_FLAG_BYTES = 8

Shares = Sequence[Sequence[Part]]
"""The parts that each rank takes at a time."""


@dataclass(frozen=True, kw_only=True)
class OwnTiles:
    """The parts of a request, which ranks take in turn.

    Attributes:
        vae: the VAE.
        shape: of the latents ``[B, C, T, H, W]``, or of the pixels ``[B, T, H, W, 3]`` if ``encode``.
        encode: whether pixels are encoded; latents are decoded otherwise.
        speeds: relative speed of each rank: a faster one takes several parts while a slower one takes one. Empty if all
            are equal.
    """

    vae: TiledVAE
    shape: tuple[int, ...]
    encode: bool
    speeds: tuple[float, ...] = ()

    @classmethod
    def of(cls, vae: VAE, shape: Sequence[int], *, encode: bool, speeds: tuple[float, ...] = ()) -> "OwnTiles | None":
        """Return the parts of an input of this shape; None if the VAE works on whole frames."""
        return cls(vae=vae, shape=tuple(shape), encode=encode, speeds=speeds) if isinstance(vae, TiledVAE) else None

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

    def joined_bytes(self, ranks: int, itemsize: int) -> int:
        """Return the bytes of the clip that rank 0 joins, and of what it gets at a time beside a tile for each rank.

        Args:
            itemsize: bytes that a value takes.
        """
        part, (_, height, width) = self.parts[0], (self.shape[dim] for dim in self.dims)
        whole = replace(part, row=0, column=0, height=height, width=width)
        longest = sum(map(len, self._rounds(ranks)[0])) - ranks
        values = prod(self.vae.result_shape(whole, encode=self.encode)) + max(0, longest) * self._values(part)
        return values * itemsize

    def bytes_sent(self, rank: int, ranks: int, itemsize: int, given: int = torch.float32.itemsize) -> int:
        """Return the bytes that one of the ranks sends where bytes are counted.

        Rank 0 sends the other ranks their parts of the input, and a flag after each round but the last. They send their
        results as they computed them.

        Args:
            itemsize: bytes of a value that the VAE computes.
            given: bytes of a value of the input.
        """
        rounds = self._rounds(ranks)
        if rank:
            return sum(sum(map(self._values, shares[rank])) for shares in rounds) * itemsize
        others = (part for shares in rounds for share in shares[1:] for part in share)
        sent = sum(prod(part.shape(self.shape, self.dims)) for part in others) * given
        return sent + (len(rounds) - 1) * (ranks - 1) * _FLAG_BYTES

    def _rounds(self, ranks: int) -> list[Shares]:
        """Return what ranks take, round after round. Together, the parts of a round are in order."""
        parts = iter(self.parts)
        speeds = self.speeds[:ranks] or (1.0,) * ranks
        return [[[*islice(parts, count)] for count in taken] for taken in turns.rounds(len(self.parts), speeds)]

    def _values(self, part: Part) -> int:
        return prod(self.vae.result_shape(part, encode=self.encode))

    def process(
        self,
        module: Any,
        whole: Tensor | None,
        meta: TensorMeta,
        on_progress: Callable[[int, int], None],
        axis: Axis,
        device: torch.device,
    ) -> Tensor:
        """Process all parts, in rounds.

        Args:
            whole: the input on rank 0; None on other ranks.
            meta: its shape and dtype.
            on_progress: called with the number of finished parts and of all parts.

        Returns:
            The result on rank 0, an empty tensor on other ranks.
        """
        joined, done, count = None if axis.index else _Joined(self, module), 0, len(self.parts)
        if whole is not None and not self.encode:
            whole = whole.to(device, non_blocking=True)  # a latent is small, and pixels are not
        for shares in self._rounds(axis.size):
            sizes = [*map(self._values, shares[axis.index])]
            local = torch.empty(sum(sizes), dtype=module.dtype, device=device)
            tiles = self._scatter(whole, meta, shares, axis, device)
            for own, tile in zip(local.split(sizes), tiles, strict=True):
                own.copy_(self._code(module, tile).reshape(-1))
            gathered = collectives.gather(local, [sum(map(self._values, share)) for share in shares], axis)
            if joined:
                for share, values in zip(shares, gathered, strict=True):
                    self._join(joined, share, values)
            done += sum(map(len, shares))
            on_progress(done, count)
        return joined.result() if joined else torch.empty(0)

    def _join(self, joined: "_Joined", share: Sequence[Part], values: Tensor) -> None:
        """Join what one rank has coded."""
        sizes = [self._values(part) for part in share]
        for part, own in zip(share, values.split(sizes), strict=True):
            joined.add(part, own.view(self.vae.result_shape(part, encode=self.encode)))

    def _code(self, module: Any, tile: Tensor) -> Tensor:
        # As in ComfyUI, pixels are rounded to the VAE's dtype after they are in -1..1.
        tile = tile.movedim(-1, 1) * 2.0 - 1.0 if self.encode else tile
        return self.vae.code_tile(module, tile.to(module.dtype), encode=self.encode)

    def _scatter(
        self, whole: Tensor | None, meta: TensorMeta, shares: Shares, axis: Axis, device: torch.device
    ) -> list[Tensor]:
        """Send each rank its parts of a tensor, and return this rank's."""
        shapes = [part.shape(meta.shape, self.dims) for part in shares[axis.index]]
        sizes = [*map(prod, shapes)]
        local = torch.empty(sum(sizes), dtype=DTYPES[meta.dtype], device=device)
        cuts = [] if whole is None else [self._cut(whole, share, local) for share in shares]
        own = collectives.scatter(cuts, local, axis)
        return [each.view(shape) for each, shape in zip(own.split(sizes), shapes, strict=True)]

    def _cut(self, whole: Tensor, share: Sequence[Part], like: Tensor) -> Tensor:
        """Return parts one after another. A GPU, if ``like`` is on one, copies them while the host goes on."""
        cuts = [part.cut(whole, self.dims) for part in share]
        sizes = [cut.numel() for cut in cuts]
        pinned = like.is_cuda and not whole.is_cuda
        found = torch.empty(sum(sizes), dtype=whole.dtype, device=whole.device, pin_memory=pinned)
        for own, cut in zip(found.split(sizes), cuts, strict=True):
            own.view(cut.shape).copy_(cut)
        return found


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
