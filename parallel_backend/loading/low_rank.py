"""LoRAs (https://arxiv.org/abs/2106.09685), added to linear layers: ``W x + strength * scale * up (down x)``.

The weights stay as they are, so a changed strength costs nothing, and neither does a LoRA that is removed: its hooks
go. Each rank reads the factors that belong to its part of the transformer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..checkpoint import adapter_file
from ..checkpoint.adapter_file import AdapterLayer
from ..interfaces.tensor_cuts import Slices
from ..progress import PROGRESS
from ..protocol.model_spec import Adapter
from .compressed_linear import CompressedLinear
from .row_map import Rows
from .weight_source import comfyui_rows


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """What one LoRA adds to a linear layer: ``scale * up @ down``.

    Attributes:
        up: ``[out, rank]``.
        down: ``[rank, in]``.
        scale: the factor, without the strength.
    """

    up: Tensor
    down: Tensor
    scale: float

    @property
    def nbytes(self) -> int:
        """Bytes that the factors take."""
        return self.up.nbytes + self.down.nbytes


Factors = Mapping[str, tuple[LowRank, ...]]
"""By the name of the linear layer in the transformer."""

_KEPT_BYTES = 1 << 30
"""Factors of LoRAs that are not in use are kept up to this size."""

Term = tuple[LowRank, float]
"""Factors, and the strength."""


class LowRankHooks:
    """The LoRAs in use in one loaded transformer, and factors of others that may be used again.

    Args:
        module: this rank's part of the transformer, with its weights.
    """

    def __init__(self, module: nn.Module, class_name: str, slices: Slices) -> None:
        self._module, self._class_name, self._slices = module, class_name, slices
        self._factors: dict[str, Factors] = {}
        self._active: tuple[tuple[str, float], ...] = ()
        self._compiled = False
        self._handles: list[RemovableHandle] = []

    def use(self, adapters: Sequence[Adapter], *, compiled: bool = False) -> None:
        """Apply exactly these LoRAs from now on. Reads the factors of new ones.

        Args:
            compiled: whether the layers are in compiled code.
        """
        wanted = tuple((each.id, each.strength) for each in adapters)
        if wanted == self._active and compiled == self._compiled:
            return
        self._remove()
        for each in adapters:
            known = self._factors.pop(each.id, None)
            if known is None:
                known = read_factors(each, self._module, self._class_name, self._slices)
            self._factors[each.id] = known  # in the order of their last use
        self._add(wanted, compiled)
        self._active, self._compiled = wanted, compiled
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
        """Return the LoRAs that are not in use, in the order of their last use."""
        in_use = {adapter_id for adapter_id, _ in self._active}
        return [adapter_id for adapter_id in self._factors if adapter_id not in in_use]

    def _add(self, wanted: Sequence[tuple[str, float]], compiled: bool) -> None:
        terms: dict[str, list[Term]] = {}
        for adapter_id, strength in wanted:
            for name, changes in self._factors[adapter_id].items():
                terms.setdefault(name, []).extend((change, strength) for change in changes)
        modules: Mapping[str, nn.Module] = dict(self._module.named_modules())
        # Tensor parallelism has hooks that sum the ranks' partial outputs. What is added here is partial, too.
        strengths = iter(_strengths([each for several in terms.values() for each in several]) if compiled else ())
        self._handles = [
            modules[name].register_forward_hook(_Hook(each, [*islice(strengths, len(each))]), prepend=True)
            for name, each in terms.items()
        ]

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
    """Adds factors to a layer's output.

    Args:
        strengths: strength times scale of each of the terms, for compiled code. It would be made for a number, and
            takes a tensor as it comes.
    """

    def __init__(self, terms: Sequence[Term], strengths: Sequence[Tensor]) -> None:
        self._terms, self._strengths = terms, strengths

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            for (factors, _), strength in zip(self._terms, self._strengths, strict=True):
                out = out + F.linear(F.linear(inputs[0], factors.down) * strength, factors.up)
            return out
        flat = out.view(-1, out.shape[-1])
        for factors, number in self._terms:
            hidden = F.linear(inputs[0], factors.down)
            flat.addmm_(hidden.view(-1, hidden.shape[-1]), factors.up.t(), alpha=number * factors.scale)
        return out


def _strengths(terms: Sequence[Term]) -> Sequence[Tensor]:
    """Return strength times scale of each term on its device. The host does not wait for the copy."""
    if not terms:
        return ()
    device = terms[0][0].down.device
    values = torch.empty(len(terms), pin_memory=device.type == "cuda")
    values.copy_(torch.tensor([strength * factors.scale for factors, strength in terms]))
    return values.to(device, non_blocking=True).unbind()


def _nbytes(factors: Factors) -> int:
    return sum(change.nbytes for changes in factors.values() for change in changes)


def read_factors(adapter: Adapter, module: nn.Module, class_name: str, slices: Slices) -> Factors:
    """Read what a LoRA adds to the linear layers of this rank's part of a transformer.

    Args:
        module: the part, with its weights. The factors go to its device, each in the dtype of its layer.
    """
    file = Path(adapter.path)
    header = adapter_file.read(file, adapter.id)
    rows = comfyui_rows(header.shapes, class_name)
    numbers: dict[str, list[int]] = {}
    for number, layer in enumerate(header.layers):
        numbers.setdefault(layer.weight, []).append(number)
    linears = dict(_linears(module))
    others = {name for name, _ in module.named_parameters()} - {f"{name}.weight" for name in linears}
    misplaced = [name for name in others if name in rows and rows[name].source in numbers]
    assert not misplaced, f"only linear layers take factors: {misplaced}"
    factors: dict[str, tuple[LowRank, ...]] = {}
    with safe_open(str(file), framework="pt", device="cpu") as stored:
        for name, linear in linears.items():
            weight = f"{name}.weight"
            cut = linear.weight_cut if isinstance(linear, CompressedLinear) else slices.get(weight)
            changes = [
                _cut(stored, number, header.layers[number], rows[weight], cut)
                for number in numbers.get(rows[weight].source, ())
            ]
            present = [change for change in changes if change is not None]
            if present:
                factors[name] = tuple(_moved(change, linear) for change in present)
    return factors


def _linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers whose weights the part has, by name."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear) and next(each.parameters(), None) is not None:
            yield name, each


def _cut(
    stored: object, number: int, layer: AdapterLayer, wanted: Rows, cut: tuple[int, tuple[slice, ...]] | None
) -> LowRank | None:
    """Return the rows of ``up`` and the columns of ``down`` that a rank's part of a weight has; None for none."""
    dim, parts = cut or (0, None)
    if parts is not None and dim == 0:
        wanted, parts = wanted.take(parts), None
    PROGRESS.tick()
    up: Tensor = stored.get_tensor(f"{number}.up")  # type: ignore[attr-defined]
    picked = up.new_zeros(wanted.count, up.shape[1])
    changed, position = False, 0
    for span in wanted.spans:
        first, last = max(span.start, layer.start), min(span.stop, layer.start + len(up))
        if first < last:
            at = position + first - span.start
            picked[at : at + last - first] = up[first - layer.start : last - layer.start]
            changed = True
        position += span.stop - span.start
    if not changed:
        return None
    down: Tensor = stored.get_tensor(f"{number}.down")  # type: ignore[attr-defined]
    down = down if parts is None else torch.cat([down[:, part] for part in parts], dim=1)
    return LowRank(up=picked, down=down, scale=layer.scale)


def _moved(change: LowRank, linear: nn.Linear) -> LowRank:
    if isinstance(linear, CompressedLinear):
        dtype, device = linear.dtype, linear.packed.device
    else:
        dtype, device = linear.weight.dtype, linear.weight.device
    up, down = (factor.to(device, dtype).contiguous() for factor in (change.up, change.down))
    return LowRank(up=up, down=down, scale=change.scale)
