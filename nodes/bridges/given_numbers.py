"""Numbers that other nodes hand over, as the plain ones that messages hold.

ComfyUI's own functions calculate with whatever a link carries: an int for a float, a bool, a NumPy number, a tensor.
"""

import math
from numbers import Real
from typing import Any

from ...parallel_backend.errors import InvalidRequest


def as_float(value: Any, name: str) -> float:
    """Return a number as a float.

    Args:
        value: the number, or a tensor or array that holds only this number.
        name: what it is, for the message.

    Raises:
        InvalidRequest: it is several numbers, none, NaN or infinite.
    """
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError) as error:  # torch's and NumPy's
        raise InvalidRequest(f"{name} has the shape {list(value.shape)}: a single number is needed") from error
    if not isinstance(number, Real):
        raise InvalidRequest(f"{name} is {number!r}: a number is needed")
    try:
        plain = float(number)
    except OverflowError:
        plain = math.inf
    if not math.isfinite(plain):
        raise InvalidRequest(f"{name} is {plain}: a finite number is needed; check the node that made it")
    return plain


def as_int(value: Any, name: str) -> int:
    """Return a whole number as an int. See ``as_float``.

    Raises:
        InvalidRequest: see ``as_float``, or it is not whole.
    """
    number = as_float(value, name)
    if not number.is_integer():
        raise InvalidRequest(f"{name} is {number:g}: a whole number is needed")
    return int(value)
