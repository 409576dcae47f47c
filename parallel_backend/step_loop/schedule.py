"""The calls of an approximate step loop that are exact all the same."""

from collections.abc import Sequence


def whole_calls(steps: Sequence[int | None], experts: Sequence[str], warmup: int) -> list[bool]:
    """Which calls are on the whole latent: those of the first steps, and of the first with another expert.

    Args:
        steps: by call the step that begins with it; None for a second look within one.
        experts: by call the name of the transformer.
    """
    whole, begun, current = [], 0, 0
    for i, step in enumerate(steps):
        current = current if step is None else step
        begun = current if i and experts[i] != experts[i - 1] else begun
        whole.append(current - begun < warmup)
    return whole
