"""The files with LoRA factors that the ranks read, one for each LoRA that is in use.

A file's id is a hash of its content, to which the shapes of the model's weights belong. So a changed strength, a copied
node, or a LoRA that is taken out and put back reads and sends nothing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from comfy.weight_adapter import WeightAdapterBase
from torch import Tensor

from ...parallel_backend.checkpoint import adapter_file
from ...parallel_backend.checkpoint.adapter_file import AdapterLayer
from ...parallel_backend.protocol.model_spec import Adapter
from ..backend.session import current
from .digests import digest
from .recent_files import RecentFiles
from .sealed_file import SealedFile, Slot
from .weight_patches import LowRankPatch


class _Groups(WeakKeyDictionary[object, object]):
    """The call of ``add_patches`` that each of ComfyUI's adapter objects came with: one LoRA."""


def remember_group(changes: Iterable[object]) -> None:
    """Note that the adapters among these changes come from one LoRA."""
    groups, group = current().part(_Groups), object()
    for change in changes:
        if isinstance(change, WeightAdapterBase):
            groups[change] = group


def adapters_for(
    patches: Sequence[LowRankPatch], shapes: Mapping[str, Sequence[int]]
) -> list[tuple[Adapter, SealedFile]]:
    """Return the LoRAs that make up some changes, each with its file for the ranks."""
    groups: dict[tuple[object, float], list[LowRankPatch]] = {}
    known = current().part(_Groups)
    for patch in patches:
        groups.setdefault((known.get(patch.source), patch.strength), []).append(patch)
    return [
        _adapter(sorted(group, key=lambda patch: (patch.weight, patch.start)), strength, shapes)
        for (_, strength), group in groups.items()
    ]


def _adapter(
    patches: Sequence[LowRankPatch], strength: float, shapes: Mapping[str, Sequence[int]]
) -> tuple[Adapter, SealedFile]:
    file_id = _id(patches, shapes)
    file = current().part(RecentFiles).get(file_id, lambda: _new(file_id, patches, shapes))
    return Adapter(path=str(file.path), id=file_id, strength=strength), file


def _new(
    file_id: str, patches: Sequence[LowRankPatch], shapes: Mapping[str, Sequence[int]]
) -> tuple[SealedFile, Iterable[Tensor]]:
    layers = [AdapterLayer(weight=each.weight, start=each.start, scale=each.scale) for each in patches]
    tensors = {}
    for number, patch in enumerate(patches):
        tensors[f"{number}.up"] = patch.up if patch.order is None else patch.up[patch.order]
        tensors[f"{number}.down"] = patch.down
    slots = {name: Slot(dtype=each.dtype, shape=tuple(each.shape)) for name, each in tensors.items()}
    return SealedFile(slots, adapter_file.metadata(layers, shapes, file_id)), tensors.values()


def _id(patches: Sequence[LowRankPatch], shapes: Mapping[str, Sequence[int]]) -> str:
    layers = [
        [each.weight, each.start, each.scale, digest(each.up), digest(each.down), _numbers(each.order)]
        for each in patches
    ]
    content = json.dumps([layers, sorted((name, *shape) for name, shape in shapes.items())])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _numbers(order: Tensor | None) -> list[int] | None:
    return None if order is None else order.tolist()
