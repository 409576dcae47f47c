"""Memory on the GPUs that ComfyUI and the ranks share.

ComfyUI frees memory only for its own models, and the ranks are other processes.
"""

from collections.abc import Collection

import comfy.model_management
import torch

from ...parallel_backend.protocol.model_spec import Devices
from .connection import Handle

EVERYTHING = 1e30
"""Bytes that ComfyUI itself asks for when it unloads all models of a device."""


def make_room(handle: Handle, components: Collection[str], *, ranks: int) -> None:
    """Unload ComfyUI's own models from the GPUs where the first ``ranks`` ranks are about to load ``components``.

    Nothing is unloaded if these ranks already hold the components, or if ComfyUI uses none of their GPUs.
    """
    management = comfy.model_management
    loaded = management.current_loaded_models
    # Only GPUs that ComfyUI uses: querying any other GPU would allocate half a gigabyte on it.
    used_by_comfyui = {entry.device for entry in loaded} | {management.get_torch_device()}
    shared = used_by_comfyui.intersection(gpus(handle.spec.devices, ranks))
    if not shared or handle.holds(components, ranks=ranks):
        return
    # Keep the parallel models: they use no memory here, and unloading one makes the ranks free its weights.
    parallel_models = [entry for entry in loaded if entry.model is not None and entry.model.loaded_size() == 0]
    for device in shared:
        management.free_memory(EVERYTHING, device, parallel_models)
    management.soft_empty_cache()


def gpus(devices: Devices, ranks: int) -> list[torch.device]:
    """Return the GPUs of the first ``ranks`` ranks, by this process's numbering, which the node's input uses."""
    return [torch.device("cuda", index) for index in devices.indices[:ranks]] if devices.kind == "cuda" else []
