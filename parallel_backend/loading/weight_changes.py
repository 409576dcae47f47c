"""What requests change in the weights of one loaded transformer, and how that is undone."""

from collections.abc import Sequence

from torch import nn

from ..interfaces.tensor_cuts import Slices
from ..protocol.messages import Adapter, Overlay
from . import partial
from .low_rank_hooks import LowRankHooks
from .overlay import decompressed, overlaid
from .weight_source import WeightSource


class WeightChanges:
    """The LoRAs and the overlay that are in force in one loaded transformer.

    Args:
        module: this rank's part, with its weights.
        component: diffusers' name of the component.
        class_name: diffusers' class.
        source: the weights of the files.
        slices: the slices of parameters that were cut.
        overlay: the one that the part was loaded with.
    """

    def __init__(
        self,
        module: nn.Module,
        component: str,
        class_name: str,
        source: WeightSource,
        slices: Slices,
        overlay: Overlay | None,
    ) -> None:
        self._low_rank = LowRankHooks(module, class_name, slices)
        self._module, self._component, self._source, self._slices = module, component, source, slices
        self._overlay = overlay
        self._current = overlaid(source, overlay, component)
        self._decompressed = decompressed(source, self._current)

    def fits(self, overlay: Overlay | None) -> bool:
        """Whether the loaded layers can hold the weights of an overlay."""
        if _id(overlay) == _id(self._overlay):
            return True
        changed = overlaid(self._source, overlay, self._component)
        return decompressed(self._source, changed) == self._decompressed

    def use(self, adapters: Sequence[Adapter], overlay: Overlay | None) -> None:
        """Apply exactly these LoRAs and this overlay from now on.

        An overlay costs reading the weights that it or the one before changes, and nothing if it stays the same.
        """
        if _id(overlay) != _id(self._overlay):
            before, self._current = self._current, overlaid(self._source, overlay, self._component)
            self._overlay = overlay
            changed = before.overlaid | self._current.overlaid
            partial.read_parameters(self._module, self._current, self._slices, only=changed)
        self._low_rank.use(adapters)


def _id(overlay: Overlay | None) -> str | None:
    return None if overlay is None else overlay.id
