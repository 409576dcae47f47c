"""How much picture and sound hear and see of each other, as a guidance that tells them apart needs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class AcrossShares:
    """Multiplies what a layer's picture hears, and what its sound sees. Outside of ``by`` it changes nothing.

    Args:
        layer: a block of diffusers' transformer.
    """

    def __init__(self, layer: Any) -> None:
        self._shares: Tensor | None = None
        for i, attention in enumerate((layer.audio_to_video_attn, layer.video_to_audio_attn)):
            attention.register_forward_hook(self._hook(i))

    @contextmanager
    def by(self, shares: Tensor | None) -> Iterator[None]:
        """Multiply in what runs inside.

        Args:
            shares: of what the picture hears and of what the sound sees, ``[B, 2]``. None changes nothing.
        """
        self._shares = shares
        try:
            yield
        finally:
            self._shares = None

    def _hook(self, i: int) -> Any:
        def multiply(module: nn.Module, arguments: Any, out: Tensor) -> Tensor | None:
            return None if self._shares is None else out * self._shares[:, i, None, None].to(out.dtype)

        return multiply
