"""How Open-Sora 2.0 spreads its sampling times, as the authors' sampler does."""

import math
from collections.abc import Sequence

_FEW, _MANY = (256, 1.0), (4096, 3.0)
"""Tokens of one frame with the shift for them. Between and beyond these, the shift is on the line through both."""

_PATCH = 2


def shift(size: Sequence[int]) -> float:
    """Return the shift of the times for a latent of this size, ``(frames, rows, columns)``.

    It is the ``shift`` of ComfyUI's *ModelSamplingSD3*: a time t becomes ``shift * t / (1 + (shift - 1) * t)``.
    """
    frames, rows, columns = size
    tokens = -(-rows // _PATCH) * -(-columns // _PATCH)
    slope = (_MANY[1] - _FEW[1]) / (_MANY[0] - _FEW[0])
    return (_FEW[1] + slope * (tokens - _FEW[0])) * math.sqrt(frames)


def times(steps: int, size: Sequence[int]) -> list[float]:
    """Return the times from 1 to 0 of a sampling with this number of steps."""
    factor = shift(size)
    even = [1 - step / steps for step in range(steps + 1)]
    return [factor * time / (1 + (factor - 1) * time) for time in even]
