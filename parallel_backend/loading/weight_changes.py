"""What requests change in the weights of one loaded transformer, and how that is undone."""

from collections.abc import Sequence

from torch import nn

from ..interfaces.tensor_cuts import Slices
from ..protocol.messages import Adapter, Overlay
from . import partial
from .low_rank_hooks import LowRankHooks
from .overlay import overlaid, replace_compressed
from .weight_source import WeightSource


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
        self._overlay_id: str | None = None
        self._overlaid: frozenset[str] = frozenset()

    def use(self, adapters: Sequence[Adapter], overlay: Overlay | None) -> None:
        """Apply exactly these LoRAs and this overlay from now on.

        An overlay costs reading the weights that it or the one before changes, and nothing if it stays the same.
        """
        overlay_id = None if overlay is None else overlay.id
        if overlay_id != self._overlay_id:
            self._overlay_id = ""  # if reading fails, the next request reads again, whatever its overlay
            changed = overlaid(self._source, overlay, self._component)
            before, self._overlaid = self._overlaid, self._overlaid | changed.overlaid
            partial.read_parameters(self._module, changed, self._slices, only=(before | changed.overlaid))
            replace_compressed(self._module, changed)
            self._overlay_id, self._overlaid = overlay_id, changed.overlaid
        self._low_rank.use(adapters)

    def forget_idle(self) -> bool:
        """Free the factors of LoRAs that are not in use; return whether there were any."""
        return self._low_rank.forget_idle()
