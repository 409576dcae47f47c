"""What ComfyUI's nodes are tried with: a MODEL, its prompts and its latent."""

from dataclasses import dataclass
from typing import Any

from helpers.loras import Lora

TEMPORAL = {"ltx": 8, "mochi": 6}
SPATIAL = {"ltx": 32, "flux2": 16}
"""Frames, and rows or columns of the picture, per latent position, where they are not 4 and 8."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is sampled.

    Attributes:
        family: the model's.
        lora: a LoRA of the family.
        model: a MODEL.
        positive: CONDITIONING.
        negative: CONDITIONING.
        latent: LATENT.
    """

    family: str
    lora: Lora
    model: Any
    positive: list[Any]
    negative: list[Any]
    latent: dict[str, Any]

    @property
    def scale(self) -> tuple[int, int]:
        """Frames, and rows or columns, per latent position."""
        return TEMPORAL.get(self.family, 4), SPATIAL.get(self.family, 8)

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the latent's picture."""
        shape, (temporal, spatial) = self.latent["samples"].shape, self.scale
        frames = (shape[2] - 1) * temporal + 1 if len(shape) == 5 else 1
        return frames, shape[-2] * spatial, shape[-1] * spatial
