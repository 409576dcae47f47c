"""Keeps pixels beyond black and white apart, which clamping would make equal."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Unclamped(TorchFunctionMode):
    """Context in which tensors are not clamped, so that differences in pixels outside -1..1 are not hidden."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchFunctionMode``."""
        return args[0] if func in (torch.clamp, torch.Tensor.clamp_) else func(*args, **(kwargs or {}))
