"""comfy-kitchen, ComfyUI's own kernels and decoders of compressed weights, set up as ComfyUI sets it up."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import InvalidRequest


@cache
def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("comfy_kitchen") is not None


@cache
def kitchen() -> Any:
    """Return the package.

    Its kernels for CUDA need torch with CUDA 13, and those for Triton are off unless ComfyUI's user turns them on
    (``comfy/quant_ops.py``). Without them it computes with torch's operators.

    Raises:
        InvalidRequest: it is not installed.
    """
    try:
        import comfy_kitchen
    except ImportError as error:
        raise InvalidRequest(
            f"these weights need the package comfy-kitchen ({error}): install requirements.txt in the backend's Python"
        ) from error
    cuda = torch.version.cuda
    if cuda is None or int(cuda.split(".")[0]) < 13:
        comfy_kitchen.disable_backend("cuda")
    comfy_kitchen.disable_backend("triton")
    return comfy_kitchen
