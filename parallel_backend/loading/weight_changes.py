"""What requests change in the weights of one loaded transformer, and how that is undone."""

from collections.abc import Sequence

from torch import nn

from ..interfaces.tensor_cuts import Slices
from ..protocol.model_spec import Adapter, Overlay
from . import partial
from .host_store import contents_of
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
        source: the weights of the files.
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
        self._changed = source
        self._overlay: Overlay | None = None
        self._overlaid: frozenset[str] = frozenset()
        self._streamed = contents_of(""), frozenset[str]()  # contents of the blocks' memory, and what they change

    def use(self, adapters: Sequence[Adapter], overlay: Overlay | None) -> None:
        """Apply exactly these LoRAs and this overlay from now on.

        An overlay costs reading the weights that it or the one before changes, and nothing if it stays the same.
        """
        if overlay != self._overlay:
            self._change_to(overlay)
        if self._blocks:
            self._blocks.change(overlay.id if overlay else "", self._read_streamed)
            self._streamed = self._blocks.contents, self._changed.overlaid
        self._low_rank.use(adapters)

    def _change_to(self, overlay: Overlay | None) -> None:
        before, self._overlay = self._overlay, _UNKNOWN  # if reading fails, the next request reads again
        self._changed = changed = overlaid(self._source, overlay, self._component)
        homes = self._blocks.homes if self._blocks else {}
        if before is None or overlay is None or overlay.id != before.id:
            names = self._overlaid | changed.overlaid
            self._overlaid = names
            partial.read_parameters(self._module, changed, self._slices, only=names - homes.keys())
        replace_compressed(self._module, changed, homes)  # layers may read later, so the path has to be a good one
        self._overlay, self._overlaid = overlay, changed.overlaid

    def _read_streamed(self, before: bytes) -> None:
        """Read what differs from the contents before, which another rank may have written."""
        assert self._blocks is not None
        homes, (contents, overlaid_before) = self._blocks.homes, self._streamed
        names = homes.keys() if before != contents else homes.keys() & (overlaid_before | self._changed.overlaid)
        partial.read_parameters(self._module, self._changed, self._slices, only=names, homes=homes)

    @property
    def nbytes(self) -> int:
        """Bytes that the factors of LoRAs take."""
        return self._low_rank.nbytes

    def forget_idle(self) -> bool:
        """Free the factors of LoRAs that are not in use; return whether there were any."""
        return self._low_rank.forget_idle()
