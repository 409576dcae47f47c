"""``balance``: how the relative speeds of a layout's ranks are written and read."""

from collections.abc import Sequence

from ..errors import InvalidRequest

MAX_SPEED = 1000
"""Largest relative speed. The smallest is its reciprocal."""


Speeds = tuple[float, ...]


def parse_balance(text: str) -> tuple[Speeds, Speeds]:
    """Parse speeds such as ``"2:1"``, or ``"2:1/3:1"`` where those of attention differ.

    Returns:
        ``balance`` and ``attention_balance`` of a layout; empty if the text does not give them.

    Raises:
        InvalidRequest: a speed is not a number.
    """
    both, slash, attention = text.partition("/")
    try:
        speeds = tuple(map(float, both.split(":"))) if text.strip() else ()
        return speeds, tuple(map(float, attention.split(":"))) if slash else ()
    except ValueError as error:
        raise InvalidRequest(
            f"layout balance={text}: write speeds as numbers above 0, such as 2:1, or 2:1/3:1 where those of attention "
            "differ"
        ) from error


def format_balance(balance: Sequence[float], attention: Sequence[float]) -> str:
    """Return the word of a layout's text that ``parse_balance`` reads."""
    both = (":".join(f"{speed:g}" for speed in speeds) for speeds in (balance, attention) if speeds)
    return "balance=" + "/".join(both)


def check_speeds(balance: Sequence[float], attention: Sequence[float]) -> None:
    """Refuse speeds that are out of range.

    Raises:
        InvalidRequest: a speed is.
    """
    if any(not 1 / MAX_SPEED <= speed <= MAX_SPEED for speed in (*balance, *attention)):
        raise InvalidRequest(
            f"layout {format_balance(balance, attention)}: speeds must be numbers from {1 / MAX_SPEED:g} to "
            f"{MAX_SPEED}, such as balance=2:1"
        )
