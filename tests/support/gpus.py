"""Hide the GPUs from all tests except those in ``tests/gpu``, so that devices "0,1,2" mean CPU ranks everywhere."""

import os

from parallel_backend.client import gpus
from parallel_backend.protocol.model_spec import VISIBLE as NAMES

VISIBLE = gpus.visible()
"""The variables that say which GPUs there are, before ``hide``."""


def hide() -> None:
    """Hide all GPUs from this process and from those that it starts."""
    _set({"CUDA_VISIBLE_DEVICES": ""})


def start(visible: tuple[tuple[str, str], ...]) -> None:
    """Show GPUs to this process again, with full float32. Call it before anything initialises CUDA."""
    _set(dict(visible))
    from parallel_backend.verify.full_float32 import disable_tf32

    disable_tf32()


def _set(variables: dict[str, str]) -> None:
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(variables)
