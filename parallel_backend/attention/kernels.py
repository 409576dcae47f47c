"""The attention kernels. To add one, add a class here and an entry to ``KERNELS``.

Each computes ``softmax(q k^T * scale) v`` for q, k and v ``[B, heads, tokens, head_dim]``. k and v may have fewer
heads, each of which equally many successive query heads share. ``with_lse`` also returns the log of the softmax's
denominator (the log-sum-exp), ``[B, heads, query tokens]`` in float32. Ring attention merges partial results with it.
"""

import inspect
from collections.abc import Collection
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .. import packages
from ..errors import BrokenPackage, InvalidRequest
from . import amd, torch_operators
from .flash_package import flash_package
from .torch_operators import HeadSizes
from .trial import runs

_HALF = (torch.float16, torch.bfloat16)
_HOPPER = (9, 0)
"""Lowest CUDA compute capability with which cuDNN is faster than FlashAttention 2. Blackwell's are higher."""
_PROBED_TOKENS = 256
"""Tokens for which torch is asked what it picks. Its choice by device and head size is the same for longer rows."""
_GET_SAGE = "install version 2 from https://github.com/thu-ml/SageAttention (PyPI has version 1)"


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
        key, value = torch_operators.for_choice(query, key, value, scale)
        shares = torch_operators.share_keys(query, key)
        return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=shares)

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Calls the operators that the function above dispatches to."""
        if query.device.type == "cpu":
            key, value = torch_operators.for_choice(query, key, value, scale)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
        elif torch.version.hip is not None:
            operators = torch_operators.flash, torch_operators.efficient
            out, lse = amd.with_lse(query, *torch_operators.with_all_heads(query, key, value), scale, operators)
        else:
            out, lse = torch_operators.picked_operator(query, key, value, scale)(query, key, value, scale)
        return out, lse[..., : query.shape[2]].float()


class Flash:
    """FlashAttention (https://arxiv.org/abs/2307.08691): package version 3 or 2, otherwise torch's own operator.

    On AMD's GPUs it is package version 2 alone.
    """

    stock = False
    head_sizes = torch_operators.FLASH_HEADS

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type == "cuda" and torch.version.hip is not None and flash_package(device) is None:
            return "on AMD GPUs it needs the package flash_attn, which is not installed or does not run on this one"
        return _needs_half_on_cuda(device, dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return self.with_lse(query, key, value, scale)[0]

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        package = flash_package(query.device)
        if package is None:
            return torch_operators.flash(query, key, value, scale)
        return package(query, key, value, scale)


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
        return torch_operators.cudnn(query, *torch_operators.with_all_heads(query, key, value), scale)


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
            key, value = torch_operators.with_all_heads(query, key, value)
        result: Any = attend(query, key, value, tensor_layout="HND", sm_scale=scale, return_lse=return_lse)
        return result


KERNELS: dict[str, Kernel] = {"sdpa": Sdpa(), "flash": Flash(), "cudnn": Cudnn(), "sage": Sage()}
"""Kernels by their name in the loader's ``attention`` input."""

AUTO = "auto"


def choose(name: str, device: torch.device, dtype: torch.dtype, head_sizes: Collection[int]) -> Kernel:
    """Return the kernel of a name.

    ``auto`` is FlashAttention 3 on Hopper if its package is installed. Otherwise it is cuDNN on Hopper and Blackwell,
    and FlashAttention 2 on other GPUs if its package is installed. What does not support the model or the device is
    left out, and ``sdpa`` is what remains.

    Raises:
        InvalidRequest: there is no kernel of that name, or it cannot run here; the message says what would work.
    """
    if name == AUTO:
        return KERNELS[_fastest(device, dtype, head_sizes)]
    if name not in KERNELS:
        raise InvalidRequest(f"unknown attention {name!r}: use {AUTO}, {', '.join(KERNELS)}")
    refusal = _refusal(name, device, dtype, head_sizes)
    if refusal:
        works = [other for other in KERNELS if not _refusal(other, device, dtype, head_sizes)]
        raise InvalidRequest(f"attention {name!r} cannot be used: {refusal}; {', '.join(works)} would work here")
    return KERNELS[name]


def for_biases(kernel: Kernel, head_dim: int) -> Kernel:
    """Return a kernel for attention with biases of pairs: the one given, or torch's own in its place.

    One that quantises its input would round the biases, too.

    Args:
        head_dim: features of a head, with the channels of the biases.
    """
    takes = isinstance(kernel, Flash) and head_dim in kernel.head_sizes
    return kernel if takes or isinstance(kernel, Sdpa) else KERNELS["sdpa"]


def _fastest(device: torch.device, dtype: torch.dtype, head_sizes: Collection[int]) -> str:
    """Return the name of the fastest exact kernel."""
    package = None if _refusal("flash", device, dtype, head_sizes) else flash_package(device)
    if package and package.version == 3:
        return "flash"
    if not _refusal("cudnn", device, dtype, head_sizes) and torch.cuda.get_device_capability(device) >= _HOPPER:
        if all(_torch_picks_cudnn(device, dtype, size) for size in head_sizes):
            return "sdpa"  # the same, and one rank alone need not redirect a model's attention
        if _cudnn_runs(device):
            return "cudnn"
    return "flash" if package else "sdpa"


@cache
def _torch_picks_cudnn(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    tokens = torch.empty(1, 1, _PROBED_TOKENS, head_size, dtype=dtype, device=device)
    return torch_operators.picked(tokens, tokens, tokens, None) == SDPBackend.CUDNN_ATTENTION


@cache
def _cudnn_runs(device: torch.device) -> bool:
    return runs("cuDNN's attention", torch_operators.cudnn, device)


def _refusal(name: str, device: torch.device, dtype: torch.dtype, head_sizes: Collection[int]) -> str | None:
    """Return why a kernel cannot compute a model's attention here; None if it can."""
    kernel = KERNELS[name]
    unavailable = kernel.unavailable(device, dtype)
    unsupported = [size for size in sorted(head_sizes) if kernel.head_sizes and size not in kernel.head_sizes]
    if unavailable or not unsupported:
        return unavailable
    return f"it supports head sizes {kernel.head_sizes}, and this model has a head size of {unsupported[0]}"


def _needs_nvidia() -> str | None:
    return None if torch.version.hip is None else "it needs an NVIDIA GPU, and this is AMD's build of torch"


def _needs_half_on_cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA GPU and the ranks are on {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < torch_operators.AMPERE:
        name = torch.cuda.get_device_name(device)
        return f"it needs an NVIDIA GPU of the Ampere generation or newer, and this is a {name}"
    if dtype not in _HALF:
        return f"it computes in float16 or bfloat16, and the model is in {str(dtype).removeprefix('torch.')}"
    return None
