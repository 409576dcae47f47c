"""What runs on the CPU in the place of attention kernels that torch has for CUDA alone."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

_ROWS = 32
"""CUDA's memory-efficient kernel rounds the rows of its log-sum-exp up to a multiple of this."""


def _efficient(query: Tensor, key: Tensor, value: Tensor, bias: None, compute_log_sumexp: bool, **options: Any) -> Any:
    out, lse = _flash(query, key, value, **options)
    return out, F.pad(lse, (0, -lse.shape[2] % _ROWS)), torch.zeros(()), torch.zeros(())


def _flash(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=options.get("scale"))


def _choice(query: Tensor, *_: Any, **options: Any) -> int:
    """Return what CUDA's attention picks: for half precision FlashAttention, and the memory-efficient kernel else."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    return int((SDPBackend.FLASH_ATTENTION if half else SDPBackend.EFFICIENT_ATTENTION).value)


REPLACED: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,  # chooses a kernel by the device
    aten._fused_sdp_choice.default: _choice,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_flash_attention.default: _flash,
}
"""By CUDA's operator."""
