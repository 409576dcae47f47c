"""Weights that a request uses instead of those in the model's files."""

from collections.abc import Callable, Container
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint import overlay_file
from ..protocol.model_spec import Overlay
from .compressed_linear import CompressedLinear
from .weight_source import PACKED, WeightSource


def overlaid(source: WeightSource, overlay: Overlay | None, component: str) -> WeightSource:
    """Return the source of a transformer's weights with the changed ones of an overlay."""
    if overlay is None:
        return source
    return source.with_overlay(overlay_file.read(Path(overlay.path), overlay.id, component))


def replace_compressed(module: nn.Module, changed: WeightSource, streamed: Container[str] = ()) -> None:
    """Let compressed layers compute with their changed weights, and the others with their own.

    A layer keeps its compressed weight meanwhile. Where the ranks share weights, or the block streams, each changed one
    is read each time it computes: all of them would take the memory that this saves.

    Args:
        streamed: names of the parameters that stream.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, CompressedLinear) and layer.packed is not None:  # None in blocks of other stages
            weight = f"{name}.weight"
            read = partial(_read, layer, changed, weight) if weight in changed.overlaid else None
            saves = isinstance(layer.packed, DTensor) or f"{name}.{PACKED}" in streamed
            layer.replacement = read if read is None or saves else _kept(read())


def _kept(weight: Tensor) -> Callable[[], Tensor]:
    return lambda: weight


def _read(layer: CompressedLinear, source: WeightSource, name: str) -> Tensor:
    dim, parts = layer.weight_cut or (0, None)
    shape = list(source.shape(name))
    if parts is not None:
        shape[dim] = sum(part.stop - part.start for part in parts)
    weight = torch.empty(shape, dtype=layer.dtype, device=layer.packed.device)
    if weight.numel():
        source.read(name, dim, parts, None, into=weight)
    return weight
