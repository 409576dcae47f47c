"""Open-Sora 2.0's guidance by text and by given frames, as the authors' sampler has it."""

from dataclasses import dataclass

import torch
from torch import Tensor

_STEADY = 10
"""The last step before the scales oscillate."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The scales of one step.

    Attributes:
        text: of the prompt's branch over the negative prompt's.
        frames: of the negative prompt's branch over the one without given frames. A tensor ``[1, 1, T, 1, 1]`` has one
            scale a latent frame.
    """

    text: float
    frames: float | Tensor

    @property
    def needs_without_frames(self) -> bool:
        """Whether the branch without given frames counts."""
        return isinstance(self.frames, Tensor) or self.frames != 1.0

    @property
    def needs_negative(self) -> bool:
        """Whether the negative prompt's branch counts."""
        return self.text != 1.0 or self.needs_without_frames

    def combine(self, positive: Tensor, negative: Tensor | None, without_frames: Tensor | None) -> Tensor:
        """Return the guided prediction ``[B, C, T, H, W]``. A branch that does not count may be None."""
        if negative is None:
            return positive
        by_text = self.text * (positive - negative)
        if without_frames is None:
            return negative + by_text
        return without_frames + self.frames * (negative - without_frames) + by_text


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How strongly prompt and given frames guide a sampling.

    Attributes:
        text: the scale of the prompt.
        frames: the scale of given frames.
        oscillates: whether both are 1 in odd steps from step 11 on, so that one branch is enough there.
        ramp: whether the scale of given frames rises over the frames and falls over the steps. So it is with given
            images, and not with given clips.
    """

    text: float
    frames: float
    oscillates: bool
    ramp: bool

    def at(self, step: int, steps: int, latent_frames: int) -> Scales:
        """Return the scales of a step, counted from 0."""
        if self.oscillates and step > _STEADY and step % 2:
            return Scales(text=1.0, frames=1.0)
        if not self.ramp or self.frames <= 1.0:
            return Scales(text=self.text, frames=self.frames)
        highest = torch.linspace(self.frames, 1.0, steps + 1)[step].item()
        return Scales(text=self.text, frames=torch.linspace(1.0, highest, latent_frames).reshape(1, 1, -1, 1, 1))
