"""The attention kernels. To add one, add a class here and an entry to ``KERNELS``.

Each computes ``softmax(q k^T * scale) v`` for q, k and v ``[B, heads, tokens, head_dim]``. k and v may have fewer
heads, each of which equally many successive query heads share. ``with_lse`` also returns the log of the softmax's
denominator (the log-sum-exp), ``[B, heads, query tokens]`` in float32. Ring attention merges partial results with it.
"""

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .. import packages
from ..errors import BrokenPackage, InvalidRequest
from . import amd
from .amd import Operator
from .flash_package import call_package, flash_package

_HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)
"""Lowest CUDA compute capability of all kernels except torch's memory-efficient attention, which needs less."""
_HEAD_DIM_STEP = 8
"""torch's CUDA kernels need head sizes that are multiples of this."""
_WITHOUT_SHARING = (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION)
"""torch's kernels that need a key head for each query head, or repeat them in a slower way than ours."""
_GET_SAGE = "install version 2 from https://github.com/thu-ml/SageAttention (PyPI has version 1)"


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """The head sizes that a kernel supports: multiples of ``step``, up to ``maximum``."""

    maximum: int
    step: int = 1

    def __contains__(self, size: int) -> bool:
        return size <= self.maximum and size % self.step == 0

    def __str__(self) -> str:
        return f"up to {self.maximum}" + (f" in multiples of {self.step}" if self.step > 1 else "")


class Kernel(Protocol):
    """A way to compute attention on one device.

    Attributes:
        stock: whether this is the attention that diffusers' modules call by default.
    """

    stock: bool

    @property
    def head_sizes(self) -> HeadSizes | None:
        """The head sizes that it supports; None for all."""

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the kernel cannot run here and what would help; None if it can run."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return the attention output. ``scale`` None is ``head_dim ** -0.5``."""

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Return the attention output and the log-sum-exp."""


class Sdpa:
    """``torch.nn.functional.scaled_dot_product_attention``, which picks among torch's own kernels."""

    stock = True
    head_sizes = None

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """It is part of torch."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        if query.device.type == "cpu":
            # It reads the keys once for every block of queries, which is faster if each head's keys are contiguous.
            key, value = key.contiguous(), value.contiguous()
        if _shares(query, key) and _choice(query, key, value, scale) in _WITHOUT_SHARING:
            key, value = _repeated(query, key, value)
        return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=_shares(query, key))

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Calls the operators that the function above dispatches to."""
        if query.device.type == "cpu":
            if _shares(query, key) and _choice(query, key, value, scale) in _WITHOUT_SHARING:
                key, value = _repeated(query, key, value)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
        elif torch.version.hip is not None:
            out, lse = amd.with_lse(query, *_repeated(query, key, value), scale, (_torch_flash, _efficient))
        else:
            out, lse = _torchs_choice(query, key, value, scale)(query, key, value, scale)
        return out, lse[..., : query.shape[2]].float()


class Flash:
    """FlashAttention (https://arxiv.org/abs/2307.08691): package version 3 or 2, otherwise torch's own operator.

    On AMD's GPUs it is package version 2 alone.
    """

    stock = False
    head_sizes = HeadSizes(maximum=256, step=8)

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type == "cuda" and torch.version.hip is not None and flash_package(device) is None:
            return "on AMD GPUs it needs the package flash_attn, which is not installed or does not run on this one"
        return _needs_half_on_cuda(device, dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return self.with_lse(query, key, value, scale)[0]

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        package = flash_package(query.device)
        if package is None:
            return _torch_flash(query, key, value, scale)
        return call_package(package, query, key, value, scale)


class Cudnn:
    """cuDNN's attention, through torch's operator."""

    stock = False
    head_sizes = HeadSizes(maximum=128, step=8)  # check_cudnn_tensor_shapes in torch's sdp_utils.cpp

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if not torch.backends.cudnn.is_available():
            return "this build of torch has no cuDNN: install a CUDA build of torch"
        return _needs_nvidia() or _needs_half_on_cuda(device, dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return self.with_lse(query, key, value, scale)[0]

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        # Which versions of it take fewer key heads than query heads is not known.
        return _cudnn(query, *_repeated(query, key, value), scale)


class Sage:
    """SageAttention (https://arxiv.org/abs/2410.02367). It quantises q and k to 8 bits, so it is not exact."""

    stock = False
    head_sizes = HeadSizes(maximum=128)  # pads smaller heads to 64 or 128 by itself

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if not packages.is_installed("sageattention"):
            return f"the package sageattention is not installed: {_GET_SAGE}"
        try:
            sageattn = packages.load("sageattention").sageattn
        except (BrokenPackage, AttributeError) as error:
            return f"the installed sageattention cannot be used ({error.__cause__ or error}): {_GET_SAGE}"
        if "return_lse" not in inspect.signature(sageattn).parameters:
            return f"the installed sageattention is older than 2: {_GET_SAGE}"
        return _needs_nvidia() or _needs_half_on_cuda(device, dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        out: Tensor = self._run(query, key, value, scale, return_lse=False)
        return out

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        out, lse = self._run(query, key, value, scale, return_lse=True)
        return out, lse

    @staticmethod
    def _run(query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, return_lse: bool) -> Any:
        attend = packages.load("sageattention").sageattn
        if return_lse:  # its correction of the log-sum-exp takes as many key heads as query heads
            key, value = _repeated(query, key, value)
        result: Any = attend(query, key, value, tensor_layout="HND", sm_scale=scale, return_lse=return_lse)
        return result


KERNELS: dict[str, Kernel] = {"sdpa": Sdpa(), "flash": Flash(), "cudnn": Cudnn(), "sage": Sage()}
"""Kernels by their name in the loader's ``attention`` input."""

AUTO = "auto"


def choose(name: str, device: torch.device, dtype: torch.dtype, head_sizes: Collection[int]) -> Kernel:
    """Return the kernel of a name.

    ``auto`` is FlashAttention if its package is installed and supports the model and the device, otherwise ``sdpa``.

    Raises:
        InvalidRequest: there is no kernel of that name, or it cannot run here; the message says what would work.
    """
    if name == AUTO:
        use_flash = not _refusal("flash", device, dtype, head_sizes) and flash_package(device) is not None
        return KERNELS["flash" if use_flash else "sdpa"]
    if name not in KERNELS:
        raise InvalidRequest(f"unknown attention {name!r}: use {AUTO}, {', '.join(KERNELS)}")
    refusal = _refusal(name, device, dtype, head_sizes)
    if refusal:
        works = [other for other in KERNELS if not _refusal(other, device, dtype, head_sizes)]
        raise InvalidRequest(f"attention {name!r} cannot be used: {refusal}; {', '.join(works)} would work here")
    return KERNELS[name]


def _refusal(name: str, device: torch.device, dtype: torch.dtype, head_sizes: Collection[int]) -> str | None:
    """Return why a kernel cannot compute a model's attention here; None if it can."""
    kernel = KERNELS[name]
    unavailable = kernel.unavailable(device, dtype)
    unsupported = [size for size in sorted(head_sizes) if kernel.head_sizes and size not in kernel.head_sizes]
    if unavailable or not unsupported:
        return unavailable
    return f"it supports head sizes {kernel.head_sizes}, and this model has a head size of {unsupported[0]}"


def _torchs_choice(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Operator:
    """Return the operator that ``scaled_dot_product_attention`` picks, if it takes these heads without padding.

    torch's memory-efficient attention covers the other cases.
    """
    choice = _choice(query, key, value, scale)
    if choice == SDPBackend.CUDNN_ATTENTION:
        return _cudnn
    takes_heads = query.shape[-1] in Flash.head_sizes
    return _torch_flash if choice == SDPBackend.FLASH_ATTENTION and takes_heads else _efficient


def _choice(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> SDPBackend:
    """Return the kernel that ``scaled_dot_product_attention`` picks."""
    shares = _shares(query, key)
    return SDPBackend(torch.ops.aten._fused_sdp_choice(query, key, value, scale=scale, enable_gqa=shares))


def _shares(query: Tensor, key: Tensor) -> bool:
    """Whether query heads share key heads."""
    return query.shape[1] != key.shape[1]


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the queries have."""
    if not _shares(query, key):
        return key, value
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def _torch_flash(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]
    return out, lse


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, compute_log_sumexp=True, scale=scale
    )[:2]
    return out, lse.view(query.shape[:3]).float()


def _efficient(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """torch's memory-efficient attention, with heads zero-padded to a size that it supports.

    Where torch emulates bfloat16 it has no kernel for it, so it runs in float32.
    """
    head_dim, dtype = query.shape[-1], query.dtype
    key, value = _repeated(query, key, value)
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(query.device) < _AMPERE:
        query, key, value = query.float(), key.float(), value.float()
    scale = head_dim**-0.5 if scale is None else scale
    if head_dim % _HEAD_DIM_STEP:
        query, key, value = (F.pad(tensor, (0, -head_dim % _HEAD_DIM_STEP)) for tensor in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, compute_log_sumexp=True, scale=scale
    )[:2]
    return out[..., :head_dim].to(dtype), lse


def _needs_nvidia() -> str | None:
    return None if torch.version.hip is None else "it needs an NVIDIA GPU, and this is AMD's build of torch"


def _needs_half_on_cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA GPU and the ranks are on {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < _AMPERE:
        name = torch.cuda.get_device_name(device)
        return f"it needs an NVIDIA GPU of the Ampere generation or newer, and this is a {name}"
    if dtype not in _HALF:
        return f"it computes in float16 or bfloat16, and the model is in {str(dtype).removeprefix('torch.')}"
    return None
