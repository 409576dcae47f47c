"""The registry of families. Adding one is a file here, a row below, and a bridge in ``nodes/families``."""

from ..errors import InvalidRequest
from .base import Family, Geometry
from .wan import Wan

FAMILIES: dict[str, type[Family]] = {"WanTransformer3DModel": Wan}
"""Family by the name of its diffusers class."""


def family_of(class_name: str) -> type[Family]:
    """The family of a transformer class.

    Raises:
        InvalidRequest: it is not listed; the message has the list.
    """
    if class_name not in FAMILIES:
        raise InvalidRequest(f"transformer class {class_name} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[class_name]


__all__ = ["FAMILIES", "Family", "Geometry", "family_of"]
