"""The dtype that ComfyUI itself would compute a model in."""

from typing import get_args

import comfy.model_management
import torch

from ...parallel_backend.checkpoint.dtypes import TORCH_DTYPES
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.messages import Devices, DType
from ...parallel_backend.protocol.tensors import DTYPES
from .bridge import Bridge
from .custom_model import CustomConfig

_NAMES: dict[torch.dtype, DType] = {DTYPES[name]: name for name in get_args(DType) if name != "auto"}
"""What the ranks can compute in."""


def auto_dtype(bridge: Bridge, devices: Devices) -> DType:
    """Return the dtype in which ComfyUI would compute the model's file on the first rank's device.

    The file's dtype, what the model class supports, what the GPU supports, and ComfyUI's options (such as
    ``--bf16-unet``) decide. ``auto`` leaves the choice to the ranks, for models that ComfyUI does not have.

    Raises:
        InvalidRequest: ComfyUI's options ask for weights that the ranks cannot have.
    """
    core_config = bridge.core_config()
    if isinstance(core_config, CustomConfig):
        return "auto"
    stored = TORCH_DTYPES.get(bridge.checkpoint.stored_dtype("transformer"))
    supported: list[torch.dtype] = core_config.supported_inference_dtypes
    if devices.kind == "cuda" and comfy.model_management.cpu_mode():
        # This ComfyUI computes on the CPU, so it knows nothing about the GPUs.
        return "auto" if stored != torch.float16 or stored in supported else _NAMES[supported[0]]
    device = torch.device(devices.kind, devices.indices[0]) if devices.kind == "cuda" else torch.device("cpu")
    weights = comfy.model_management.unet_dtype(device=device, supported_dtypes=supported, weight_dtype=stored)
    compute = comfy.model_management.unet_manual_cast(weights, device, supported) or weights
    if compute not in _NAMES or (weights not in _NAMES and weights != stored):
        raise InvalidRequest(
            f"ComfyUI's options ask for weights in {weights}, which a parallel model cannot have: choose a dtype in "
            "Parallel Loader, or start ComfyUI without that option"
        )
    return _NAMES[compute]
