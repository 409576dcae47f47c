"""Facts about tensors that ComfyUI keeps and never changes, such as a LoRA's. Each is computed once."""

import hashlib
import math
from collections.abc import Callable
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..backend.session import current
from .sealed_file import raw_bytes


class _Known:
    """Facts of objects that ComfyUI keeps, as long as they live.

    Attributes:
        tensors: by tensor. What is known of a view is kept with the tensor that it views, which lives longer.
        identities: by function.
    """

    def __init__(self) -> None:
        self.tensors: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.identities: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's dtype, shape and numbers. It is computed once."""
    found: str = _computed_once("digest", tensor, _digest)
    return found


def is_finite(number: Tensor | float) -> bool:
    """Whether a number, or each of a tensor, is neither infinite nor NaN. It is computed once for a tensor."""
    if not isinstance(number, Tensor):
        return math.isfinite(number)
    return bool(_computed_once("is finite", number, lambda tensor: tensor.float().isfinite().all()))


def _digest(tensor: Tensor) -> str:
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    found.update(raw_bytes(tensor))
    return found.hexdigest()


def _computed_once(what: str, tensor: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    owner = tensor if tensor._base is None else tensor._base
    by_view = current().part(_Known).tensors.setdefault(owner, {})
    key = (what, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    if key not in by_view:
        by_view[key] = compute(tensor)
    return by_view[key]


def described(part: Any) -> str:
    """Return a text that differs for parts of changes that have another effect."""
    if isinstance(part, Tensor):
        return digest(part)
    if isinstance(part, list | tuple):
        return f"[{', '.join(map(described, part))}]"
    if hasattr(part, "weights"):
        return f"{type(part).__name__}{described(part.weights)}"
    return _identity(part) if callable(part) else repr(part)


def _identity(function: Any) -> str:
    """Return a text that no other function has. Two functions of one name may hold different values."""
    try:
        return current().part(_Known).identities.setdefault(function, uuid4().hex)
    except TypeError:  # no weak reference to it is possible
        return uuid4().hex
