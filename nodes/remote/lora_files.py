"""The files with LoRA factors that the ranks read, one for each LoRA that is in use.

A file's id is a hash of its content. So a changed strength, a copied node, or a LoRA that is taken out and put back
reads and sends nothing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_backend.checkpoint import adapter_file
from ...parallel_backend.checkpoint.adapter_file import AdapterLayer
from ...parallel_backend.protocol.messages import Adapter
from .sealed_file import SealedFile, raw_bytes, write
from .weight_patches import LowRankPatch

_DIGEST_BYTES = 16

_groups: WeakKeyDictionary[object, object] = WeakKeyDictionary()
"""The call of ``add_patches`` that each of ComfyUI's adapter objects came with: one LoRA."""

_digests: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Hashes of tensors that ComfyUI keeps. It never writes to a LoRA's factors."""

_files: dict[str, SealedFile] = {}
"""By id."""


def remember_group(adapters: Iterable[object]) -> None:
    """Note that these adapter objects are those of one LoRA."""
    group = object()
    for adapter in adapters:
        _groups[adapter] = group


def adapters_for(patches: Sequence[LowRankPatch], shapes: Mapping[str, Sequence[int]]) -> tuple[Adapter, ...]:
    """Return the LoRAs that make up some changes, each with a file for the ranks.

    Args:
        patches: the changes.
        shapes: shape of every weight of the model.
    """
    groups: dict[tuple[object, float], list[LowRankPatch]] = {}
    for patch in patches:
        groups.setdefault((_groups.get(patch.source), patch.strength), []).append(patch)
    return tuple(
        _adapter(sorted(group, key=lambda patch: (patch.weight, patch.start)), strength, shapes)
        for (_, strength), group in groups.items()
    )


def forget_unused(in_use: Iterable[Adapter]) -> None:
    """Free the files that no LoRA in use needs."""
    kept = {adapter.id for adapter in in_use}
    for file_id in _files.keys() - kept:
        del _files[file_id]


def _adapter(patches: Sequence[LowRankPatch], strength: float, shapes: Mapping[str, Sequence[int]]) -> Adapter:
    file_id = _id(patches)
    if file_id not in _files:
        _files[file_id] = _write(patches, shapes)
    return Adapter(path=str(_files[file_id].path), id=file_id, strength=strength)


def _write(patches: Sequence[LowRankPatch], shapes: Mapping[str, Sequence[int]]) -> SealedFile:
    layers = [AdapterLayer(weight=each.weight, start=each.start, scale=each.scale) for each in patches]
    tensors = {}
    for number, patch in enumerate(patches):
        tensors[f"{number}.up"] = patch.up if patch.order is None else patch.up[patch.order]
        tensors[f"{number}.down"] = patch.down
    return write(tensors, adapter_file.metadata(layers, shapes))


def _id(patches: Sequence[LowRankPatch]) -> str:
    described = [
        [each.weight, each.start, each.scale, _digest(each.up), _digest(each.down), _numbers(each.order)]
        for each in patches
    ]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _numbers(order: Tensor | None) -> list[int] | None:
    return None if order is None else order.tolist()


def _digest(tensor: Tensor) -> str:
    """Return a hash of a tensor. ComfyUI keeps the tensor that a view belongs to, so hashes are kept with that."""
    owner = tensor if tensor._base is None else tensor._base
    key = (tuple(tensor.shape), tensor.storage_offset())
    known = _digests.setdefault(owner, {})
    if key not in known:
        digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=_DIGEST_BYTES)
        digest.update(raw_bytes(tensor))
        known[key] = digest.hexdigest()
    return str(known[key])
