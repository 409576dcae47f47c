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


def scale_predictions(module: torch.nn.Module, factor: float) -> Any:
    """Let a transformer's predictions change by a factor, and return the hook's handle."""

    def scaled(module: torch.nn.Module, args: Any, prediction: Any) -> Any:
        return [part * factor for part in prediction] if isinstance(prediction, list) else prediction * factor

    return module.register_forward_hook(scaled)


def _with(model: Any, sample: Callable[[Any], torch.Tensor], change: float) -> torch.Tensor:
    hook = scale_predictions(model.model.diffusion_model, change)
    try:
        return sample(model)
    finally:
        hook.remove()
