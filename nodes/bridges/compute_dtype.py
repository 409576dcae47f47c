"""The dtypes that ComfyUI itself would compute a model and a VAE in."""

from typing import Any, get_args

import comfy.cli_args
import comfy.model_management
import torch

from ...parallel_backend.checkpoint.dtypes import TORCH_DTYPES
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.model_spec import Devices, DType
from ...parallel_backend.protocol.tensors import DTYPES
from ...parallel_backend.vaes import VAE
from ..backend.session import current
from .bridge import Bridge
from .custom_model import CustomConfig

_NAMES: dict[torch.dtype, DType] = {DTYPES[name]: name for name in get_args(DType) if name != "auto"}
"""What the ranks can compute in."""
_UNET_FLAGS = (
    "fp64_unet", "fp32_unet", "bf16_unet", "fp16_unet", "fp8_e4m3fn_unet", "fp8_e5m2_unet", "fp8_e8m0fnu_unet",
)  # fmt: skip
"""ComfyUI's options for the dtype of a model's weights, whatever the GPU."""


def _supported(bridge: Bridge, core_config: Any) -> list[torch.dtype]:
    """Return the dtypes that ComfyUI's class of the model computes in, the preferred one first."""
    values = bridge.values_for_dtype()
    # The class decides when it gets its config.
    config = type(core_config)(core_config.unet_config | values) if values else core_config
    supported: list[torch.dtype] = config.supported_inference_dtypes
    return supported


def auto_dtype(bridge: Bridge, devices: Devices) -> DType:
    """Return the dtype in which ComfyUI would compute the model's file on the first rank's device.

    The file's dtype, what the model class supports, what the GPU supports, and ComfyUI's options (such as
    ``--bf16-unet``) decide. ``auto`` leaves the choice to the ranks, for models that ComfyUI does not have, and for
    GPUs that it does not see, about which it can say nothing: there its options alone decide.

    Raises:
        InvalidRequest: ComfyUI's options ask for weights that the ranks cannot have.
    """
    core_config = bridge.core_config()
    if isinstance(core_config, CustomConfig):
        return "auto"
    numbers = bridge.checkpoint.stored_numbers("transformer")
    stored = TORCH_DTYPES.get(numbers.most_common(1)[0][0])
    supported = _supported(bridge, core_config)
    described = bridge.checkpoint.is_described("transformer")
    if not _is_seen(devices):
        asked = _asked_for(described)
        if asked is None or (asked == stored and asked not in _NAMES):
            return "auto" if stored != torch.float16 or stored in supported else _NAMES[supported[0]]
        return _checked(asked, asked, stored)
    device = _first_of(devices)
    if described:
        # ComfyUI then computes in what it would cast weights to, whatever dtype they have.
        return _NAMES[comfy.model_management.unet_manual_cast(None, device, supported)]
    weights = comfy.model_management.unet_dtype(
        device=device, model_params=numbers.total(), supported_dtypes=supported, weight_dtype=stored
    )
    compute = comfy.model_management.unet_manual_cast(weights, device, supported) or weights
    return _checked(weights, compute, stored)


def _is_seen(devices: Devices) -> bool:
    """Whether ComfyUI can say something about the first rank's device: a CPU, or a GPU that it computes on itself."""
    if devices.kind == "cpu":
        return True
    elsewhere = comfy.model_management.cpu_mode() or current().client.remote
    return not elsewhere and devices.indices[0] < torch.cuda.device_count()


def _asked_for(described: bool) -> torch.dtype | None:
    """Return the dtype that ComfyUI's options ask for whatever the GPU; None if they leave it open.

    Args:
        described: whether the weights are compressed, for which ``--bf16-unet`` and the like have no effect.
    """
    if comfy.model_management.FORCE_FP32:
        return torch.float32
    given = any(getattr(comfy.cli_args.args, flag) for flag in _UNET_FLAGS)
    asked: torch.dtype | None = comfy.model_management.unet_dtype() if given and not described else None
    return asked


def _checked(weights: torch.dtype, compute: torch.dtype, stored: torch.dtype | None) -> DType:
    """Return the name of the dtype that ComfyUI would compute in.

    Raises:
        InvalidRequest: its options ask for weights that the ranks cannot have.
    """
    if compute not in _NAMES or (weights not in _NAMES and weights != stored):
        raise InvalidRequest(
            f"ComfyUI's options ask for weights in {weights}, which a parallel model cannot have: choose a dtype in "
            "Parallel Loader, or start ComfyUI without that option"
        )
    return _NAMES[compute]


def auto_vae_dtype(vae: VAE, devices: Devices) -> DType:
    """Return the dtype in which ComfyUI's own VAE would compute on the first rank's device.

    What its class works in, what the GPU supports and ComfyUI's options (such as ``--bf16-vae``) decide. With
    ``--cpu-vae`` it is the CPU's. ``auto`` leaves the choice to the ranks, for GPUs that this ComfyUI does not see.
    """
    given = {flag for flag in ("fp16_vae", "bf16_vae", "fp32_vae", "cpu_vae") if getattr(comfy.cli_args.args, flag)}
    if not (given or _is_seen(devices)):
        return "float32" if comfy.model_management.FORCE_FP32 else "auto"
    device = torch.device("cpu") if "cpu_vae" in given else _first_of(devices)
    return _NAMES[comfy.model_management.vae_dtype(device, [*vae.working_dtypes, torch.float32])]


def loaded_vae_dtype(vae: Any) -> DType:
    """Return the dtype of a VAE that ComfyUI has loaded, which its loader may have chosen.

    Raises:
        InvalidRequest: the ranks do not compute in it.
    """
    if vae.vae_dtype not in _NAMES:
        raise InvalidRequest(f"the VAE computes in {vae.vae_dtype}: load it in bf16, fp16 or fp32")
    return _NAMES[vae.vae_dtype]


def _first_of(devices: Devices) -> torch.device:
    return torch.device(devices.kind, devices.indices[0]) if devices.kind == "cuda" else torch.device("cpu")
