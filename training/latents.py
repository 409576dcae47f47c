"""Latents of procedural scenes, made once by the frozen VAE encoder and kept in shards.

python -m training.latents --work DIR --shards 400
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from training.scenes import Scene, draw, random_placement, random_scene
from training.train_vae import speed_up_stills


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A size and how often it is drawn."""

    frames: int
    height: int
    width: int
    weight: float


def _stills() -> list[Bucket]:
    sizes = {
        (64, 64): 3, (96, 96): 3, (112, 112): 2, (128, 128): 6, (96, 160): 2, (160, 96): 2, (144, 80): 2,
        (80, 144): 2, (192, 128): 2, (128, 192): 2, (160, 160): 2, (192, 192): 3, (144, 256): 1, (256, 256): 1,
    }  # fmt: skip
    return [Bucket(frames=1, height=h, width=w, weight=float(n)) for (h, w), n in sizes.items()]


def _clips() -> list[Bucket]:
    sizes = {
        (17, 64, 64): 6, (17, 64, 80): 3, (17, 80, 64): 3, (17, 96, 96): 4, (17, 80, 112): 2, (17, 112, 80): 2,
        (17, 128, 128): 1, (25, 64, 64): 2, (33, 64, 64): 1,
    }  # fmt: skip
    return [Bucket(frames=f, height=h, width=w, weight=float(n)) for (f, h, w), n in sizes.items()]


STILLS, CLIPS = _stills(), _clips()
CLIP_SHARE = 0.45
SHARD_STILLS, SHARD_CLIPS = 96, 32


def shard_bucket(index: int) -> Bucket:
    """The size of shard ``index``; nearly every other shard holds clips."""
    rng = random.Random(f"bucket {index}")
    buckets = CLIPS if rng.random() < CLIP_SHARE else STILLS
    return rng.choices(buckets, [bucket.weight for bucket in buckets])[0]


@torch.no_grad()
def encode(vae: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """Normalised latents ``[B, 16, T', H/8, W/8]`` of pixels ``[B, 3, T, H, W]`` in -1..1."""
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    latent: Tensor = vae.encode(pixels).latent_dist.mode()
    return (latent - mean) / std


def random_clip(rng: random.Random, bucket: Bucket) -> tuple[Scene, Tensor]:
    """A scene and its pixels ``[3, T, H, W]`` in -1..1."""
    scene = random_scene(rng, moving=bucket.frames > 1)
    place = random_placement(rng, scene, bucket.height, bucket.width)
    clip = draw(scene, place, height=bucket.height, width=bucket.width, frames=bucket.frames)
    return scene, torch.from_numpy(clip).permute(3, 0, 1, 2) * 2 - 1


def make_shard(vae: AutoencoderKLWan, index: int, file: Path) -> None:
    """Draw and encode shard ``index``; the file appears only when it is whole."""
    rng = random.Random(f"shard {index}")
    bucket = shard_bucket(index)
    drawn = [random_clip(rng, bucket) for _ in range(SHARD_CLIPS if bucket.frames > 1 else SHARD_STILLS)]
    latents = [encode(vae, pixels[None])[0].half() for _, pixels in drawn]
    scenes = [(s.shape, s.colour, s.background, s.direction) for s, _ in drawn]
    torch.save({"latents": torch.stack(latents), "scenes": scenes}, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def load_shard(file: Path) -> tuple[Tensor, list[Scene]]:
    """Normalised latents ``[N, 16, T, h, w]`` and their scenes."""
    shard = torch.load(file, weights_only=True)
    scenes = [Scene(shape=s, colour=c, background=b, direction=d) for s, c, b, d in shard["scenes"]]
    return shard["latents"], scenes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with vae/, as training.fold writes it")
    parser.add_argument("--shards", type=int, default=400)
    args = parser.parse_args()
    vae = AutoencoderKLWan.from_pretrained(args.work / "vae").eval()
    speed_up_stills(vae)
    folder = args.work / "latents"
    folder.mkdir(exist_ok=True)
    began = time.time()
    for index in range(args.shards):
        file = folder / f"{index:05}.pt"
        if not file.exists():
            make_shard(vae, index, file)
            print(f"shard {index} {shard_bucket(index)} {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
