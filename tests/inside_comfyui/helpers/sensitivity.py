"""How much ComfyUI's own result changes when its predictions change as little as by rounding."""

from collections.abc import Callable
from typing import Any

import torch
from helpers.inside_fixtures import relative_error

CLOSE = 1e-4
CHANGES = (1 + 1e-6, 1 - 1e-6)
ROUNDING = 10
"""How much more than ``CHANGES`` the ranks' rounding may change a prediction."""


def limit(model: Any, sample: Callable[[Any], torch.Tensor], reference: torch.Tensor, *, close: float = CLOSE) -> float:
    """Return how far a result may be from ComfyUI's.

    Args:
        model: ComfyUI's own.
        sample: samples with it.
        reference: what that gives.
        close: how far any result may be.
    """
    return max(close, *(ROUNDING * relative_error(_with(model, sample, change), reference) for change in CHANGES))


def _with(model: Any, sample: Callable[[Any], torch.Tensor], change: float) -> torch.Tensor:
    hook = model.model.diffusion_model.register_forward_hook(lambda module, args, prediction: prediction * change)
    try:
        return sample(model)
    finally:
        hook.remove()
