"""Which tensors of a request the ranks may have already: those that stay the same from step to step.

ComfyUI makes the tensors of the conditioning anew for each step, with the same values. So their values are compared
with those of the request before, and hashed only where they differ.
"""

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ..protocol.frames import TensorMeta
from ..protocol.messages import CHANGING, Forward, RankRequest, Sample
from ..protocol.tensors import bytes_of, describe, same_bits


@dataclass(frozen=True, kw_only=True)
class _Hashed:
    """A copy of a tensor that was sent, since others may change the tensor itself, and its digest."""

    tensor: Tensor
    digest: str


class ConstantTensors:
    """Describes the tensors of requests, with digests where the ranks may have them. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, _Hashed] = {}

    def describe(self, message: RankRequest, tensors: Mapping[str, Tensor]) -> tuple[TensorMeta, ...]:
        """Return the metadata of a request's tensors.

        Raises:
            InvalidRequest: the protocol does not support a dtype.
        """
        metas = describe(tensors)
        if not isinstance(message, Forward | Sample):
            return metas
        constant = {meta.name: tensors[meta.name] for meta in metas if _is_constant(meta.name)}
        with self._lock:
            self._last = {name: self._hashed(name, tensor) for name, tensor in constant.items()}
            digests = {name: hashed.digest for name, hashed in self._last.items()}
        same = _equal_to_first(tensors) | _twice(digests)
        return tuple(
            replace(meta, digest="" if meta.name in same else digests.get(meta.name, ""), same=same.get(meta.name, ""))
            for meta in metas
        )

    def _hashed(self, name: str, tensor: Tensor) -> _Hashed:
        before = self._last.get(name)
        if before is not None and same_bits(before.tensor, tensor):
            return before
        return _Hashed(tensor=tensor.detach().clone(), digest=_digest(tensor))


def _is_constant(name: str) -> bool:
    """Whether it is an input of a branch, such as ``0.encoder_hidden_states``, that no step changes."""
    branch, dot, argument = name.partition(".")
    return bool(dot) and branch.isdecimal() and argument not in CHANGING


def _equal_to_first(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the inputs of later branches that equal those of the first one: guidance has one latent for all."""
    found: dict[str, str] = {}
    for argument in CHANGING:
        first = f"0.{argument}"
        if first in tensors:
            others = (name for name in tensors if name.partition(".")[2] == argument and name != first)
            found |= {name: first for name in others if same_bits(tensors[first], tensors[name])}
    return found


def _twice(digests: Mapping[str, str]) -> dict[str, str]:
    """Return the tensors whose digest an earlier one has, and its name."""
    first: dict[str, str] = {}
    return {name: earlier for name, digest in digests.items() if (earlier := first.setdefault(digest, name)) != name}


def _digest(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    if tensor.numel():
        found.update(bytes_of(tensor.detach().cpu().contiguous()))
    return found.hexdigest()
