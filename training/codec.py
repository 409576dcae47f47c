"""The latent space of "shapes", fixed before any network is trained: a linear code of 8 x 8 pixel blocks.

The 16 principal components of the blocks of many scenes keep 99.4 % of their variance. As targets they
spare the VAE the slow search for a code of its own: its encoder learns to give them, its decoder to turn
them into pixels, each by plain regression, and the transformer trains on exact latents that cost nothing.
A clip is coded by its first frame and every fourth frame after it, which is how Wan's causal VAE groups
frames; what lies between two of them is the decoder's to fill in.

    python -m training.codec    # fits it anew: everything has to be trained again after that
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
"""Blocks whose values deviate less than this have no edge in them."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """``latent = (components @ (block - mean) - shift) / scale``, each channel of mean 0 over the scenes.

    ``components`` ``[16, 192]``, ``mean`` ``[192]``, ``shift`` and ``scale`` ``[16]``. The scale is the
    square root of a component's deviation, so colour (2.5) stays larger than detail (0.4) and sets in earlier
    in a denoising schedule; alike in size, the many details would drown what a caption says. The mean
    variance comes out near 1.
    """

    components: Tensor
    mean: Tensor
    shift: Tensor
    scale: Tensor

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents ``[B, 16, T', H / 8, W / 8]`` of pixels ``[B, 3, 4 T' - 3, H, W]`` in -1..1."""
        return self.encode_frames(pixels[:, :, ::FRAME_STRIDE])

    def encode_frames(self, pixels: Tensor) -> Tensor:
        """Latents ``[B, 16, T', H / 8, W / 8]`` of the coded frames ``[B, 3, T', H, W]`` alone."""
        blocks = rearrange(pixels, "b c t (h p) (w q) -> b t h w (p q c)", p=BLOCK, q=BLOCK)
        code = (blocks - self.mean) @ self.components.T
        return rearrange((code - self.shift) / self.scale, "b t h w c -> b c t h w")

    def decode(self, latents: Tensor) -> Tensor:
        """The linear picture ``[B, 3, T', H, W]`` of the coded frames alone: what a decoder has to beat."""
        code = rearrange(latents, "b c t h w -> b t h w c") * self.scale + self.shift
        blocks = code @ self.components + self.mean
        return rearrange(blocks, "b t h w (p q c) -> b c t (h p) (w q)", p=BLOCK, q=BLOCK)


@cache
def shapes_codec() -> Codec:
    """The code that the checkpoint's parts are trained on."""
    return Codec(**load_file(FILE))


def fit() -> Codec:
    """The code of seeded scenes. Scenes drawn another way give another one, so what is in use is kept in a file."""
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
