"""What a node finds where it looks for a layer of a model whose layers run in the ranks.

Names and shapes of weights can be read, so a node can learn which layers there are. Anything else is refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from ..bridges.refusals import TRANSFORMER, layers_unavailable


class LayerPath:
    """A layer, or a list or a group of layers.

    Args:
        weights: all weights of the model by name, on the meta device.
        name: the layer's name.
    """

    def __init__(self, weights: Mapping[str, Tensor], name: str) -> None:
        vars(self).update(_weights=weights, _name=name)

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("__") else layer_at(self._weights, f"{self._name}.{name}")
        if found is None:
            raise layers_unavailable(f"a node uses {TRANSFORMER}.{self._name}.{name}")
        return found

    def __getitem__(self, index: int) -> Any:
        found = layer_at(self._weights, f"{self._name}.{index + len(self) if index < 0 else index}")
        if found is None:
            raise IndexError(f"{self._name} has no layer {index}")
        return found

    def __len__(self) -> int:
        start = f"{self._name}."
        names = {name.removeprefix(start).partition(".")[0] for name in self._weights if name.startswith(start)}
        return sum(map(str.isdigit, names))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise layers_unavailable(f"a node sets {TRANSFORMER}.{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to compute.

        Raises:
            InvalidRequest: always.
        """
        raise layers_unavailable(f"a node calls the layer {TRANSFORMER}.{self._name}")


def layer_at(weights: Mapping[str, Tensor], name: str) -> LayerPath | Tensor | None:
    """Return the weight or the layer of this name, or None if there is neither."""
    if name in weights:
        return weights[name]
    return LayerPath(weights, name) if _has_layer(weights, name) else None


def _has_layer(weights: Iterable[str], name: str) -> bool:
    return any(weight.startswith(f"{name}.") for weight in weights)
