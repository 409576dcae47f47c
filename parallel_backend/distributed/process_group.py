"""Joining the process group of all ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ..protocol.model_spec import Collectives


def join(
    device: torch.device, collectives: Collectives, store: Store, *, rank: int, world_size: int, timeout: timedelta
) -> None:
    """Select this rank's device and join the default process group.

    Args:
        device: this rank's device.
        collectives: the communication backend of GPU tensors; CPU tensors always use gloo.
        store: where the ranks meet.
        rank: this rank.
        world_size: number of ranks.
        timeout: deadline of each collective.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and collectives == "nccl" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
