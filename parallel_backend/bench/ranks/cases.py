"""The models that are measured and what a step is given: real widths of heads, few layers, random weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.geometry import LATENT, TIMESTEP
from ...verify.forward.examples import write


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that is measured.

    Attributes:
        class_name: of diffusers; ``config``: its arguments.
        frames: sizes of the latent before height and width; ``inputs``: shapes behind the batch, beside the text.
        text: width of the text.
        time: the timestep, in the family's own scale.
    """

    class_name: str
    config: Mapping[str, Any]
    frames: tuple[int, ...]
    inputs: Mapping[str, tuple[int, ...]]
    text: int
    time: float


SUBJECTS: dict[str, Subject] = {
    "flux": Subject(
        class_name="FluxTransformer2DModel",
        config={
            "num_layers": 2, "num_single_layers": 4, "num_attention_heads": 8, "attention_head_dim": 64,
            "joint_attention_dim": 512, "pooled_projection_dim": 256, "axes_dims_rope": (16, 24, 24),
        },
        frames=(), inputs={"pooled_projections": (256,)}, text=512, time=0.5,
    ),
    "wan": Subject(
        class_name="WanTransformer3DModel",
        config={
            "num_layers": 2, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "text_dim": 512,
        },
        frames=(1,), inputs={}, text=512, time=500.0,
    ),
}  # fmt: skip
"""By the name on the command line. Both have latents of 16 channels and patches of 2 x 2."""


LONGEST_SIDE = 1024
"""Tokens along one side of an image that Wan has positions for."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step that all contestants do. ``branches`` are those of guidance, whose inputs differ in their text.

    Raises:
        InvalidRequest: a number that makes no sense, or no rectangle of so many tokens has sides short enough.
    """

    family: str
    tokens: int
    text_tokens: int
    branches: int

    def __post_init__(self) -> None:
        if self.family not in SUBJECTS:
            raise InvalidRequest(f"--family {self.family!r} is none of {', '.join(SUBJECTS)}")
        if min(self.tokens, self.text_tokens) < 1:
            raise InvalidRequest(
                f"--tokens {self.tokens}, --text-tokens {self.text_tokens}: each is a whole number of at least 1"
            )
        rows, columns = self.grid
        if columns > LONGEST_SIDE:
            raise InvalidRequest(
                f"--tokens {self.tokens}: the squarest image of so many tokens is {rows} x {columns}, and a side has "
                f"at most {LONGEST_SIDE}; 4095, which is 63 x 65, would work"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, as square as can be."""
        rows = max(side for side in range(1, math.isqrt(self.tokens) + 1) if self.tokens % side == 0)
        return rows, self.tokens // rows

    def __str__(self) -> str:
        guided = f", {self.branches} branches" if self.branches > 1 else ""
        return f"{self.family}, {self.tokens} tokens, {self.text_tokens} of text{guided}"

    def inputs(self) -> dict[str, Tensor]:
        """Those of all branches as one batch, branch after branch."""
        subject, generator = SUBJECTS[self.family], torch.Generator().manual_seed(0)
        size = (*subject.frames, *(2 * side for side in self.grid))
        latent = torch.randn(1, 16, *size, generator=generator)
        made = {
            LATENT: latent.expand(self.branches, *latent.shape[1:]).contiguous(),
            TIMESTEP: torch.full((self.branches,), subject.time),
        }
        for name, shape in {"encoder_hidden_states": (self.text_tokens, subject.text), **subject.inputs}.items():
            made[name] = torch.randn(self.branches, *shape, generator=generator)
        return made


def write_model(folder: Path, family: str) -> Path:
    """A checkpoint of the family's subject, the same in every run."""
    import diffusers

    subject = SUBJECTS[family]
    torch.manual_seed(0)
    return write(folder, getattr(diffusers, subject.class_name)(**subject.config))
