"""Two ranks on the machine that is checked."""

import torch

from parallel_backend.client.devices import parse_devices
from parallel_backend.protocol.model_spec import Devices

SHARED = "0,0"
"""The first GPU, listed for each of two ranks, as ``--devices`` takes it."""


def two_ranks() -> Devices:
    """Return two ranks that share the first GPU, which needs gloo; two CPU ranks without one."""
    return parse_devices(SHARED if torch.cuda.is_available() else "0,1")
