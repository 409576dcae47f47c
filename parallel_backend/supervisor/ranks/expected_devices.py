"""Guesses the devices of ranks before the first request names them. No torch."""

import os
from pathlib import Path

from ... import env
from ...errors import InvalidRequest
from ...protocol.model_spec import VISIBLE, Devices

_LISTS = [name for name in VISIBLE if name != "CUDA_DEVICE_ORDER"]
_SYSTEM = Path("/")


def expected_devices(system: Path = _SYSTEM) -> Devices:
    """Return all GPUs that this process may use; without GPUs, the CPU ranks that ``all`` means.

    A wrong guess costs some memory or time, and nothing else.

    Args:
        system: the root of the file system.
    """
    visible = {name: os.environ[name] for name in VISIBLE if name in os.environ}
    listed = [len([each for each in visible[name].split(",") if each.strip()]) for name in _LISTS if name in visible]
    gpus = min([_gpus(system), *listed])
    if gpus:
        return Devices(kind="cuda", indices=tuple(range(gpus)), visible=tuple(visible.items()))
    try:
        ranks = env.CPU_RANKS.get()
    except InvalidRequest:
        ranks = 1  # the first request refuses the value
    return Devices(kind="cpu", indices=tuple(range(ranks)))


def _gpus(system: Path) -> int:
    """Return the number of GPUs that NVIDIA's and AMD's drivers list."""
    nvidia = list(system.glob("proc/driver/nvidia/gpus/*"))
    nodes = system.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")  # a node without a GPU has the id 0
    return len(nvidia) + sum(_read(node) not in ("", "0") for node in nodes)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
