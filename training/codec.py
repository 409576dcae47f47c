"""The latent space of "shapes", fixed before any network is trained: a linear code of 8 x 8 pixel blocks.

The 16 principal components of the blocks of many scenes keep 99.4 % of their variance. With them as targets, the VAE
need not slowly learn a latent space: its encoder learns to compute the code and its decoder to turn the code into
pixels, each by plain regression. The transformer trains on exact latents that take no time to compute.

A clip is coded by its first frame and every fourth frame after it, which is how Wan's causal VAE groups frames. The
decoder fills in the frames between.

    python -m training.codec    # fits a new code, after which everything must be trained again
"""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.scenes import draw, random_placement, random_scene

FILE = Path(__file__).with_name("codec.safetensors")
CHANNELS = 16
BLOCK = 8
FRAME_STRIDE = 4
FITTED_SCENES = 600
FLAT = 0.1
"""Standard deviation of a block's values below which the block contains no edge."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """The code ``latent = (components @ (block - mean) - shift) / scale``. Each channel has mean 0 over the scenes.

    The scale of a component is the square root of its standard deviation. Colour (2.5) thus stays larger than detail
    (0.4) and emerges earlier in a denoising schedule. At equal size, the many details would drown out what a caption
    says. The mean variance is near 1.

    Attributes:
        components: ``[16, 192]``.
        mean: ``[192]``.
        shift: ``[16]``.
        scale: ``[16]``.
    """

    components: Tensor
    mean: Tensor
    shift: Tensor
    scale: Tensor

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels ``[B, 3, 4 T' - 3, H, W]`` in -1..1 to latents ``[B, 16, T', H / 8, W / 8]``."""
        return self.encode_frames(pixels[:, :, ::FRAME_STRIDE])

    def encode_frames(self, pixels: Tensor) -> Tensor:
        """Encode the coded frames alone, ``[B, 3, T', H, W]``, to latents ``[B, 16, T', H / 8, W / 8]``."""
        blocks = rearrange(pixels, "b c t (h p) (w q) -> b t h w (p q c)", p=BLOCK, q=BLOCK)
        code = (blocks - self.mean) @ self.components.T
        return rearrange((code - self.shift) / self.scale, "b t h w c -> b c t h w")

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents linearly to the coded frames ``[B, 3, T', H, W]``: the baseline for a trained decoder."""
        code = rearrange(latents, "b c t h w -> b t h w c") * self.scale + self.shift
        blocks = code @ self.components + self.mean
        return rearrange(blocks, "b t h w (p q c) -> b c t (h p) (w q)", p=BLOCK, q=BLOCK)


@cache
def shapes_codec() -> Codec:
    """Load the code on which all parts of the checkpoint are trained."""
    return Codec(**load_file(FILE))


def fit() -> Codec:
    """Fit a code to seeded scenes. It depends on how scenes are drawn, so the code in use is kept in a file."""
    blocks = _blocks_of_scenes()
    edges = blocks.std(dim=1) > FLAT
    fitted = torch.cat([blocks[edges], blocks[~edges][: int(edges.sum())]]).double()
    mean = fitted.mean(dim=0)
    _, directions = torch.linalg.eigh((fitted - mean).T @ (fitted - mean))
    components = directions[:, -CHANNELS:].flip(1).T
    components = components * components.sum(dim=1, keepdim=True).sign()
    code = (blocks.double() - mean) @ components.T
    return Codec(
        components=components.float(),
        mean=mean.float(),
        shift=code.mean(dim=0).float(),
        scale=code.std(dim=0).sqrt().float(),
    )


def _blocks_of_scenes() -> Tensor:
    """Return the pixel blocks of random scenes in random order, ``[blocks, 192]``."""
    rng = random.Random(16)
    parts = []
    for _ in range(FITTED_SCENES):
        height, width = (rng.choice((64, 96, 128, 160, 192, 256)) for _ in range(2))
        scene = random_scene(rng, moving=False)
        picture = draw(scene, random_placement(rng, scene, height, width), height=height, width=width)[0] * 2 - 1
        parts.append(torch.from_numpy(np.ascontiguousarray(picture)))
    blocks = [rearrange(part, "(h p) (w q) c -> (h w) (p q c)", p=BLOCK, q=BLOCK) for part in parts]
    order = torch.randperm(sum(map(len, blocks)), generator=torch.Generator().manual_seed(16))
    return torch.cat(blocks)[order]


if __name__ == "__main__":
    save_file({name: tensor.contiguous() for name, tensor in vars(fit()).items()}, FILE)
