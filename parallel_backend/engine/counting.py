"""Counts the layers of modules that are diffusers' or transformers' own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..progress import PROGRESS


@contextmanager
def counted(module: nn.Module, phase: str) -> Iterator[None]:
    """Work in a phase, and count every innermost layer of a module that computes, while the context lasts."""

    def count(*_: Any) -> None:
        PROGRESS.tick()

    layers = [layer for layer in module.modules() if not any(True for _ in layer.children())]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with PROGRESS.phase(phase):
            yield
    finally:
        for hook in hooks:
            hook.remove()
