"""The attention seam: what modules of diffusers find where they look for attention."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..errors import BackendFailure


class Seam(ABC):
    """Takes the calls of torch's attention and of diffusers' dispatcher."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute attention; see ``Attention`` in ``routing.py``."""

    def sdpa(
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
        """Stands for ``torch.nn.functional.scaled_dot_product_attention``."""
        if attn_mask is not None or dropout_p or is_causal:
            raise BackendFailure(
                "a module called attention with a mask, dropout or is_causal, which is not supported here"
            )
        return self.attend(query, key, value, scale)

    def dispatch(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
    ) -> Tensor:
        """Stands for diffusers' ``dispatch_attention_fn``, whose tensors are ``[B, tokens, heads, head_dim]``."""
        for name in ("attention_kwargs", "backend", "parallel_config"):  # they choose another attention
            options.pop(name, None)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return self.sdpa(q, k, v, attn_mask, *args, **options).transpose(1, 2)

    def stands_for(self, value: object) -> Callable[..., Tensor] | ModuleType | None:
        """Return what a module finds in the place of a global value of its code; None if that is not attention."""
        if value is F:
            return self._functional
        return self.dispatch if getattr(value, "__name__", "") == "dispatch_attention_fn" else None

    @cached_property
    def _functional(self) -> ModuleType:
        """Stands for ``torch.nn.functional``. It is a module, since a compiler looks into modules alone."""
        functional = ModuleType(F.__name__)
        vars(functional).update(vars(F) | {"scaled_dot_product_attention": self.sdpa})
        return functional
