"""Muon: momentum with orthogonalized update matrices, so that all directions learn at the same pace.

Follows Keller Jordan's reference (https://kellerjordan.github.io/posts/muon/), in float32. Updates are scaled to Adam's
usual size as in "Muon is Scalable for LLM Training" (arXiv 2502.16982), so that one learning rate serves both.
``torch.optim.Muon`` accepts only matrices and computes in bfloat16, which is slow on a CPU.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 4


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the nearest matrix ``[rows, columns]`` with singular values near 1, by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, for weights of two or more dims; a convolution kernel is flattened to a matrix."""

    def __init__(self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group["lr"], group["momentum"])

    def _update(self, weight: Tensor, gradient: Tensor, lr: float, momentum: float) -> None:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(state["momentum"], momentum).flatten(1)
        scale = 0.2 * max(direction.shape) ** 0.5
        weight.add_(orthogonalize(direction).view_as(weight), alpha=-lr * scale)
