"""One rank's view of other machines: files, the ranks' hosts, and the traffic between them."""

from typing import TYPE_CHECKING

from ... import env
from ...protocol.status import HostLink

if TYPE_CHECKING:
    import torch

    from ...engine.elsewhere import Elsewhere


def find(rank: int, world_size: int, device: "torch.device") -> "tuple[Elsewhere, HostLink | None]":
    """Return what this rank's engine needs, and its link to another machine. Collective over all ranks."""
    from ...distributed.collectives import gather_numbers, gather_texts
    from ...distributed.world import world
    from . import host_links
    from .crossing import HostMap
    from .known import Known

    everyone = world(rank, world_size)
    names = gather_texts(env.HOST.get(), everyone)
    if not any(names):
        return Known(everyone, HostMap()), None
    link = host_links.measure(everyone, names, device)
    measured = [speed for (speed,) in gather_numbers([int(link.bandwidth) if link else 0], everyone) if speed]
    return Known(everyone, HostMap(names=tuple(names), bandwidth=float(min(measured)))), link
