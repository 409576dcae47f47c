"""Routing the attention calls of diffusers' modules to an ``Attention``, such as Ulysses, ring or a kernel.

This is the only way in which attention of any family is replaced. diffusers' classes stay as they are: an instance's
``forward`` is wrapped so that the call to ``scaled_dot_product_attention`` inside it is redirected.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import BackendFailure


class Attention(Protocol):
    """Computes attention in place of ``scaled_dot_product_attention``.

    A module calls it with q, k and v of this rank's tokens, ``[B, heads, local tokens, head_dim]``, and gets the
    attention output in the same shape. ``sample`` is the index in the batch of the single sample that they hold; None
    if they hold the whole batch. Masks are not passed in: the implementation knows all ranks' masks.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None
    ) -> Tensor: ...


Route = tuple[nn.Module, Attention, bool]
"""A module, the attention it is routed to, and whether it calls attention separately for each sample."""


class _Redirect(TorchFunctionMode):
    """Redirects calls of ``scaled_dot_product_attention`` while it is entered, and counts them."""

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
            raise BackendFailure(
                "a module called attention with a mask, dropout, is_causal or enable_gqa, which is not supported here"
            )
        return self.attention(query, key, value, scale=scale, sample=self.calls - 1 if self.each_sample else None)


class Routed:
    """A module's ``forward`` with its attention redirected.

    Args:
        each_sample: whether the module calls attention separately for each sample.

    Raises:
        BackendFailure: the module computed attention in another way, for example with a kernel set by
            ``DIFFUSERS_ATTN_BACKEND``. A sharded result would be wrong.
    """

    def __init__(self, module: nn.Module, attention: Attention, each_sample: bool) -> None:
        self.original: Callable[..., Any] = module.forward
        self.name, self.attention, self.each_sample = type(module).__name__, attention, each_sample

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Redirect(self.attention, self.each_sample) as redirect:
            result = self.original(*args, **kwargs)
        if redirect.calls == 0 or (redirect.calls > 1 and not self.each_sample):
            raise BackendFailure(
                f"{self.name} called torch's attention {redirect.calls} times instead of once; "
                "unset DIFFUSERS_ATTN_BACKEND, which selects another attention function"
            )
        return result


@contextmanager
def routed(routes: Iterable[Route]) -> Iterator[None]:
    """Route the attention of modules; restore their ``forward`` on exit."""
    with ExitStack() as stack:
        for module, attention, each_sample in routes:
            set_until_exit(stack, module, "forward", Routed(module, attention, each_sample))
        yield


def set_until_exit(stack: ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module until the stack closes. What others have set on the instance comes back then."""
    if name in vars(module):
        stack.callback(setattr, module, name, vars(module)[name])
    else:
        stack.callback(delattr, module, name)
    setattr(module, name, value)
