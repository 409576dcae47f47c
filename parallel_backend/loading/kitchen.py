"""comfy-kitchen, ComfyUI's own kernels and decoders of compressed weights, set up as ComfyUI sets it up."""

import logging
from functools import cache
from typing import Any

import torch

from .. import packages
from ..errors import BrokenPackage

log = logging.getLogger(__name__)


@cache
def is_usable() -> bool:
    """Whether the package can be imported; the log says why not."""
    try:
        kitchen()
    except BrokenPackage as error:
        log.warning("fp8 weights are decoded before each product, which is slower: %s", error)
        return False
    return True


@cache
def kitchen() -> Any:
    """Return the package.

    Its kernels for CUDA need torch with CUDA 13, and those for Triton are off unless ComfyUI's user turns them on
    (``comfy/quant_ops.py``). Without them it computes with torch's operators.

    Raises:
        BrokenPackage: it is missing or cannot be imported.
    """
    comfy_kitchen = packages.load("comfy_kitchen")
    cuda = torch.version.cuda
    if cuda is None or int(cuda.split(".")[0]) < 13:
        comfy_kitchen.disable_backend("cuda")
    comfy_kitchen.disable_backend("triton")
    return comfy_kitchen
