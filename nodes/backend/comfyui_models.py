"""ComfyUI's own models on the GPUs that the ranks use, too.

ComfyUI frees memory only for its own models, and the ranks are other processes.
"""

import comfy.model_management
import torch

from ...parallel_backend.protocol.endpoint import Endpoint
from ...parallel_backend.protocol.model_spec import FIRST, Devices

EVERYTHING = 1e30
"""Bytes that ComfyUI itself asks for when it unloads all models of a device."""


def shared_gpus(devices: Devices, ranks: int) -> set[torch.device]:
    """Return the GPUs of the first ``ranks`` ranks that ComfyUI uses, too."""
    management = comfy.model_management
    # Querying any other GPU would allocate half a gigabyte on it.
    used_by_comfyui = {entry.device for entry in management.current_loaded_models} | {management.get_torch_device()}
    return used_by_comfyui.intersection(gpus(devices, ranks))


def gpus(devices: Devices, ranks: int) -> list[torch.device]:
    """Return the GPUs of this machine among the first ``ranks`` ranks', by this process's numbering."""
    if devices.kind != "cuda" or Endpoint.default().remote:
        return []
    here = [rank for rank in range(min(ranks, len(devices.indices))) if devices.host_of(rank) == FIRST]
    return [torch.device("cuda", devices.indices[rank]) for rank in here]


def unload(shared: set[torch.device]) -> bool:
    """Unload ComfyUI's own models from these GPUs, and return whether there were any."""
    management = comfy.model_management
    # Keep the parallel models: they use no memory here, and unloading one makes the ranks free its weights.
    loaded = management.current_loaded_models
    parallel_models = [entry for entry in loaded if entry.model is not None and entry.model.loaded_size() == 0]
    unloaded = [entry for each in shared for entry in management.free_memory(EVERYTHING, each, parallel_models)]
    management.soft_empty_cache()
    return bool(unloaded)
