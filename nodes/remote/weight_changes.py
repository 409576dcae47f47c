"""What is changed in the weights of a parallel MODEL during a call of its transformer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...parallel_backend.protocol.messages import Adapter, Overlay
from ..backend.connection import Handle
from ..bridges.bridge import MetaWeights
from . import lora_files, overlays
from .weight_patches import Patch, SortedPatches, sort_patches

PREFIX = "diffusion_model."
"""The beginning of the transformer's names in a MODEL."""

Patches = Mapping[str, Sequence[Patch]]
"""Changes as ComfyUI keeps them, by the name of the weight in the MODEL."""


@dataclass(frozen=True, kw_only=True)
class WeightChanges:
    """The changes, as requests name them.

    Attributes:
        adapters: LoRAs.
        overlay: weights with any other changes.
    """

    adapters: tuple[Adapter, ...] = ()
    overlay: Overlay | None = None


def check_patches(weights: MetaWeights, patches: Patches) -> None:
    """Refuse changes that do not fit their weights.

    Raises:
        InvalidRequest: the message names the weight.
    """
    _sort(weights, patches)


def changes_of(handle: Handle, weights: MetaWeights, patches: Patches) -> WeightChanges:
    """Return changes in the form in which requests name them, with files for the ranks.

    Raises:
        InvalidRequest: see ``overlay_for``.
    """
    found, shapes = _sort(weights, patches), _shapes(weights)
    return WeightChanges(
        adapters=lora_files.adapters_for(found.low_rank, shapes),
        overlay=overlays.overlay_for(handle, found.merged, shapes, PREFIX),
    )


def _sort(weights: MetaWeights, patches: Patches) -> SortedPatches:
    own = {name.removeprefix(PREFIX): changes for name, changes in patches.items() if name.startswith(PREFIX)}
    return sort_patches(own, _shapes(weights), weights.linear)


def _shapes(weights: MetaWeights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
