"""What a node finds where it looks for a layer of a model whose layers run in the ranks.

Names, classes and shapes of weights can be read, so a node can learn which layers there are. Anything else is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from torch import Tensor, nn

from ..bridges.refusals import TRANSFORMER, layers_unavailable

_COMPILED = ("training", "_is_torch_compile")
"""What ``torch.compile`` sets on a layer. A MODEL with compiled layers is refused when it is sampled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """The layers of a model.

    Attributes:
        weights: all weights by name, on the meta device.
        classes: the class of each of ComfyUI's layers by name. Layers without a class in ComfyUI are left out.
    """

    weights: Mapping[str, Tensor]
    classes: Mapping[str, type[nn.Module]] = field(default_factory=dict)

    def at(self, name: str) -> "LayerPath | Tensor | None":
        """Return the weight or the layer of this name, or None if there is neither."""
        if name in self.weights:
            return self.weights[name]
        return LayerPath(self, name) if name in self.lengths or name in self.classes else None

    @cached_property
    def lengths(self) -> Mapping[str, int]:
        """For each layer that has any inside, how many of them are numbered."""
        lengths: dict[str, int] = {}
        for name in (*self.weights, *self.classes):
            inside = name
            while inside:
                inside, _, last = inside.rpartition(".")
                lengths[inside] = max(lengths.get(inside, 0), int(last) + 1 if last.isdigit() else 0)
        return lengths


class LayerPath:
    """A layer, or a list or a group of layers. Two of the same layer are equal, as they are one object in ComfyUI.

    Args:
        layers: all layers of the model.
        name: the layer's name.
    """

    _layers: Layers
    _name: str
    training = False

    def __init__(self, layers: Layers, name: str) -> None:
        vars(self).update(_layers=layers, _name=name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """ComfyUI's class of the layer, which ``isinstance`` finds."""
        return self._layers.classes.get(self._name, LayerPath)

    def __getattr__(self, name: str) -> Any:
        if name in LayerPath.__annotations__ or name.startswith("__"):
            raise AttributeError(name)
        found = self._layers.at(f"{self._name}.{name}")
        if found is None:
            raise layers_unavailable(f"a node uses {TRANSFORMER}.{self._name}.{name}")
        return found

    def __getitem__(self, index: Any) -> Any:
        chosen = range(len(self))[index]
        return self._numbered(chosen) if isinstance(chosen, int) else [self._numbered(i) for i in chosen]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __len__(self) -> int:
        if not (length := self._layers.lengths.get(self._name, 0)):
            raise TypeError(f"the layer {TRANSFORMER}.{self._name} is no list of layers")
        return length

    def _numbered(self, index: int) -> Any:
        found = self._layers.at(f"{self._name}.{index}")
        if found is None:
            raise IndexError(f"{self._name} has no layer {index}")
        return found

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if type(other) is not LayerPath:
            return NotImplemented
        return (self._layers, self._name) == (other._layers, other._name)

    def __hash__(self) -> int:
        return hash((self._layers, self._name))

    def __deepcopy__(self, memo: Any) -> "LayerPath":
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _COMPILED:
            return
        raise layers_unavailable(f"a node sets {TRANSFORMER}.{self._name}.{name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise layers_unavailable(f"a node deletes {TRANSFORMER}.{self._name}.{name}")

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to compute.

        Raises:
            InvalidRequest: always.
        """
        raise layers_unavailable(f"a node calls the layer {TRANSFORMER}.{self._name}")

    __call__ = forward
