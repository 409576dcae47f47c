"""Checks of what a request says about a step cache."""

from collections.abc import Mapping

from ..errors import InvalidRequest
from ..interfaces.geometry import Shape
from ..layout.parallel_layout import ParallelLayout
from ..protocol.messages import POSITION, Forward, Sample


def check_position(message: Forward, shapes: Mapping[str, Shape]) -> None:
    """Refuse a cache without a position, and a position without a cache.

    Args:
        shapes: of the tensors that belong to no branch.

    Raises:
        InvalidRequest: the tensor is missing, has another shape, or has no use.
    """
    shape = shapes.get(POSITION)
    if message.cache is None and shape is not None:
        raise InvalidRequest(f"{POSITION} has no use without a step cache: leave it out")
    if message.cache is not None and shape != (2,):
        given = "is missing" if shape is None else f"has shape {list(shape)}"
        raise InvalidRequest(
            f"{POSITION} {given}: a step cache needs the place in the schedule and the number of steps, [2]"
        )


def check_decided(message: Forward, layout: ParallelLayout) -> None:
    """Refuse a cache that decides by the first block where a rank lacks it.

    Raises:
        InvalidRequest: the layout has pipeline stages.
    """
    if message.cache is not None and message.cache.method != "schedule" and layout.pipe > 1:
        raise InvalidRequest(
            f"step cache method={message.cache.method} looks at the first block, which only the first stage of "
            f"pipe={layout.pipe} has: use method=schedule, or a layout without pipe"
        )


def check_cached_loop(message: Sample, layout: ParallelLayout) -> None:
    """Refuse a cache in a loop that forecasts in a way of its own, or has no whole predictions.

    Raises:
        InvalidRequest: the layout has pipeline stages, or is approximate. The message says what would work.
    """
    if message.cache is None or not (layout.approximate or layout.pipe > 1):
        return
    kind = layout.approximation or "pipeline stages"
    raise InvalidRequest(
        f'a step cache does not work with layout "{layout}" ({kind}) in the backend\'s step loop: switch the cache '
        "off, or use a layout of cfg, data, ulysses, ring and tensor"
    )
