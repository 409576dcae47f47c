"""What ComfyUI's nodes are tried with: a MODEL, its prompts and its latent."""

from dataclasses import dataclass
from typing import Any

from helpers.inside_fixtures import parts_of
from helpers.loras import Lora
from torch import Tensor

TEMPORAL = {"ltx": 8, "ltx2": 8, "mochi": 6}
SPATIAL = {"ltx": 32, "ltx2": 32, "flux2": 16, "minimax_h3": 16}
"""Frames, and rows or columns of the picture, per latent position, where they are not 4 and 8."""

CLIPS = {"minimax_h3": 17}
"""Frames that a VAE encodes by themselves, where those of a whole video do not depend on each other's."""

SOUNDS = {"ltx2": (8, 5, 16), "minimax_h3": (32, 2, 5)}
"""The latent of a sound, where it is not ``OTHER_SOUND``."""
OTHER_SOUND = (8, 5, 4)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is sampled.

    Attributes:
        family: the model's.
        lora: a LoRA of the family.
        model: a MODEL.
        positive: CONDITIONING.
        negative: CONDITIONING.
        latent: LATENT, whose first tensor is the picture's.
    """

    family: str
    lora: Lora
    model: Any
    positive: list[Any]
    negative: list[Any]
    latent: dict[str, Any]

    @property
    def picture(self) -> Tensor:
        """The picture's latent."""
        return parts_of(self.latent["samples"])[0]

    @property
    def sound(self) -> Tensor | None:
        """The sound's latent, if the model makes one."""
        return next(iter(parts_of(self.latent["samples"])[1:]), None)

    @property
    def scale(self) -> tuple[int, int]:
        """Frames, and rows or columns, per latent position."""
        return TEMPORAL.get(self.family, 4), SPATIAL.get(self.family, 8)

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the latent's picture."""
        shape, spatial = self.picture.shape, self.scale[1]
        frames = self._frames(shape[2]) if len(shape) == 5 else 1
        return frames, shape[-2] * spatial, shape[-1] * spatial

    def positions(self, frames: int) -> int:
        """Return how many latent positions a video has: of every clip one for its first frame."""
        temporal, clip = self.scale[0], CLIPS.get(self.family, frames)
        lengths = [min(clip, frames - start) for start in range(0, frames, clip)]
        return sum((length - 1) // temporal + 1 for length in lengths)

    def _frames(self, positions: int) -> int:
        """Return how many frames a latent has."""
        return next(count for count in range(1, positions * self.scale[0] + 1) if self.positions(count) == positions)

    @property
    def sound_shape(self) -> tuple[int, ...]:
        """The latent of a short sound."""
        return 1, *SOUNDS.get(self.family, OTHER_SOUND)
