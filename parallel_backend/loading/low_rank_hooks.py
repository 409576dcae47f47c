"""Adds LoRAs to the outputs of linear layers: ``W x + strength * scale * up (down x)``. The weights stay as they are.

So a changed strength costs nothing, and neither does a LoRA that is removed: its hooks go.
"""

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..interfaces.tensor_cuts import Slices
from ..protocol.model_spec import Adapter
from .low_rank import Factors, LowRank, read_factors

_KEPT_BYTES = 1 << 30
"""Factors of LoRAs that are not in use are kept up to this size."""

Term = tuple[LowRank, float]
"""Factors, and the strength."""


class LowRankHooks:
    """The LoRAs of one loaded transformer: those in use, and factors of others that may be used again.

    Args:
        module: this rank's part of the transformer, with its weights.
    """

    def __init__(self, module: nn.Module, class_name: str, slices: Slices) -> None:
        self._module, self._class_name, self._slices = module, class_name, slices
        self._factors: dict[str, Factors] = {}
        self._active: tuple[tuple[str, float], ...] = ()
        self._handles: list[RemovableHandle] = []

    def use(self, adapters: Sequence[Adapter]) -> None:
        """Apply exactly these LoRAs from now on. Reads the factors of those that are new."""
        wanted = tuple((each.id, each.strength) for each in adapters)
        if wanted == self._active:
            return
        self._remove()
        for each in adapters:
            known = self._factors.pop(each.id) if each.id in self._factors else self._read(each)
            self._factors[each.id] = known  # the ones that are used last come last
        self._add(wanted)
        self._active = wanted
        self._forget_oldest()

    @property
    def nbytes(self) -> int:
        """Bytes that the factors take."""
        return sum(_nbytes(factors) for factors in self._factors.values())

    def forget_idle(self) -> bool:
        """Free the factors of LoRAs that are not in use; return whether there were any."""
        idle = self._idle()
        for each in idle:
            del self._factors[each]
        return bool(idle)

    def _idle(self) -> list[str]:
        """Return the LoRAs that are not in use, those first that were used first."""
        in_use = {adapter_id for adapter_id, _ in self._active}
        return [adapter_id for adapter_id in self._factors if adapter_id not in in_use]

    def _read(self, adapter: Adapter) -> Factors:
        return read_factors(adapter, self._module, self._class_name, self._slices)

    def _add(self, wanted: Sequence[tuple[str, float]]) -> None:
        terms: dict[str, list[Term]] = {}
        for adapter_id, strength in wanted:
            for name, changes in self._factors[adapter_id].items():
                terms.setdefault(name, []).extend((change, strength) for change in changes)
        modules: Mapping[str, nn.Module] = dict(self._module.named_modules())
        # Tensor parallelism has hooks that sum the ranks' partial outputs. What is added here is partial, too.
        self._handles = [modules[name].register_forward_hook(_Hook(each), prepend=True) for name, each in terms.items()]

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._active = [], ()

    def _forget_oldest(self) -> None:
        idle = self._idle()
        size = sum(_nbytes(self._factors[each]) for each in idle)
        for each in idle:
            if size <= _KEPT_BYTES:
                return
            size -= _nbytes(self._factors.pop(each))


class _Hook:
    def __init__(self, terms: Sequence[Term]) -> None:
        self._terms = terms

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        flat = out.view(-1, out.shape[-1])
        for factors, strength in self._terms:
            hidden = F.linear(inputs[0], factors.down)
            flat.addmm_(hidden.view(-1, hidden.shape[-1]), factors.up.t(), alpha=strength * factors.scale)
        return out


def _nbytes(factors: Factors) -> int:
    return sum(change.nbytes for changes in factors.values() for change in changes)
