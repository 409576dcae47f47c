"""What is changed in the weights of a parallel MODEL or CLIP while the ranks compute with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.model_spec import Adapter, Overlay
from ..backend.connection import Handle
from ..bridges.announcements import announce_misfits
from ..bridges.bridge import MetaWeights
from ..bridges.given_numbers import as_float
from . import lora_files, overlays
from .sealed_file import SealedFile
from .weight_fit import misfit
from .weight_patches import Patch, sort_patches

K = TypeVar("K")

Patches = Mapping[str, Sequence[Patch]]
"""Changes as ComfyUI keeps them, by the name of the weight in the MODEL or CLIP."""


@dataclass(frozen=True, kw_only=True)
class WeightChanges:
    """The changes, as requests name them.

    Attributes:
        adapters: LoRAs.
        overlay: weights with any other changes.
        files: what the ranks read. The paths are good as long as these live, and may name other files later.
        here: changes of weights of layers that run in this process, by their names.
    """

    adapters: tuple[Adapter, ...] = ()
    overlay: Overlay | None = None
    files: tuple[SealedFile, ...] = ()
    here: Mapping[str, Sequence[Patch]] = field(default_factory=dict, compare=False)


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
    changes: WeightChanges
    weight_prefix: str

    @property
    def weights(self) -> MetaWeights:
        """See above."""

    @property
    def components(self) -> tuple[str, ...]:
        """See above."""


def plain_strengths(strength: Any, weight_strength: Any, lora: str) -> tuple[float, float]:
    """Return the strengths of what a node adds to weights, and of the weights themselves, as floats.

    Raises:
        InvalidRequest: one is not a number. The message names the LoRA.
    """
    return as_float(strength, f"the strength of {lora}"), as_float(weight_strength, f"the weights' factor with {lora}")


def fit_added(
    target: Changeable, patches: Mapping[Any, Any], strength: float, weight_strength: float, lora: str
) -> dict[Any, Any]:
    """Return the changes that fit their weights, of all that a node adds. Log the others, as ComfyUI does.

    Raises:
        InvalidRequest: none fits, or one is broken. The message names the LoRA, the model and the first weight.
    """
    parts = {key: (key, None, None) if isinstance(key, str) else (*key, None)[:3] for key in patches}
    changes = {key: (name, (strength, patches[key], weight_strength, *of)) for key, (name, *of) in parts.items()}
    misfits = _misfits(_full_shapes(target), target.handle.checkpoint.name, changes, lora)
    return {key: value for key, value in patches.items() if key not in misfits}


def fit_injected(target: Changeable, patches: Patches, lora: str) -> None:
    """Refuse changes by LoraLoaderBypass that do not all fit: ComfyUI would fail while it samples.

    Raises:
        InvalidRequest: see above.
    """
    fitting = fit_all(_full_shapes(target), target.handle.checkpoint.name, patches, lora)
    if sum(map(len, fitting.values())) < sum(map(len, patches.values())):
        raise InvalidRequest(f"{lora} does not fit all layers, which LoraLoaderBypass needs: use LoraLoader")


def fit_all(shapes: Mapping[str, Sequence[int]], model: str, patches: Patches, lora: str) -> dict[str, list[Patch]]:
    """Return the changes that fit their weights. See ``fit_added``.

    Args:
        shapes: shape of each weight, by the name that it has in ``patches``.
    """
    changes = {(name, i): (name, each) for name, found in patches.items() for i, each in enumerate(found)}
    misfits = _misfits(shapes, model, changes, lora)
    kept: dict[str, list[Patch]] = {}
    for key, (name, change) in changes.items():
        if key not in misfits:
            kept.setdefault(name, []).append(change)
    return kept


def _misfits(
    shapes: Mapping[str, Sequence[int]], model: str, changes: Mapping[K, tuple[str, Any]], lora: str
) -> set[K]:
    """Return the keys of the changes that do not fit their weights."""
    reasons: dict[K, str] = {}
    known = 0
    try:
        for key, (name, change) in changes.items():
            if name in shapes:
                known += 1
                if reason := misfit(name, shapes[name], change):
                    reasons[key] = reason
    except InvalidRequest as error:
        raise InvalidRequest(f"{lora}: {error}") from error
    if reasons and len(reasons) == known:
        first = next(iter(reasons.values()))
        raise InvalidRequest(f"{lora} fits no weight of {model}: {first}: it is for another model")
    announce_misfits(lora, {changes[key][0]: reason for key, reason in reasons.items()})
    return set(reasons)


def changes_of(target: Changeable, patches: Patches) -> WeightChanges:
    """Return changes in the form in which requests name them, with files for the ranks.

    Raises:
        InvalidRequest: see ``overlay_for``.
    """
    if not patches:
        return WeightChanges()
    own, shapes = _own(target, patches), _shapes(target.weights)
    here = {name: changes for name, changes in own.items() if name in target.weights.here}
    on_ranks = {name: changes for name, changes in own.items() if name not in here}
    found = sort_patches(on_ranks, shapes, target.weights.linear)
    adapters = lora_files.adapters_for(found.low_rank, shapes)
    overlay = overlays.overlay_for(target.handle, target.components, found.merged, shapes)
    return WeightChanges(
        adapters=tuple(adapter for adapter, _ in adapters),
        overlay=overlay[0] if overlay else None,
        files=tuple(file for _, file in [*adapters, *([overlay] if overlay else [])]),
        here=here,
    )


def _own(target: Changeable, patches: Patches) -> dict[str, list[Patch]]:
    """Return the changes of a model's own weights, by the model's names."""
    start = target.weight_prefix
    return {
        name.removeprefix(start): [_plain(change) for change in changes]
        for name, changes in patches.items()
        if name.startswith(start)
    }


def _plain(change: Patch) -> Patch:
    """Return a change with plain numbers: keyframes of hooks and links of nodes may make tensors of its strengths."""
    strength, value, weight_strength, *of = change
    strength, weight_strength = plain_strengths(strength, weight_strength, "a LoRA")
    return (strength, value, weight_strength, *of)


def _full_shapes(target: Changeable) -> dict[str, tuple[int, ...]]:
    return {target.weight_prefix + name: shape for name, shape in _shapes(target.weights).items()}


def _shapes(weights: MetaWeights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
