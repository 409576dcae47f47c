"""What is changed in the weights of a parallel MODEL or CLIP while the ranks compute with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...parallel_backend.protocol.messages import Adapter, Overlay
from ..backend.connection import Handle
from ..bridges.bridge import MetaWeights
from . import lora_files, overlays
from .sealed_file import SealedFile
from .weight_patches import Patch, SortedPatches, sort_patches

Patches = Mapping[str, Sequence[Patch]]
"""Changes as ComfyUI keeps them, by the name of the weight in the MODEL or CLIP."""


@dataclass(frozen=True, kw_only=True)
class WeightChanges:
    """The changes, as requests name them.

    Attributes:
        adapters: LoRAs.
        overlay: weights with any other changes.
        files: what the ranks read. The paths are good as long as these live, and may name other files later.
    """

    adapters: tuple[Adapter, ...] = ()
    overlay: Overlay | None = None
    files: tuple[SealedFile, ...] = ()


class Changeable(Protocol):
    """What stands for a module of ComfyUI and sends requests about it.

    Attributes:
        handle: the model.
        weights: names and shapes of the module's weights.
        changes: what the next requests say about changes.
        weight_prefix: the beginning of the weights' names in the MODEL or CLIP.
        components: diffusers' names of the components that have these weights.
    """

    handle: Handle
    weights: MetaWeights
    changes: WeightChanges
    weight_prefix: str

    @property
    def components(self) -> tuple[str, ...]:
        """See above."""


def check_fit(target: Changeable, patches: Patches) -> None:
    """Refuse changes that do not fit their weights.

    Raises:
        InvalidRequest: the message names the weight.
    """
    _sort(target, patches)


def changes_of(target: Changeable, patches: Patches) -> WeightChanges:
    """Return changes in the form in which requests name them, with files for the ranks.

    Raises:
        InvalidRequest: see ``overlay_for``.
    """
    if not patches:
        return WeightChanges()
    found, shapes = _sort(target, patches), _shapes(target.weights)
    adapters = lora_files.adapters_for(found.low_rank, shapes)
    overlay = overlays.overlay_for(target.handle, target.components, found.merged, shapes)
    return WeightChanges(
        adapters=tuple(adapter for adapter, _ in adapters),
        overlay=overlay[0] if overlay else None,
        files=tuple(file for _, file in [*adapters, *([overlay] if overlay else [])]),
    )


def _sort(target: Changeable, patches: Patches) -> SortedPatches:
    start = target.weight_prefix
    own = {name.removeprefix(start): changes for name, changes in patches.items() if name.startswith(start)}
    return sort_patches(own, _shapes(target.weights), target.weights.linear)


def _shapes(weights: MetaWeights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
