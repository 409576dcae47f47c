"""The one seam that all attention of all families passes: where Ulysses, ring and kernels live.

diffusers' modules stay as they are. An instance's ``forward`` is wrapped so that the call to
``scaled_dot_product_attention`` that it ends in goes to the seam.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import BackendFailure


class Attention(Protocol):
    """What the seam calls.

    q, k and v are ``[B, heads, own tokens, head_dim]``. ``sample`` is None for all samples at once, or the index
    of the only one. Masked tokens are the seam's business: it knows the masks of all ranks.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None
    ) -> Tensor: ...


Route = tuple[nn.Module, Attention, bool]
"""A module, its seam, and whether it asks for attention once for each sample."""


class _Route(TorchFunctionMode):
    def __init__(self, attention: Attention, each_sample: bool) -> None:
        super().__init__()
        self.attention, self.each_sample, self.calls = attention, each_sample, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p or is_causal or enable_gqa:
            raise BackendFailure("a module asked for masked, causal, grouped or dropout attention inside the seam")
        return self.attention(query, key, value, scale=scale, sample=self.calls - 1 if self.each_sample else None)


class Routed:
    """A module's ``forward`` whose attention goes through the seam.

    Raises:
        BackendFailure: the module reached attention another way (a kernel set by ``DIFFUSERS_ATTN_BACKEND``, say),
            so that a sharded result would be wrong.
    """

    def __init__(self, module: nn.Module, attention: Attention, each_sample: bool) -> None:
        self.stock: Callable[..., Any] = module.forward
        self.name, self.attention, self.each_sample = type(module).__name__, attention, each_sample

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Route(self.attention, self.each_sample) as route:
            result = self.stock(*args, **kwargs)
        if route.calls == 0 or (route.calls > 1 and not self.each_sample):
            raise BackendFailure(
                f"{self.name} called torch's attention {route.calls} times instead of once; "
                "unset DIFFUSERS_ATTN_BACKEND, which takes attention elsewhere"
            )
        return result


@contextmanager
def routed(sites: Iterable[Route]) -> Iterator[None]:
    """Send the attention of modules through seams, and give them their own ``forward`` back at the end."""
    wrapped: list[nn.Module] = []
    try:
        for module, attention, each_sample in sites:
            module.forward = Routed(module, attention, each_sample)
            wrapped.append(module)
        yield
    finally:
        for module in wrapped:
            del module.forward
