"""Hashes of tensors that ComfyUI keeps, such as those of a LoRA's file. It never writes to them."""

import hashlib

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .sealed_file import raw_bytes

_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By tensor. The hash of a view is kept with the tensor that it views, which lives longer."""


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's dtype, shape and numbers. It is computed once."""
    owner = tensor if tensor._base is None else tensor._base
    by_view = _known.setdefault(owner, {})
    key = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    if key not in by_view:
        found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
        found.update(raw_bytes(tensor))
        by_view[key] = found.hexdigest()
    return str(by_view[key])
