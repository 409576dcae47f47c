"""A cache of device meshes by layout: each process group costs threads and sockets, or NCCL buffers."""

from collections.abc import Callable, Collection
from datetime import timedelta

import torch
import torch.distributed as dist

from ..layout.parallel_layout import ParallelLayout
from ..progress import PROGRESS
from . import mesh, rank_speeds
from .device_memory import release_cache
from .mesh import DeviceMesh

MAX_MESHES = 8
"""Meshes that are kept. Exceeded only while loaded models use more."""


class MeshCache:
    """The most recently used meshes. Every rank of the world requests the same layouts in the same order.

    Args:
        rank: this rank.
        world_size: number of ranks.
        device: this rank's device. Its speed is measured for layouts that need it.
        timeout: deadline of each collective on the meshes.
        in_use: returns the meshes whose groups this rank's loaded models use.
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
        self._measured_speeds: tuple[float, ...] = ()
        self._by_layout: dict[ParallelLayout, DeviceMesh | None] = {}
        self._last_serial = 0

    def get(self, layout: ParallelLayout) -> DeviceMesh | None:
        """Return the mesh of a layout; None on a rank that the layout leaves idle. See ``mesh.create``."""
        if layout in self._by_layout:
            self._by_layout[layout] = self._by_layout.pop(layout)  # move to the end: most recently used
        else:
            self._make_room()
            self._last_serial += 1
            speeds = self._speeds() if layout.adapts and not layout.balance else ()
            release_cache(self._device)  # NCCL allocates its buffers outside of torch's cache
            self._by_layout[layout] = mesh.create(
                layout, rank=self._rank, timeout=self._timeout, serial=self._last_serial, speeds=speeds
            )
        return self._by_layout[layout]

    def _speeds(self) -> tuple[float, ...]:
        """Return the speed of every rank, measured once so that later cuts are the same."""
        self._measured_speeds = self._measured_speeds or rank_speeds.measure(self._device, self._rank, self._world_size)
        return self._measured_speeds

    def _make_room(self) -> None:
        """Free the least recently used meshes among those that no rank's models use."""
        if len(self._by_layout) < MAX_MESHES:
            return
        used = self._used_anywhere()
        unused = [layout for layout in self._by_layout if layout not in used]
        for layout in unused[: len(self._by_layout) - MAX_MESHES + 1]:
            freed = self._by_layout.pop(layout)
            if freed:
                freed.free()

    def _used_anywhere(self) -> set[ParallelLayout]:
        """Return the layouts whose meshes the models of any rank use. Collective over the world.

        Ranks may differ: an idle rank has no model, and a rank that ran out of memory may have unloaded its model.
        Waiting for all ranks here also ensures that none is still working on a group that is about to be freed.
        """
        local = self._in_use()
        flags = torch.tensor([int(any(each is cached for each in local)) for cached in self._by_layout.values()])
        if self._world_size > 1:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            with PROGRESS.waiting():
                dist.all_reduce(flags, dist.ReduceOp.MAX)
        return {layout for layout, flag in zip(self._by_layout, flags.tolist(), strict=True) if flag}
