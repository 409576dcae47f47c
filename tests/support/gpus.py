"""The GPUs, which all tests but those in ``tests/gpu`` do without: devices "0,1,2" are CPU ranks on every machine."""

import os

_NAME = "CUDA_VISIBLE_DEVICES"

VISIBLE = os.environ.get(_NAME)
"""What the variable was before ``hide``."""


def hide() -> None:
    """Have this process, and those that it starts, see no GPU."""
    os.environ[_NAME] = ""


def show(visible: str | None) -> None:
    """Have this process see GPUs again, which has to come before anything asks for them."""
    os.environ.pop(_NAME, None)
    if visible is not None:
        os.environ[_NAME] = visible
