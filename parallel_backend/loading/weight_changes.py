"""What requests change in the weights of one loaded transformer, and how that is undone."""

from collections.abc import Sequence

from torch import nn

from ..interfaces.tensor_cuts import Slices
from ..protocol.model_spec import Adapter, Overlay
from . import partial
from .low_rank_hooks import LowRankHooks
from .overlay import overlaid, replace_compressed
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
    """

    def __init__(
        self, module: nn.Module, component: str, class_name: str, source: WeightSource, slices: Slices
    ) -> None:
        self._low_rank = LowRankHooks(module, class_name, slices)
        self._module, self._component, self._source, self._slices = module, component, source, slices
        self._overlay: Overlay | None = None
        self._overlaid: frozenset[str] = frozenset()

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
            partial.read_parameters(self._module, changed, self._slices, only=names)
        replace_compressed(self._module, changed)  # layers may read later, so the path has to be a good one
        self._overlay, self._overlaid = overlay, changed.overlaid

    @property
    def nbytes(self) -> int:
        """Bytes that the factors of LoRAs take."""
        return self._low_rank.nbytes

    def forget_idle(self) -> bool:
        """Free the factors of LoRAs that are not in use; return whether there were any."""
        return self._low_rank.forget_idle()
