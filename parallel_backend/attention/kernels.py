"""The attention kernels that a rank may compute with. Adding one is a class here and a row in ``KERNELS``.

Each gives ``softmax(q k^T * scale) v`` for q, k and v ``[B, heads, tokens, head_dim]``; ``with_lse`` gives the log
of the softmax's denominator ``[B, heads, query tokens]`` as well, in float32, which is what ring attention merges by.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InvalidRequest

_HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)
"""The CUDA capability from which on all kernels run but torch's memory-efficient one."""
_ALIGNED = 8
"""What the size of a head is a multiple of for all of torch's CUDA kernels."""
_GET_SAGE = "install version 2 from https://github.com/thu-ml/SageAttention (PyPI has version 1)"


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """How many values a head may have: ``step``, or a multiple of it, up to ``most``."""

    most: int
    step: int = 1

    def __contains__(self, size: int) -> bool:
        return size <= self.most and size % self.step == 0

    def __str__(self) -> str:
        return f"up to {self.most} values" + (f" in steps of {self.step}" if self.step > 1 else "")


class Kernel(Protocol):
    """A way to compute attention on one device. ``stock``: it is what diffusers' modules call by themselves."""

    stock: bool

    @property
    def heads(self) -> HeadSizes | None:
        """The heads that it takes; None for all."""

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot run here, with what would help; None if it can."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """The attended values."""

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """The attended values and the log-sum-exp."""


class Sdpa:
    """``torch.nn.functional.scaled_dot_product_attention``, which picks among torch's own kernels."""

    stock = True
    heads = None

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """See ``Kernel.missing``: it is part of torch."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See ``Kernel``."""
        if query.device.type == "cpu":
            # It reads the keys once for every block of queries, and faster where those of a head lie together.
            key, value = key.contiguous(), value.contiguous()
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """See ``Kernel``. These are the operators that the function above ends in."""
        if query.device.type == "cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
        elif _flash_fits(query):
            out, lse = _torch_flash(query, key, value, scale)
        else:
            out, lse = _efficient(query, key, value, scale)
        return out, lse[..., : query.shape[2]].float()


class Flash:
    """FlashAttention (https://arxiv.org/abs/2307.08691): its package, version 3 or 2, else torch's own operator."""

    stock = False
    heads = HeadSizes(most=256, step=8)

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """See ``Kernel.missing``."""
        return _needs_half_on_cuda(device, dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See ``Kernel``."""
        return self.with_lse(query, key, value, scale)[0]

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """See ``Kernel``."""
        package = flash_package()
        if package is None:
            return _torch_flash(query, key, value, scale)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out, lse, *_ = package(q, k, v, softmax_scale=scale, return_attn_probs=True)
        return out.transpose(1, 2), lse


class Cudnn:
    """cuDNN's attention, through torch's operator."""

    stock = False
    heads = HeadSizes(most=128, step=8)  # check_cudnn_tensor_shapes in torch's sdp_utils.cpp

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """See ``Kernel.missing``."""
        if not torch.backends.cudnn.is_available():
            return "cuDNN is not part of this torch: install a CUDA build of torch"
        return _needs_half_on_cuda(device, dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See ``Kernel``."""
        return self.with_lse(query, key, value, scale)[0]

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """See ``Kernel``."""
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, compute_log_sumexp=True, scale=scale
        )[:2]
        return out, lse.view(query.shape[:3]).float()


class Sage:
    """SageAttention (https://arxiv.org/abs/2410.02367), which quantises q and k to 8 bits: not exact."""

    stock = False
    heads = HeadSizes(most=128)  # smaller ones it pads to 64 or 128 by itself

    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """See ``Kernel.missing``."""
        if not _installed("sageattention"):
            return f"the package sageattention is not installed: {_GET_SAGE}"
        try:
            from sageattention import sageattn
        except (ImportError, OSError, RuntimeError) as error:
            return f"the installed sageattention cannot be imported ({error}): {_GET_SAGE}"
        if "return_lse" not in inspect.signature(sageattn).parameters:
            return f"the installed sageattention is older than 2: {_GET_SAGE}"
        return _needs_half_on_cuda(device, dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See ``Kernel``."""
        out: Tensor = self._run(query, key, value, scale, return_lse=False)
        return out

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """See ``Kernel``."""
        out, lse = self._run(query, key, value, scale, return_lse=True)
        return out, lse

    @staticmethod
    def _run(query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, return_lse: bool) -> Any:
        from sageattention import sageattn

        done: Any = sageattn(query, key, value, tensor_layout="HND", sm_scale=scale, return_lse=return_lse)
        return done


KERNELS: dict[str, Kernel] = {"sdpa": Sdpa(), "flash": Flash(), "cudnn": Cudnn(), "sage": Sage()}
"""Kernel by the name that the loader's ``attention`` input has for it."""


AUTO = "auto"


def choose(name: str, device: torch.device, dtype: torch.dtype, heads: Collection[int]) -> Kernel:
    """The kernel of a name; ``auto`` is FlashAttention's package where it is installed and fits, else ``sdpa``.

    ``heads`` are the sizes of the model's heads.

    Raises:
        InvalidRequest: there is none of that name, or it cannot run here; says what would work.
    """
    if name == AUTO:
        fits = not _refusal("flash", device, dtype, heads) and flash_package() is not None
        return KERNELS["flash" if fits else "sdpa"]
    if name not in KERNELS:
        raise InvalidRequest(f"attention {name!r} is none of {', '.join(KERNELS)}")
    refusal = _refusal(name, device, dtype, heads)
    if refusal:
        works = [other for other in KERNELS if not _refusal(other, device, dtype, heads)]
        raise InvalidRequest(f"attention {name!r} cannot be used: {refusal}; {', '.join(works)} would work here")
    return KERNELS[name]


def _refusal(name: str, device: torch.device, dtype: torch.dtype, heads: Collection[int]) -> str | None:
    """Why it cannot compute a model's attention here; None if it can."""
    kernel = KERNELS[name]
    missing = kernel.missing(device, dtype)
    bad = [size for size in sorted(heads) if kernel.heads and size not in kernel.heads]
    if missing or not bad:
        return missing
    return f"it takes heads of {kernel.heads}, and this model has heads of {bad[0]}"


@cache
def flash_package() -> Callable[..., Any] | None:
    """The function of FlashAttention 3 or 2, the newest that is installed and can be imported."""
    for name in ("flash_attn_interface", "flash_attn"):
        try:
            function: Callable[..., Any] = importlib.import_module(name).flash_attn_func
        except (ImportError, OSError, RuntimeError, AttributeError):  # missing, or built for another torch
            continue
        return function
    return None


def _flash_fits(query: Tensor) -> bool:
    """Whether torch's own FlashAttention takes it; its memory-efficient attention takes the rest."""
    head_dim, capability = query.shape[-1], torch.cuda.get_device_capability(query.device)
    return query.dtype in _HALF and capability >= _AMPERE and head_dim in Flash.heads


def _torch_flash(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]
    return out, lse


def _efficient(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """torch's memory-efficient attention, with heads padded by zeros to a size that it takes."""
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    if head_dim % _ALIGNED:
        query, key, value = (F.pad(tensor, (0, -head_dim % _ALIGNED)) for tensor in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, compute_log_sumexp=True, scale=scale
    )[:2]
    return out[..., :head_dim], lse


def _needs_half_on_cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA GPU and the ranks are on {device.type}"
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return f"it needs an NVIDIA GPU from Ampere on, and this is a {torch.cuda.get_device_name(device)}"
    if dtype not in _HALF:
        return f"it computes in float16 or bfloat16 and the model is in {str(dtype).removeprefix('torch.')}"
    return None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
