"""Room on the ranks' GPUs: ComfyUI frees memory for its own models alone, and the ranks are other processes."""

from collections.abc import Collection

import comfy.model_management
import torch

from ...parallel_backend.protocol.messages import Devices
from .connection import Handle

EVERYTHING = 1e30
"""Bytes that ComfyUI itself asks for when it unloads all models of a device."""


def make_room(handle: Handle, components: Collection[str], *, ranks: int) -> None:
    """Have ComfyUI's own models leave the GPUs on which the first so many ranks are about to load these components.

    Nothing leaves while the ranks hold them already, or where the ranks are no GPUs that ComfyUI uses.
    """
    management = comfy.model_management
    loaded = management.current_loaded_models
    # Looking at a GPU that ComfyUI does not use would cost half a gigabyte there.
    used = {entry.device for entry in loaded} | {management.get_torch_device()}
    shared = used.intersection(gpus(handle.spec.devices, ranks))
    if not shared or handle.holds(components, ranks=ranks):
        return
    # Ours weigh nothing here, and to unload them is to have the ranks free their weights.
    ours = [entry for entry in loaded if entry.model is not None and entry.model.loaded_size() == 0]
    for device in shared:
        management.free_memory(EVERYTHING, device, ours)
    management.soft_empty_cache()


def gpus(devices: Devices, ranks: int) -> list[torch.device]:
    """The GPUs of the first so many ranks, in the numbers of this process, which are those of the node's input."""
    return [torch.device("cuda", index) for index in devices.indices[:ranks]] if devices.kind == "cuda" else []
