"""The meshes of the layouts that were used last: a group costs threads and sockets, or NCCL's buffers."""

from collections.abc import Callable, Collection
from datetime import timedelta

import torch
import torch.distributed as dist

from ..layout.parallel_layout import ParallelLayout
from . import mesh, rank_speeds
from .mesh import DeviceMesh

MOST = 8
"""Meshes that are kept; more only where loaded models use them."""


class MeshCache:
    """Every rank of the world asks for the same layouts in the same order.

    ``in_use`` gives the meshes whose groups this rank's loaded models use.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        timeout: timedelta,
        in_use: Callable[[], Collection[DeviceMesh]],
    ) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._timeout, self._in_use = timeout, in_use
        self._measured: tuple[float, ...] = ()
        self._made: dict[ParallelLayout, DeviceMesh | None] = {}
        self._number = 0

    def get(self, layout: ParallelLayout) -> DeviceMesh | None:
        """The mesh of a layout; None on a rank that it leaves idle. See ``mesh.create``."""
        if layout in self._made:
            self._made[layout] = self._made.pop(layout)  # the last one is the one used last
        else:
            self._make_room()
            self._number += 1
            measured = self._speeds() if layout.adapts and not layout.balance else ()
            self._made[layout] = mesh.create(
                layout, rank=self._rank, timeout=self._timeout, number=self._number, measured=measured
            )
        return self._made[layout]

    def _speeds(self) -> tuple[float, ...]:
        """Measured once, so that what was cut by them stays so."""
        self._measured = self._measured or rank_speeds.measure(self._device, self._rank, self._world_size)
        return self._measured

    def _make_room(self) -> None:
        """Free the meshes that were used longest ago, of those that no rank's models use."""
        if len(self._made) < MOST:
            return
        used = self._used_anywhere()
        for layout in [layout for layout in self._made if layout not in used][: len(self._made) - MOST + 1]:
            made = self._made.pop(layout)
            if made:
                made.free()

    def _used_anywhere(self) -> set[ParallelLayout]:
        """Layouts whose meshes some rank's models use: an idle rank has no model, and one that was full may have
        forgotten it. Here all ranks meet, so that none is still at work on a group that is freed."""
        own = self._in_use()
        flags = torch.tensor([int(any(each is made for each in own)) for made in self._made.values()])
        if self._world_size > 1:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return {layout for layout, flag in zip(self._made, flags.tolist(), strict=True) if flag}
