"""What requests change in the weights of one loaded transformer, and how that is undone."""

from collections.abc import Collection, Sequence

from torch import nn

from ..interfaces.tensor_cuts import Slices
from ..protocol.model_spec import Adapter, Overlay
from . import partial
from .low_rank_hooks import LowRankHooks
from .overlay import overlaid, replace_compressed
from .streamed_blocks import StreamedBlocks
from .weight_source import WeightSource

_UNKNOWN = Overlay(path="", id="")
"""Stands for an overlay that was read in part."""


class WeightChanges:
    """The LoRAs and the overlay that are in force in one loaded transformer.

    Args:
        module: this rank's part, with its weights.
        component: diffusers' name of the component.
        class_name: diffusers' class.
        source: the weights of the files.
        slices: the slices of parameters that were cut.
        blocks: those that stream; None if none does.
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
        self._overlay: Overlay | None = None
        self._overlaid: frozenset[str] = frozenset()
        if blocks and blocks.changed:  # by an overlay that another rank may use still
            self._overlay, self._overlaid = _UNKNOWN, frozenset(blocks.homes)

    def use(self, adapters: Sequence[Adapter], overlay: Overlay | None) -> None:
        """Apply exactly these LoRAs and this overlay from now on.

        An overlay costs reading the weights that it or the one before changes, and nothing if it stays the same.
        """
        if overlay != self._overlay:
            self._change_to(overlay)
        self._low_rank.use(adapters)

    def _change_to(self, overlay: Overlay | None) -> None:
        before, self._overlay = self._overlay, _UNKNOWN  # if reading fails, the next request reads again
        changed = overlaid(self._source, overlay, self._component)
        if before is None or overlay is None or overlay.id != before.id:
            names = self._overlaid | changed.overlaid
            self._overlaid = names
            self._read(changed, names)
        streamed = self._blocks.homes if self._blocks else ()
        replace_compressed(self._module, changed, streamed)  # layers may read later, so the path has to be a good one
        self._overlay, self._overlaid = overlay, changed.overlaid

    def _read(self, source: WeightSource, names: Collection[str]) -> None:
        """Read weights. Ranks that stream from the same memory all write the same values there."""
        homes = self._blocks.homes if self._blocks else {}
        if self._blocks and not homes.keys().isdisjoint(names):
            self._blocks.change()
        partial.read_parameters(self._module, source, self._slices, only=names, homes=homes)

    @property
    def nbytes(self) -> int:
        """Bytes that the factors of LoRAs take."""
        return self._low_rank.nbytes

    def forget_idle(self) -> bool:
        """Free the factors of LoRAs that are not in use; return whether there were any."""
        return self._low_rank.forget_idle()
