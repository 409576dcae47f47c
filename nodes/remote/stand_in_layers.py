"""Layers without weights that stand where a node looks for the transformer's, and the proof that it left them alone.

A node that walks through ``modules()`` and wraps the linear layers it finds would change nothing on the ranks.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

_IGNORED = frozenset({"training", "_parameters"})
_PLAIN = (bool, int, float, str, type(None))


class StandInLayers:
    """The modules of ComfyUI's own transformer, on the meta device, that belong to no model.

    Args:
        module: ComfyUI's transformer on the meta device. Its weights become plain attributes, so that none of ComfyUI's
            functions that load or count weights finds them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()
        for layer in module.modules():
            for name, weight in list(layer._parameters.items()):
                del layer._parameters[name]
                layer.__dict__[name] = weight
        self._before: dict[str, dict[str, Any]] = {name: _state(layer) for name, layer in module.named_modules()}

    @property
    def numbers(self) -> dict[str, Any]:
        """The transformer's attributes that are plain values, such as ``in_channels``."""
        known = vars(nn.Module())
        return {name: value for name, value in vars(self.module).items() if name not in known and _is_plain(value)}

    def changed(self) -> str | None:
        """Return the name of the first layer that is not as it was, or None. Names are those of ``named_modules``."""
        now: dict[str, nn.Module] = dict(self.module.named_modules())
        for name, before in self._before.items():
            if name not in now or not _same(_state(now[name]), before):
                return name
        added = [name for name in now if name not in self._before]
        return added[0] if added else None


def _state(layer: nn.Module) -> dict[str, Any]:
    """Return what a layer holds, with copies of dicts and lists: hooks and children are in these."""
    return {name: _copied(value) for name, value in vars(layer).items() if name not in _IGNORED}


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_same_value(value, other[name]) for name, value in one.items())


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return _same(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_value, one, other))
    return one is other or (_is_plain(one) and one == other)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
