"""The reader recognizes drawn scenes, and finds no shape where none was drawn."""

import random

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image, ImageDraw

from training.reader import read
from training.scenes import COLOURS, SHAPES, Scene, draw, random_placement, random_scene

SIZES = [(1, 64, 64), (1, 96, 160), (1, 192, 128), (9, 64, 64), (17, 80, 112)]


def drawn(rng: random.Random, frames: int, height: int, width: int) -> tuple[Scene, np.ndarray]:
    scene = random_scene(rng, moving=frames > 1)
    place = random_placement(rng, scene, height, width)
    return scene, draw(scene, place, height=height, width=width, frames=frames)


@pytest.mark.parametrize(("frames", "height", "width"), SIZES)
def test_reads_rendered_scenes_without_a_miss(frames: int, height: int, width: int) -> None:
    rng = random.Random(7)
    for _ in range(30 if frames == 1 else 10):
        scene, clip = drawn(rng, frames, height, width)
        assert all(read(clip).hits(scene).values()), scene


@pytest.mark.long
def test_reads_scenes_that_passed_the_vae(pipeline: WanPipeline) -> None:
    rng = random.Random(8)
    hits: list[bool] = []
    for _ in range(12):
        scene, clip = drawn(rng, 9, 96, 96)
        pixels = torch.from_numpy(clip).permute(3, 0, 1, 2)[None] * 2 - 1
        with torch.no_grad():
            decoded = pipeline.vae.decode(pipeline.vae.encode(pixels).latent_dist.mode()).sample
        hits.extend(read((decoded[0].permute(1, 2, 3, 0).numpy() + 1) / 2).hits(scene).values())
    assert np.mean(hits) >= 0.97


def test_reads_no_shape_in_noise_or_blank_pictures() -> None:
    noise = np.random.default_rng(0).random((1, 96, 96, 3), dtype=np.float32)
    blank = np.full((5, 96, 96, 3), 0.4, np.float32)
    assert read(noise).shape is None
    assert read(blank) == read(blank[:1])
    assert (read(blank).shape, read(blank).direction) == (None, None)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_told_apart_by_their_outline_alone(shape: str) -> None:
    scene = Scene(shape=shape, colour="red", background="blue")
    clip = draw(scene, random_placement(random.Random(1), scene, 96, 96), height=96, width=96)
    assert read(clip).shape == shape


@pytest.mark.parametrize(
    "outline",
    [
        [(50, 10), (90, 50), (50, 90), (10, 50)],
        [(10, 40), (90, 40), (90, 60), (10, 60)],
        [(10, 10), (50, 10), (50, 60), (90, 60), (90, 90), (10, 90)],
    ],
    ids=["diamond", "bar", "L"],
)
def test_other_shapes_are_none(outline: list[tuple[int, int]]) -> None:
    picture = Image.new("RGB", (96, 96), COLOURS["blue"])
    ImageDraw.Draw(picture).polygon(outline, fill=COLOURS["red"])
    reading = read(np.asarray(picture, np.float32)[None] / np.float32(255))
    assert (reading.shape, reading.colour, reading.background) == (None, "red", "blue")
