"""Layers without weights that stand where a node looks for the transformer's, and the proof that it left them alone.

A node that walks through ``modules()`` and wraps the linear layers it finds would change nothing on the ranks.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from ..bridges.refusals import layers_unavailable

_IGNORED = frozenset({"training", "_parameters"})
_PLAIN = (bool, int, float, str, type(None))


class StandInWeight(nn.Parameter):
    """A weight on the meta device, whose shape can be read. What reads its values or changes it in place is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch. Its result is a ``StandInWeight``, too, for it may be a view of this one.

        Raises:
            InvalidRequest: the function changes a tensor, or needs its values.
        """
        name = func.__name__
        in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
        if in_place or name in _SETTING or func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise layers_unavailable(f"a node changes a weight in place ({name.strip('_')})")
        try:
            # Not ``nn.Parameter``'s, whose results are plain tensors.
            return super(nn.Parameter, cls).__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise layers_unavailable(f"a node reads the values of weights ({name.strip('_')})") from error


def stand_in_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a ``StandInWeight`` for each weight on the meta device."""
    return {name: StandInWeight(weight, requires_grad=False) for name, weight in weights.items()}


_HARMLESS = ("requires_grad_", "retain_grad_")
_SETTING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")


class StandInLayers:
    """The modules of ComfyUI's own transformer, on the meta device, that belong to no model.

    Args:
        module: ComfyUI's transformer on the meta device. Its weights become plain attributes, so that none of ComfyUI's
            functions that load or count weights finds them. Its layers refuse to compute.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()
        for layer_name, layer in module.named_modules():
            for held in (layer._parameters, layer._buffers):
                for name, weight in list(held.items()):
                    del held[name]
                    layer.__dict__[name] = weight if weight is None else StandInWeight(weight.data, requires_grad=False)
            if layer is not module:
                layer.forward = partial(_refuse, "calls", layer_name)
                layer.__dict__["load_state_dict"] = partial(_refuse, "loads weights into", layer_name)
        self._before: dict[str, dict[str, Any]] = {name: _state(layer) for name, layer in module.named_modules()}

    @property
    def classes(self) -> dict[str, type[nn.Module]]:
        """The class of each layer by name."""
        return {name: type(layer) for name, layer in self.module.named_modules()}

    @property
    def numbers(self) -> dict[str, Any]:
        """The transformer's attributes that are plain values, such as ``in_channels``."""
        known = vars(nn.Module())
        return {name: value for name, value in vars(self.module).items() if name not in known and _is_plain(value)}

    def changed(self) -> str | None:
        """Return the name of the first layer that a node has changed, as in ``named_modules``; None without one."""
        now: dict[str, nn.Module] = dict(self.module.named_modules())
        for name, before in self._before.items():
            if name not in now or not _same(_held(now[name]), before):
                return name
        added = [name for name in now if name not in self._before]
        return added[0] if added else None


def _refuse(action: str, layer: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise layers_unavailable(f"a node {action} the layer {layer}")


def _held(layer: nn.Module) -> dict[str, Any]:
    """Return a layer's class and what it holds."""
    held = {name: value for name, value in vars(layer).items() if name not in _IGNORED}
    held["__class__"] = type(layer)
    return held


def _state(layer: nn.Module) -> dict[str, Any]:
    """Return ``_held`` with copies of dicts and lists: hooks and children are in these."""
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in _held(layer).items()}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    # What is the same object needs no call: a large model has ten thousand of these dicts.
    return all(_same_value(value, other[name]) for name, value in one.items() if value is not other[name])


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return (not one and not other) or _same(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_value, one, other))
    return one is other or (_is_plain(one) and one == other)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
