"""Batches of scenes, in the sizes on which the checkpoint is trained."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from training.codec import FRAME_STRIDE, shapes_codec
from training.scenes import Scene, draw, random_placement, random_scene

CLIP_SHARE = 0.5
"""Share of batches that are clips."""
SPREAD = 0.3
"""Small, so that shapes stay near the middle: captions do not name positions, which would be much to learn."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A size of scenes.

    Attributes:
        frames: 1 for a still.
        height: in pixels.
        width: in pixels.
        weight: relative frequency.
    """

    frames: int
    height: int
    width: int
    weight: float

    @property
    def tokens(self) -> int:
        """Tokens of one scene; a token covers 16 x 16 pixels of a latent frame."""
        return ((self.frames - 1) // FRAME_STRIDE + 1) * (self.height // 16) * (self.width // 16)


def _stills() -> list[Bucket]:
    sizes = {
        (64, 64): 1, (96, 96): 6, (112, 112): 4, (128, 128): 6, (96, 160): 3, (160, 96): 3, (144, 80): 2,
        (80, 144): 2, (192, 128): 1, (128, 192): 1, (160, 160): 1, (192, 192): 2, (144, 256): 1, (256, 256): 1,
    }  # fmt: skip
    return [Bucket(frames=1, height=h, width=w, weight=float(n)) for (h, w), n in sizes.items()]


def _clips() -> list[Bucket]:
    sizes = {
        (17, 64, 64): 1, (17, 64, 80): 1, (17, 80, 64): 1, (17, 96, 96): 4, (17, 80, 112): 2, (17, 112, 80): 2,
        (17, 128, 128): 7, (17, 112, 144): 2, (17, 144, 112): 2, (25, 64, 64): 1, (33, 64, 64): 1, (9, 96, 96): 1,
    }  # fmt: skip
    return [Bucket(frames=f, height=h, width=w, weight=float(n)) for (f, h, w), n in sizes.items()]


STILLS, CLIPS = _stills(), _clips()


def random_bucket(rng: random.Random) -> Bucket:
    """Draw a size, with probability ``CLIP_SHARE`` that of a clip. A batch holds fewer clips than stills."""
    buckets = CLIPS if rng.random() < CLIP_SHARE else STILLS
    return rng.choices(buckets, [bucket.weight for bucket in buckets])[0]


def random_clip(rng: random.Random, bucket: Bucket, *, stride: int = 1) -> tuple[Scene, Tensor]:
    """Draw a random scene; return it and every ``stride``-th frame, ``[3, T, H, W]`` in -1..1."""
    scene = random_scene(rng, moving=bucket.frames > 1)
    place = random_placement(rng, scene, bucket.height, bucket.width, spread=SPREAD)
    clip = draw(scene, place, height=bucket.height, width=bucket.width, frames=bucket.frames, stride=stride)
    return scene, torch.from_numpy(clip).permute(3, 0, 1, 2) * 2 - 1


def random_latents(rng: random.Random, bucket: Bucket, count: int) -> tuple[Tensor, list[Scene]]:
    """Return latents ``[count, 16, T', H / 8, W / 8]`` of random scenes, of which only the coded frames are drawn."""
    drawn = [random_clip(rng, bucket, stride=FRAME_STRIDE) for _ in range(count)]
    return shapes_codec().encode_frames(torch.stack([pixels for _, pixels in drawn])), [scene for scene, _ in drawn]
