"""The one seam that all attention of all families passes: where Ulysses (and later ring, kernels) live.

diffusers' processors stay as they are. An instance is wrapped by one that runs the stock processor and
hands its single ``scaled_dot_product_attention`` call to the seam.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .errors import BackendFailure


class Attention(Protocol):
    """What the seam calls: q, k and v ``[B, heads, tokens, head_dim]``, options as in torch's function."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor: ...


class _Route(TorchFunctionMode):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention, self.calls = attention, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self.attention(*args, **(kwargs or {}))


class RoutedProcessor:
    """A diffusers attention processor whose attention goes through the seam.

    Raises:
        BackendFailure: the stock processor reached attention another way (a kernel set by
            ``DIFFUSERS_ATTN_BACKEND``, say), so that a sharded result would be wrong.
    """

    def __init__(self, stock: Any, attention: Attention) -> None:
        self.stock, self.attention = stock, attention

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Route(self.attention) as route:
            result = self.stock(module, *args, **kwargs)
        if route.calls != 1:
            raise BackendFailure(
                f"{type(self.stock).__name__} called torch's attention {route.calls} times instead of once; "
                "unset DIFFUSERS_ATTN_BACKEND, which takes attention elsewhere"
            )
        return result


@contextmanager
def routed(modules: Iterable[nn.Module], attention: Attention) -> Iterator[None]:
    """Send the attention of ``modules`` through the seam, and put the stock processors back at the end."""
    wrapped: list[tuple[Any, Any]] = [(module, module.processor) for module in modules]
    try:
        for module, stock in wrapped:
            module.processor = RoutedProcessor(stock, attention)
        yield
    finally:
        for module, stock in wrapped:
            module.processor = stock
