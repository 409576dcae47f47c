"""LoRAs and overlays on a diffusers transformer, as files for the ranks and as merged weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parallel_backend.checkpoint import adapter_file, overlay_file
from parallel_backend.checkpoint.adapter_file import AdapterLayer
from parallel_backend.protocol.model_spec import Adapter, Overlay


@dataclass(frozen=True)
class Change:
    """A LoRA's file, and what it adds to each weight at a strength of 1."""

    file: Adapter
    deltas: Mapping[str, Tensor]

    @classmethod
    def write(cls, folder: Path, model: nn.Module, *, seed: int, rank: int, strength: float) -> "Change":
        """Write a LoRA on every linear layer. Of its second layer, it changes the second half of the rows only."""
        random = torch.Generator().manual_seed(seed)
        layers: list[AdapterLayer] = []
        tensors: dict[str, Tensor] = {}
        deltas: dict[str, Tensor] = {}
        linears = [(name, each.weight) for name, each in model.named_modules() if isinstance(each, nn.Linear)]
        for number, (name, weight) in enumerate(linears):
            start = len(weight) // 2 if number == 1 else 0
            up = torch.randn(len(weight) - start, rank, generator=random) * 0.3
            down = torch.randn(rank, weight.shape[1], generator=random) * weight.shape[1] ** -0.5
            layers.append(AdapterLayer(weight=f"{name}.weight", start=start, scale=1.5))
            tensors |= {f"{number}.up": up, f"{number}.down": down}
            deltas[f"{name}.weight"] = torch.cat([torch.zeros(start, weight.shape[1]), 1.5 * up @ down])
        path = folder / f"lora-{seed}.safetensors"
        save_file(tensors, path, adapter_file.metadata(layers, _shapes(model), str(path)))
        return cls(Adapter(path=str(path), id=str(path), strength=strength), deltas)


def merged(weights: Mapping[str, Tensor], changes: Iterable[Change]) -> dict[str, Tensor]:
    """Return weights with LoRAs added."""
    result = dict(weights)
    for change in changes:
        result |= {name: result[name] + change.file.strength * delta for name, delta in change.deltas.items()}
    return result


def write_overlay(folder: Path, model: nn.Module, names: Sequence[str]) -> tuple[Overlay, dict[str, Tensor]]:
    """Write random weights that replace others, and return them."""
    random, path = torch.Generator().manual_seed(3), folder / "overlay.safetensors"
    weights = model.state_dict()
    replaced = {name: torch.randn(weights[name].shape, generator=random) * 0.05 for name in names}
    tensors = {f"transformer.{name}": each for name, each in replaced.items()}
    save_file(tensors, path, overlay_file.metadata(_shapes(model), str(path)))
    return Overlay(path=str(path), id=str(path)), replaced


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
