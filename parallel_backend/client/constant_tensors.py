"""Which tensors of a request the ranks may have already: those that stay the same from step to step.

ComfyUI makes the tensors of the conditioning anew for each step, with the same values. So their values are compared
with those of the last requests, and hashed only where they differ from all. Requests may take turns: those of a
sampler in a sampler, or of the windows of a video.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ..protocol.frames import TensorMeta
from ..protocol.messages import CHANGING, Forward, RankRequest, Sample
from ..protocol.tensors import bytes_of, describe, same_bits

MOST = 16
"""Requests after which a tensor that none of them had is forgotten: the ranks keep as many runs."""
MAX_BYTES = 1 << 30
"""Bytes of copies that are kept, if those of the last request are not more."""


@dataclass(kw_only=True)
class _Copy:
    """A copy of a tensor that was sent, since others may change the tensor itself.

    Attributes:
        tensor: the copy.
        used: number of the last request that had the tensor.
    """

    tensor: Tensor
    used: int


class ConstantTensors:
    """Describes the tensors of requests, with digests where the ranks may have them. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], _Copy] = OrderedDict()  # by name and digest, the oldest use first
        self._number = 0

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
            self._number += 1
            digests = {name: self._digest_of(name, tensor) for name, tensor in constant.items()}
            self._forget()
        same = _equal_to_first(tensors) | _twice(digests)
        return tuple(
            replace(meta, digest="" if meta.name in same else digests.get(meta.name, ""), same=same.get(meta.name, ""))
            for meta in metas
        )

    def _digest_of(self, name: str, tensor: Tensor) -> str:
        known = (key for key in reversed(self._known) if key[0] == name)
        key = next((key for key in known if same_bits(self._known[key].tensor, tensor)), None)
        if key is None:
            key = name, _digest(tensor)
            self._known[key] = _Copy(tensor=tensor.detach().clone(), used=self._number)
        self._known[key].used = self._number
        self._known.move_to_end(key)
        return key[1]

    def _forget(self) -> None:
        """Forget what no recent request had, and of too many bytes those that were used the longest ago."""
        nbytes = sum(each.tensor.nbytes for each in self._known.values())
        for key, each in list(self._known.items()):
            recent = each.used > self._number - MOST and nbytes <= MAX_BYTES
            if each.used == self._number or recent:
                return
            nbytes -= each.tensor.nbytes
            del self._known[key]


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
