"""A cache of meshes by layout. A mesh costs nothing itself; its process groups do."""

from collections.abc import Callable, Collection
from datetime import timedelta

import torch

from ..layout.parallel_layout import ParallelLayout
from . import mesh, rank_speeds
from .collectives import gather_numbers
from .device_memory import release_cache
from .groups import GroupPool
from .mesh import RankMesh
from .world import world


class MeshCache:
    """The most recently used meshes, as long as every rank has room for their process groups.

    Every rank of the world requests the same layouts in the same order.

    Args:
        rank: this rank.
        world_size: number of ranks.
        device: this rank's device. Its speed is measured for layouts that need it.
        timeout: deadline of each collective on the meshes.
        in_use: returns the meshes whose groups this rank's loaded models use.
        on_free: called when a mesh is freed.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        timeout: timedelta,
        in_use: Callable[[], Collection[RankMesh]],
        on_free: Callable[[], object] = bool,
    ) -> None:
        self._device, self._in_use, self._on_free = device, in_use, on_free
        self._world = world(rank, world_size)
        self._groups = GroupPool(rank, world_size, device, timeout)
        self._measured_speeds: tuple[float, ...] = ()
        self._by_layout: dict[ParallelLayout, RankMesh | None] = {}
        self._last_serial = 0

    def get(self, layout: ParallelLayout) -> RankMesh | None:
        """Return the mesh of a layout; None on a rank that the layout leaves idle. Collective over the world."""
        # The last item is the most recently used.
        self._by_layout[layout] = self._by_layout.pop(layout) if layout in self._by_layout else self._create(layout)
        return self._by_layout[layout]

    def _create(self, layout: ParallelLayout) -> RankMesh | None:
        self._last_serial += 1
        speeds = self.speeds() if layout.adapts and not layout.balance else ()
        missing = self._groups.hold(mesh.groups_of(layout))
        if missing:
            release_cache(self._device)  # NCCL allocates its buffers outside of torch's cache
            self._make_room()
            self._groups.make(missing)
        return mesh.create(layout, self._groups.group, rank=self._world.index, serial=self._last_serial, speeds=speeds)

    def speeds(self) -> tuple[float, ...]:
        """Return the speed of every rank, measured once so that later cuts are the same. Collective over the world."""
        self._measured_speeds = self._measured_speeds or rank_speeds.measure(self._device, self._world.size)
        return self._measured_speeds

    def _make_room(self) -> None:
        """Free the least recently used meshes until every rank has room for all held groups.

        Meshes that a model of any rank uses stay. Ranks may differ: an idle rank has no model, and a rank that ran out
        of memory may have unloaded its model. Collective over the world, so that no rank still uses a group that is
        about to be freed or split.
        """
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        local = self._in_use()
        uses = [int(any(each is cached for each in local)) for cached in self._by_layout.values()]
        by_rank = gather_numbers([self._groups.affordable(), *uses], self._world)
        affordable, *used = zip(*by_rank, strict=True)
        unused = [layout for layout, flags in zip(self._by_layout, used, strict=True) if not any(flags)]
        while unused and not self._groups.fit(affordable):
            self._free(unused.pop(0))

    def _free(self, layout: ParallelLayout) -> None:
        self._on_free()
        del self._by_layout[layout]
        self._groups.release(mesh.groups_of(layout))
