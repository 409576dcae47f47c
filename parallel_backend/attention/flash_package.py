"""The package FlashAttention (https://arxiv.org/abs/2307.08691), if one is installed that runs on this GPU."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import packages
from ..errors import BrokenPackage
from .trial import runs

log = logging.getLogger(__name__)

_HOPPER = (9, 0)
"""The only compute capability that FlashAttention 3 has kernels for."""
_MODULES = {3: "flash_attn_interface", 2: "flash_attn"}
"""By version, what the package is imported as."""


@dataclass(frozen=True, kw_only=True)
class FlashPackage:
    """A version of FlashAttention, called like ``Kernel.with_lse``.

    Attributes:
        version: 3 or 2.
        function: its ``flash_attn_func``.
        options: arguments with which it returns the log-sum-exp. FlashAttention 3 returned it always before it took
            ``return_attn_probs``.
    """

    version: int
    function: Callable[..., Any]
    options: tuple[str, ...]

    @classmethod
    def of(cls, version: int, function: Callable[..., Any]) -> "FlashPackage":
        """Look at how a package's function is called."""
        takes = inspect.signature(function).parameters
        return cls(version=version, function=function, options=tuple({"return_attn_probs"} & takes.keys()))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Return the attention output and the log-sum-exp."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out, lse, *_ = self.function(q, k, v, softmax_scale=scale, **dict.fromkeys(self.options, True))
        return out.transpose(1, 2), lse[..., : query.shape[2]]  # some versions round the number of queries up


@cache
def flash_package(device: torch.device) -> FlashPackage | None:
    """Return FlashAttention 3 or, failing that, 2; None if neither is installed and runs on this GPU."""
    # AMD's GPUs have capabilities of their own, some of which are the same numbers.
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == _HOPPER
    for version, name in _MODULES.items():
        if (version == 3 and not hopper) or not packages.is_installed(name):
            continue
        try:
            package = FlashPackage.of(version, packages.load(name).flash_attn_func)
        except (BrokenPackage, AttributeError, TypeError, ValueError) as error:
            log.warning("the package %s does not run on %s and is not used: %s", name, device, error)
            continue
        if runs(f"the package {name}", package, device):
            return package
    return None
