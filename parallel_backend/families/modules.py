"""The module classes of families: diffusers' own, or ours for models that diffusers does not have."""

from importlib import import_module
from typing import Any

from ..packages import check_diffusers
from .registry import FAMILIES


def module_class_of(class_name: str) -> Any:
    """Return the module class of this name, such as a transformer's or a VAE's.

    Raises:
        AttributeError: there is none.
        InvalidRequest: the installed diffusers is too old for it.
    """
    row = FAMILIES.get(class_name)
    if row is not None:
        check_diffusers(class_name, row.since)
    if row is not None and row.own_module:
        return getattr(import_module(f".{row.folder}.module", __package__), class_name)
    import diffusers

    return getattr(diffusers, class_name)
