"""The models and inputs of benchmarks: heads of a real model's size, few layers, random weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_backend.errors import InvalidRequest
from parallel_backend.interfaces.geometry import LATENT, TIMESTEP
from parallel_backend.verify.examples import write_checkpoint


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A model to time.

    Attributes:
        class_name: class of diffusers.
        config: arguments of the class.
        frames: sizes of the latent's dims before height and width.
        channels: of the latent.
        peers: whether the other projects of ``peers`` can split it.
        inputs: by name, shapes after the batch dim of inputs other than latent, timestep and text.
        text: width of the text embeddings.
        time: the timestep, on the family's own scale.
        texts: names of the inputs that are text embeddings.
        patch: rows and columns of the latent that are one token.
    """

    class_name: str
    config: Mapping[str, Any]
    frames: tuple[int, ...]
    inputs: Mapping[str, tuple[int, ...]]
    text: int
    time: float
    channels: int = 16
    peers: bool = True
    texts: tuple[str, ...] = ("encoder_hidden_states",)
    patch: int = 2


MODELS: dict[str, BenchModel] = {
    "flux": BenchModel(
        class_name="FluxTransformer2DModel",
        config={
            "num_layers": 2, "num_single_layers": 4, "num_attention_heads": 8, "attention_head_dim": 64,
            "joint_attention_dim": 512, "pooled_projection_dim": 256, "axes_dims_rope": (16, 24, 24),
        },
        frames=(), inputs={"pooled_projections": (256,)}, text=512, time=0.5,
    ),
    "wan": BenchModel(
        class_name="WanTransformer3DModel",
        config={
            "num_layers": 2, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "text_dim": 512,
        },
        frames=(1,), inputs={}, text=512, time=500.0,
    ),
    "latte": BenchModel(
        class_name="LatteTransformer3DModel",
        config={
            "num_layers": 2, "num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8,
            "cross_attention_dim": 1152, "attention_bias": True, "sample_size": 64, "patch_size": 2,
            "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
            "caption_channels": 512, "video_length": 16,
        },
        frames=(16,), inputs={}, text=512, time=500.0, channels=4, peers=False,
    ),
    # 121 frames of 1280 x 704 are 14,080 tokens, with 126 of sound and 1,024 of text: 4,096 with 37 and 298.
    "ltx2": BenchModel(
        class_name="LTX2VideoTransformer3DModel",
        config={
            "num_layers": 2, "num_attention_heads": 8, "attention_head_dim": 128, "cross_attention_dim": 1024,
            "audio_num_attention_heads": 8, "audio_attention_head_dim": 64, "audio_cross_attention_dim": 512,
            "caption_channels": 960, "rope_type": "split",
        },
        frames=(16,), inputs={"audio_hidden_states": (8, 37, 16)}, text=960, time=0.5, channels=128, peers=False,
        texts=("encoder_hidden_states", "audio_encoder_hidden_states"), patch=1,
    ),
}  # fmt: skip
"""By the name on the command line."""


LONGEST_SIDE = 1024
"""Tokens along one side of an image for which Wan has positions."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The step that all contestants run.

    Attributes:
        family: one of ``MODELS``.
        tokens: of the latent, all frames together.
        text_tokens: of the text.
        branches: guidance branches, which differ in their text.
        frames: of the latent; 0 for those of the family's entry in ``MODELS``.

    Raises:
        InvalidRequest: the family is unknown or has no frames, a number is below 1, or every rectangle with this number
            of tokens has a side longer than ``LONGEST_SIDE``.
    """

    family: str
    tokens: int
    text_tokens: int
    branches: int
    frames: int = 0

    def __post_init__(self) -> None:
        if self.family not in MODELS:
            raise InvalidRequest(f"--family {self.family!r} does not exist; choose one of {', '.join(MODELS)}")
        if min(self.tokens, self.text_tokens) < 1:
            raise InvalidRequest(f"--tokens {self.tokens}, --text-tokens {self.text_tokens}: each must be at least 1")
        model = MODELS[self.family]
        if self.frames and (not model.frames or "video_length" in model.config):
            raise InvalidRequest(f"--frames {self.frames}: the number of {self.family} is fixed, so leave it out")
        frames = math.prod(self._size)
        if frames < 1:
            raise InvalidRequest(f"--frames {self.frames}: at least one is needed")
        if self.tokens % frames:
            raise InvalidRequest(
                f"--tokens {self.tokens}: {self.family} has {frames} frames, so give a multiple of that"
            )
        rows, columns = self.grid
        if columns > LONGEST_SIDE:
            raise InvalidRequest(
                f"--tokens {self.tokens}: the squarest image of that many tokens is {rows} x {columns}, and a side has "
                f"at most {LONGEST_SIDE}; 4095, which is 63 x 65, would work"
            )

    @property
    def _size(self) -> tuple[int, ...]:
        """Sizes of the latent's dims before height and width."""
        return (self.frames,) if self.frames else MODELS[self.family].frames

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the tokens of a frame, as square as possible."""
        tokens = self.tokens // math.prod(self._size)
        rows = max(side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0)
        return rows, tokens // rows

    def __str__(self) -> str:
        guided = f", {self.branches} branches" if self.branches > 1 else ""
        frames = f" in {self.frames} frames" if self.frames else ""
        return f"{self.family}, {self.tokens} tokens{frames}, {self.text_tokens} text tokens{guided}"

    def inputs(self) -> dict[str, Tensor]:
        """Seeded inputs of all branches, concatenated along the batch."""
        model, generator = MODELS[self.family], torch.Generator().manual_seed(0)
        size = (*self._size, *(model.patch * side for side in self.grid))
        latent = torch.randn(1, model.channels, *size, generator=generator)
        tensors = {
            LATENT: latent.expand(self.branches, *latent.shape[1:]).contiguous(),
            TIMESTEP: torch.full((self.branches,), model.time),
        }
        texts = dict.fromkeys(model.texts, (self.text_tokens, model.text))
        for name, shape in {**texts, **model.inputs}.items():
            tensors[name] = torch.randn(self.branches, *shape, generator=generator)
        return tensors


def write_model(folder: Path, family: str) -> Path:
    """Write a checkpoint of the family's model, with the same weights in every run."""
    import diffusers

    model = MODELS[family]
    torch.manual_seed(0)
    return write_checkpoint(folder, getattr(diffusers, model.class_name)(**model.config))
