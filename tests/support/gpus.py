"""Hide the GPUs from all tests except those in ``tests/gpu``, so that devices "0,1,2" mean CPU ranks everywhere."""

import os

_NAME = "CUDA_VISIBLE_DEVICES"

VISIBLE = os.environ.get(_NAME)
"""The variable's value before ``hide``; None if it is not set."""


def hide() -> None:
    """Hide all GPUs from this process and from those that it starts."""
    os.environ[_NAME] = ""


def start(visible: str | None) -> None:
    """Show GPUs to this process again, with full float32. Call it before anything initialises CUDA."""
    os.environ.pop(_NAME, None)
    if visible is not None:
        os.environ[_NAME] = visible
    from parallel_backend.verify.full_float32 import disable_tf32

    disable_tf32()
