"""GPUs that cannot read each other's memory. NCCL exchanges through the host's memory then."""

import logging
import shutil
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")
"""Where NCCL shares the host's memory between processes."""


def log_missing(device: torch.device) -> None:
    """Log the visible GPUs whose memory a GPU cannot reach, and what NCCL needs instead.

    This is no reason to refuse them. Whether the space suffices depends on NCCL: newer versions share memory in another
    way.
    """
    others = (index for index in range(torch.cuda.device_count()) if index != device.index)
    missing = [index for index in others if not torch.cuda.can_device_access_peer(device.index, index)]
    if not missing:
        return
    space = shutil.disk_usage(SHARED) if SHARED.is_dir() else None
    room = f"{space.free / 1e9:.2f} of {space.total / 1e9:.2f} GB are free there" if space else "which is missing here"
    log.warning(
        "%s has no peer access to GPU %s: NCCL goes through the host's memory, which is slower and may need 1 GB in %s "
        "(%s; --shm-size in docker)", device, " and ".join(map(str, missing)), SHARED, room,
    )  # fmt: skip
