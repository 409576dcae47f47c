"""torch's own attention operators, which return the log-sum-exp, and which of them torch picks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .amd import Operator

AMPERE = (8, 0)
"""Lowest CUDA compute capability of all kernels except torch's memory-efficient attention, which needs less."""
_HEAD_DIM_STEP = 8
"""torch's CUDA kernels need head sizes that are multiples of this."""
WITHOUT_SHARING = (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION)
"""torch's kernels that need a key head for each query head, or repeat them in a slower way than ours."""


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """The head sizes that a kernel supports: multiples of ``step``, up to ``maximum``."""

    maximum: int
    step: int = 1

    def __contains__(self, size: int) -> bool:
        return size <= self.maximum and size % self.step == 0

    def __str__(self) -> str:
        return f"up to {self.maximum}" + (f" in multiples of {self.step}" if self.step > 1 else "")


FLASH_HEADS = HeadSizes(maximum=256, step=8)
"""Head sizes of FlashAttention, torch's own and the packages."""


def picked_operator(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Operator:
    """Return the operator that ``scaled_dot_product_attention`` picks, if it takes these heads without padding.

    torch's memory-efficient attention covers the other cases.
    """
    choice = picked(query, key, value, scale)
    if choice == SDPBackend.CUDNN_ATTENTION:
        return cudnn
    takes_heads = query.shape[-1] in FLASH_HEADS
    return flash if choice == SDPBackend.FLASH_ATTENTION and takes_heads else efficient


def picked(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> SDPBackend:
    """Return the kernel that ``scaled_dot_product_attention`` picks."""
    shares = share_keys(query, key)
    return SDPBackend(torch.ops.aten._fused_sdp_choice(query, key, value, scale=scale, enable_gqa=shares))


def share_keys(query: Tensor, key: Tensor) -> bool:
    """Whether query heads share key heads."""
    return query.shape[1] != key.shape[1]


def for_choice(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return keys and values as the kernel that torch picks takes them: with all heads, if it needs them."""
    if share_keys(query, key) and picked(query, key, value, scale) in WITHOUT_SHARING:
        return with_all_heads(query, key, value)
    return key, value


def with_all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the queries have."""
    if not share_keys(query, key):
        return key, value
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def flash(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]
    return out, lse


def cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, compute_log_sumexp=True, scale=scale
    )[:2]
    return out, lse.view(query.shape[:3]).float()


def efficient(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """torch's memory-efficient attention, with heads zero-padded to a size that it supports.

    Where torch emulates bfloat16 it has no kernel for it, so it runs in float32.
    """
    head_dim, dtype = query.shape[-1], query.dtype
    key, value = with_all_heads(query, key, value)
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(query.device) < AMPERE:
        query, key, value = query.float(), key.float(), value.float()
    scale = head_dim**-0.5 if scale is None else scale
    if head_dim % _HEAD_DIM_STEP:
        query, key, value = (F.pad(tensor, (0, -head_dim % _HEAD_DIM_STEP)) for tensor in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, compute_log_sumexp=True, scale=scale
    )[:2]
    return out[..., :head_dim].to(dtype), lse
