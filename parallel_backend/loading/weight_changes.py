"""What requests change in the weights of one loaded transformer, and how that is undone."""

from collections.abc import Callable, Container, Sequence
from functools import partial as bound
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint import overlay_file
from ..interfaces.tensor_cuts import Slices
from ..protocol.model_spec import Adapter, Overlay
from . import partial
from .compressed_linear import CompressedLinear
from .cpu_store import contents_of
from .held_weights import HeldWeights
from .low_rank import LowRankHooks
from .streamed_blocks import StreamedBlocks
from .weight_source import PACKED, WeightSource

_UNKNOWN = Overlay(path="", id="")
"""Stands for an overlay that was read in part."""


class WeightChanges:
    """The LoRAs and the overlay that are in force in one loaded transformer.

    Args:
        module: this rank's part, with its weights.
        source: the weights of the files.
        blocks: the blocks that stream; None if all stay.
    """

    def __init__(
        self,
        module: nn.Module,
        component: str,
        class_name: str,
        source: WeightSource,
        slices: Slices,
        blocks: StreamedBlocks | None = None,
    ) -> None:
        self._low_rank = LowRankHooks(module, class_name, slices)
        self._module, self._component, self._source, self._slices = module, component, source, slices
        self._blocks = blocks
        self._changed = source
        self._overlay: Overlay | None = None
        self._overlaid: frozenset[str] = frozenset()
        self._streamed = contents_of(""), frozenset[str]()  # contents of the blocks' memory, and what they change

    def use(self, adapters: Sequence[Adapter], overlay: Overlay | None, *, compiled: bool = False) -> None:
        """Apply exactly these LoRAs and this overlay from now on.

        An overlay costs reading the weights that it or the one before changes, and nothing if it stays the same.

        Args:
            compiled: whether the layers are in compiled code.
        """
        if overlay != self._overlay:
            self._change_to(overlay)
        if self._blocks:
            self._blocks.change(overlay.id if overlay else "", self._read_streamed)
            self._streamed = self._blocks.contents, self._changed.overlaid
        self._low_rank.use(adapters, compiled=compiled)

    def _change_to(self, overlay: Overlay | None) -> None:
        before, self._overlay = self._overlay, _UNKNOWN  # if reading fails, the next request reads again
        self._changed = changed = _overlaid(self._source, overlay, self._component)
        homes = self._blocks.homes if self._blocks else {}
        if before is None or overlay is None or overlay.id != before.id:
            names = self._overlaid | changed.overlaid
            self._overlaid = names
            partial.read_parameters(self._module, changed, self._slices, only=names - homes.keys())
        _replace_compressed(self._module, changed, homes)  # layers may read later, so the path has to be a good one
        self._overlay, self._overlaid = overlay, changed.overlaid

    def _read_streamed(self, before: bytes) -> None:
        """Read what differs from the contents before, which another rank may have written."""
        assert self._blocks is not None
        homes, (contents, overlaid_before) = self._blocks.homes, self._streamed
        names = homes.keys() if before != contents else homes.keys() & (overlaid_before | self._changed.overlaid)
        partial.read_parameters(self._module, self._changed, self._slices, only=names, homes=homes)

    def held(self, more: HeldWeights | None) -> HeldWeights:
        """Return what is held of the files' weights.

        Args:
            more: what is held beyond the transformer; None if nothing is.
        """
        own = HeldWeights.of(self._module, self._slices)
        return (own if more is None else own.joined(more)).without(self._overlaid)

    @property
    def nbytes(self) -> int:
        """Bytes that the factors of LoRAs take."""
        return self._low_rank.nbytes

    def forget_idle(self) -> bool:
        """Free the factors of LoRAs that are not in use; return whether there were any."""
        return self._low_rank.forget_idle()


def _overlaid(source: WeightSource, overlay: Overlay | None, component: str) -> WeightSource:
    """Return the source of a transformer's weights with the changed ones of an overlay."""
    if overlay is None:
        return source
    return source.with_overlay(overlay_file.read(Path(overlay.path), overlay.id, component))


def _replace_compressed(module: nn.Module, changed: WeightSource, streamed: Container[str]) -> None:
    """Let compressed layers compute with their changed weights, and the others with their own.

    A layer keeps its compressed weight meanwhile. Where the ranks share weights, or the block streams, each changed one
    is read each time it computes: all of them would take the memory that this saves.

    Args:
        streamed: names of the parameters that stream.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, CompressedLinear) and layer.packed is not None:  # None in blocks of other stages
            weight = f"{name}.weight"
            read = bound(_read, layer, changed, weight) if weight in changed.overlaid else None
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
