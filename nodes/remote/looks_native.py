"""What of a stand-in for ComfyUI's transformer makes other packs' nodes go on to what can be refused by name."""

from typing import Any

from ..backend.packs import calling_node
from ..bridges.refusals import layers_unavailable


class LooksNative:
    """Claims the class of ComfyUI's transformer as its own.

    A node that asks for the class would leave another one's model as it is, or refuse it in words of its own.

    Attributes:
        asked: the names that nodes of other packs asked for last and that ComfyUI's transformer has, by the nodes.
        set_by: the nodes of other packs that set an attribute, by its name.
    """

    @property
    def __class__(self) -> type[Any]:
        """That of ComfyUI's transformer. Setting it is refused, with an ``InvalidRequest``."""
        bridge = vars(self).get("bridge")
        return type(self) if bridge is None else bridge.native_class

    @__class__.setter
    def __class__(self, changed: type[Any]) -> None:
        raise layers_unavailable(f"a node makes {changed.__name__} of the model's layers")

    @property
    def asked(self) -> dict[str, str]:
        """See above."""
        asked: dict[str, str] = vars(self).setdefault("_asked", {})
        return asked

    @property
    def set_by(self) -> dict[str, str]:
        """See above."""
        set_by: dict[str, str] = vars(self).setdefault("_set_by", {})
        return set_by

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and note the node if another pack's does."""
        super().__setattr__(name, value)
        if name not in vars(self).get("_own", (name,)) and (node := calling_node()):
            self.set_by[name] = node

    def note_asked(self, name: str) -> None:
        """Note that a node of another pack asks for something, in vain: it may fail of that later."""
        layers = vars(self).get("_stand_ins")
        if layers is not None and hasattr(layers.module, name) and (node := calling_node()):
            self.asked[node] = name
