"""The package FlashAttention (https://arxiv.org/abs/2307.08691), if one is installed that runs on this GPU."""

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import packages
from ..error_texts import breaks_device
from ..errors import BrokenPackage

log = logging.getLogger(__name__)

_HOPPER = (9, 0)
"""The only compute capability that FlashAttention 3 has kernels for."""


@cache
def flash_package(device: torch.device) -> Callable[..., Any] | None:
    """Return the function of FlashAttention 3 or, failing that, 2; None if neither runs on this GPU.

    A package may be built for another torch or lack the GPU's kernels, so a small call tries it.
    """
    # AMD's GPUs have capabilities of their own, some of which are the same numbers.
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == _HOPPER
    for name in ("flash_attn_interface", "flash_attn") if hopper else ("flash_attn",):
        if not packages.is_installed(name):
            continue
        try:
            function: Callable[..., Any] = packages.load(name).flash_attn_func
            tokens = torch.zeros(1, 1, 16, 64, dtype=torch.float16, device=device)
            lse = call_package(function, tokens, tokens, tokens, None)[1]
            torch.cuda.synchronize(device)
            if not torch.allclose(lse, torch.full_like(lse, math.log(16)), atol=1e-2):
                raise ValueError("its log-sum-exp is another one")
        except (BrokenPackage, OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
            if breaks_device(str(error)):
                raise  # no other kernel would run either
            log.warning("the package %s does not run on %s and is not used: %s", name, device, error)
            continue
        return function
    return None


def call_package(
    package: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Call a package's function; return the attention output and the log-sum-exp."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out, lse, *_ = package(q, k, v, softmax_scale=scale, return_attn_probs=True)
    return out.transpose(1, 2), lse[..., : query.shape[2]]  # some versions round the number of queries up
