"""Lists the GPUs that ranks can use, and refuses other devices.

Ranks run on what torch calls ``cuda``: NVIDIA's GPUs, and AMD's with a ROCm build of torch.
"""

import os

from ..errors import InvalidRequest
from ..protocol.model_spec import VISIBLE

_BY_NAME = ("GPU-", "MIG-")
"""How names of GPUs and of MIG slices begin, where a variable lists them instead of numbers."""
_OTHERS = {
    "xpu": "Intel GPUs", "mps": "Apple GPUs", "hpu": "Gaudi accelerators", "npu": "Ascend NPUs",
    "mtia": "MTIA accelerators", "privateuseone": "accelerators of other backends",
}  # fmt: skip
"""By torch's name, devices on which ranks do not run."""


def count() -> int:
    """Return the number of GPUs.

    Raises:
        InvalidRequest: a variable lists GPUs by name, and torch does not see all of them.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _check_names(gpus, amd=torch.version.hip is not None)
    return gpus


def visible() -> tuple[tuple[str, str], ...]:
    """Return the environment variables that select GPUs, for ``Devices.visible``."""
    return tuple((name, os.environ[name]) for name in VISIBLE if name in os.environ)


def other_accelerator() -> str:
    """Return the kind of another accelerator that torch uses here instead of such GPUs; "" without one."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if accelerator is None or accelerator.type == "cuda" else described(accelerator.type)


def described(kind: str) -> str:
    """Return torch's name of a kind of device in words; "" if ranks can run on it."""
    if kind in ("hip", "rocm"):
        return "AMD GPUs, which torch calls cuda"
    return f"{_OTHERS[kind]} ({kind})" if kind in _OTHERS else ""


def _check_names(gpus: int, *, amd: bool) -> None:
    """Refuse names that CUDA leaves out: the first unknown or repeated one ends the list, which may leave no GPU."""
    used = ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] if amd else ["CUDA_VISIBLE_DEVICES"]
    variable = next((name for name in used if os.environ.get(name)), "")
    names = [name.strip() for name in os.environ.get(variable, "").split(",")]
    if not names[0].startswith(_BY_NAME) or len(names) <= gpus:
        return
    if gpus and names[0].startswith("MIG-"):
        raise InvalidRequest(
            f"{variable} names {len(names)} MIG slices, and a process sees only the first: name one, on which several "
            'ranks can run with PARALLEL_DIT_COLLECTIVES=gloo and devices "0,0", or turn MIG off'
        )
    seen = f"only {gpus} of them" if gpus else "none of them"
    raise InvalidRequest(
        f"{variable}={os.environ[variable]}: torch sees {seen}; name each GPU once, as nvidia-smi -L and rocm-smi list "
        "them, or use numbers"
    )
