"""Joining the process group of all ranks."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ..protocol.model_spec import Collectives
from . import peer_access

_WAITING_CHANNELS = 4
"""Channels of a group whose receives wait. Each takes a multiprocessor, and a few carry what a link does."""


def join(
    device: torch.device,
    collectives: Collectives,
    store: Store,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    eager: bool = True,
) -> None:
    """Select this rank's device and join the default process group.

    Args:
        device: this rank's device.
        collectives: the communication backend of GPU tensors; CPU tensors always use gloo.
        store: where the ranks meet.
        rank: this rank.
        world_size: number of ranks.
        timeout: deadline of each collective.
        eager: whether NCCL connects now. torch then splits the communicators of later groups off this one. All ranks
            take part in that, also those outside of the new group. It works only for groups with NCCL.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    nccl = device.type == "cuda" and collectives == "nccl"
    if nccl and world_size > 1:
        peer_access.log_missing(device)
    bound = device if nccl and eager and world_size > 1 else None
    # Non-blocking communicators may hang. Some versions of torch make them for a bound device (pytorch/pytorch#153960).
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=bound,
    )
    if bound:
        connect(dist.group.WORLD)


def waiting_options() -> Any:
    """Return NCCL's options of a group whose receives are posted long before their tensors are sent.

    A receive's kernel waits on the device, and takes a multiprocessor from computation for each of its channels, of
    which NCCL uses up to 32 on NVLink. ``NCCL_MAX_CTAS`` overrides the number.

    Returns:
        ``ProcessGroupNCCL.Options``, which a torch without CUDA does not have.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _WAITING_CHANNELS
    return options


def connect(group: dist.ProcessGroup | None) -> None:
    """Make NCCL connect all ranks of a group now instead of at the first use.

    The first use may be an exchange in which a rank without tokens or heads takes no part, and the other ranks would
    wait for it (see ``torch.distributed.batch_isend_irecv``). Returns when they are connected, so that ranks that
    cannot reach each other stay in this phase.
    """
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()
