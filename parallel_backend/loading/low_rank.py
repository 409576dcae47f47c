"""The factors of a LoRA (https://arxiv.org/abs/2106.09685) that belong to this rank's part of a transformer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

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
