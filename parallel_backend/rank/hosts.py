"""Where the ranks are, and how fast the network between their hosts is."""

from typing import TYPE_CHECKING

from .. import env
from ..protocol.status import HostLink

if TYPE_CHECKING:
    import torch

    from ..engine.crossing import HostMap


def find(rank: int, world_size: int, device: "torch.device") -> "tuple[HostMap, HostLink | None]":
    """Return where all ranks are, and this rank's link. Collective over all ranks."""
    from ..distributed import host_links
    from ..distributed.collectives import gather_numbers, gather_texts
    from ..distributed.world import world
    from ..engine.crossing import HostMap

    everyone = world(rank, world_size)
    names = gather_texts(env.HOST.get(), everyone)
    if not any(names):
        return HostMap(), None
    link = host_links.measure(everyone, names, device)
    measured = [speed for (speed,) in gather_numbers([int(link.bandwidth) if link else 0], everyone) if speed]
    return HostMap(names=tuple(names), bandwidth=float(min(measured))), link
