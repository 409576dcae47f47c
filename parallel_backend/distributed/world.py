"""All ranks as one axis, on the default process group."""

import torch.distributed as dist

from .mesh import Axis


def world(rank: int, world_size: int) -> Axis:
    """Return the axis of all ranks, for decisions that come before there is a mesh."""
    group = dist.group.WORLD if world_size > 1 else None
    gloo = group is not None and dist.get_backend(group) == "gloo"
    return Axis(name="world", ranks=tuple(range(world_size)), index=rank, group=group, gloo=gloo)
