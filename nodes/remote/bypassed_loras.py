"""The LoRAs of LoraLoaderBypass, which ComfyUI adds to the outputs of layers, as changes of weights.

``W x + s * up(down(x))`` is what the ranks compute for a plain LoRA in any case. LoHa and LoKr are linear, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from inspect import getclosurevars, isfunction
from typing import Any

import comfy.weight_adapter

from ...parallel_backend.errors import InvalidRequest
from ..bridges.refusals import layers_unavailable
from .weight_patches import Patch

_DORA_AT = {
    comfy.weight_adapter.LoRAAdapter: 4,
    comfy.weight_adapter.LoHaAdapter: 7,
    comfy.weight_adapter.LoKrAdapter: 8,
}
"""ComfyUI's kinds of adapters that are added to a layer's output, and the place of DoRA's scale in their weights."""

Injections = Mapping[str, Sequence[Any]]


def bypass_patches(injections: Injections) -> dict[str, list[Patch]]:
    """Return the changes that stand for the injections of LoraLoaderBypass, by the weights' names."""
    patches: dict[str, list[Patch]] = {}
    for manager in (_manager(each) for group in injections.values() for each in group):
        for layer, (adapter, strength) in manager.adapters.items():
            patches.setdefault(f"{layer}.weight", []).append((strength, adapter, 1.0, None, None))
    return patches


def check_injections(key: str, injections: Iterable[Any]) -> None:
    """Refuse injections that LoraLoaderBypass did not make, and adapters that differ from changes of weights.

    Raises:
        InvalidRequest: the message names the injection or the layer.
    """
    for injection in injections:
        manager = _manager(injection)
        if manager is None:
            raise layers_unavailable(f"a node changes the layers while they run (injection {key})")
        for layer, (adapter, _) in manager.adapters.items():
            _check_adapter(layer, adapter)


def _check_adapter(layer: str, adapter: Any) -> None:
    if type(adapter) not in _DORA_AT:
        kind = type(adapter).__name__
        raise InvalidRequest(f"the LoRA changes {layer} as {kind}, which works in LoraLoader only: use that node")
    if adapter.weights[_DORA_AT[type(adapter)]] is not None:
        raise InvalidRequest(f"the LoRA has a DoRA scale for {layer}, which LoraLoaderBypass ignores: use LoraLoader")


def _manager(injection: Any) -> Any:
    """Return ComfyUI's manager of an injection that LoraLoaderBypass makes, or None."""
    kind = getattr(comfy.weight_adapter, "BypassInjectionManager", ())  # not in every version of ComfyUI
    variables = getclosurevars(injection.inject).nonlocals if isfunction(injection.inject) else {}
    owner = variables.get("self")
    return owner if isinstance(owner, kind) else None
